"""Where a step of a foreign training loop begins, and whether a rank can still reach the place where it makes its steps. Pure.

The second is read from the bytecode of the functions that the rank is in, if none raises anything: a rank that evaluates, saves or
waits between two steps can make another one; a rank whose loop is over cannot. So a rank that has left its loop is told from one in it
without the program's help, and where nothing shows that a step begins.
"""

import time
from functools import cache
from types import CodeType, FrameType

_EVERY_S = 1.0
_DEEPEST = 200
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")

_Calls = tuple[tuple[CodeType, int], ...]
"""Functions that are being called, the outermost first, and where in its bytecode each is."""


class StepReachability:
    """Where the main thread makes its steps."""

    def __init__(self) -> None:
        self._calls: _Calls = ()
        self._noted = -_EVERY_S

    def note(self, frame: FrameType) -> None:
        """A step is made here. Once a second is enough, for a loop is at the same place each time."""
        now = time.monotonic()
        if now - self._noted >= _EVERY_S:
            self._noted = now
            self._calls = _calls_of(frame)

    def is_open(self, frame: FrameType | None) -> bool | None:
        """Whether the main thread can come to that place again; None where no step was made, or it is not known where it is now.

        Args:
            frame: in which the main thread is.
        """
        if frame is None or not self._calls:
            return None
        for (made, at_step), (code, now) in zip(self._calls, _calls_of(frame), strict=False):
            if made is not code:
                return False
            if leads(code, now, at_step):
                return True
            if now != at_step:  # what it calls from there is something else
                return False
        return None  # it is where it made the step, or within


def _calls_of(frame: FrameType) -> _Calls:
    found: list[tuple[CodeType, int]] = []
    at: FrameType | None = frame
    while at is not None and len(found) < _DEEPEST:
        found.append((at.f_code, at.f_lasti))
        at = at.f_back
    return tuple(reversed(found)) if at is None else ()


def leads(code: CodeType, start: int, end: int) -> bool:
    """Whether a function that is at one place may come to another one, or to the same again, if nothing is raised.

    Args:
        code: of the function.
        start: offset of the bytecode that is being run.
        end: the same, of where it might come.
    """
    follow = _followers(code)
    offsets = sorted(follow)
    first, last = (max((at for at in offsets if at <= place), default=0) for place in (start, end))
    seen: set[int] = set()
    todo = list(follow.get(first, ()))
    while todo:
        at = todo.pop()
        if at == last:
            return True
        if at not in seen:
            seen.add(at)
            todo += follow.get(at, ())
    return False


@cache
def _followers(code: CodeType) -> dict[int, tuple[int, ...]]:
    """Of each instruction, those that may be run after it."""
    import dis  # not before somebody asks

    rows = list(dis.get_instructions(code))
    following = [*(row.offset for row in rows[1:]), None]
    found: dict[int, tuple[int, ...]] = {}
    for row, after in zip(rows, following, strict=True):
        jumps = (row.argval,) if row.opcode in dis.hasjrel or row.opcode in dis.hasjabs else ()
        goes_on = after is not None and row.opname not in _ENDS and row.opname not in _ALWAYS
        found[row.offset] = (*jumps, after) if goes_on and after is not None else jumps
    return found


_ALIKE = 3


class StepStarts:
    """Begins a step with a batch of the loader that it trains on; where it reads none of torch's, with the collective that begins every step.

    A batch for an evaluation, or the barrier after the loop, begins no step. Which loader it trains on is seen at each step: the one that
    was read last before it. Not safe for several threads: all of it is called by the main one.
    """

    def __init__(self) -> None:
        self._trained_on: int | None = None
        self._read: int | None = None
        self._reads = False  # since the last step
        self._by_batches = False  # the last step
        self._has_begun = False
        self._opening = (0, 0)
        self._alike = 0

    def batch(self, rows: object) -> bool:
        """A batch was taken of these rows; whether it begins a step, or goes on with it. None: of what the program itself calls its batches."""
        self._read, self._reads = id(rows), True
        return self._trained_on in (None, self._read)

    def collective(self, kind: int, elements: int) -> bool:
        """A collective is called; whether it begins a step. Only the first after a step may, and where batches are read it sums up the last one."""
        if self._has_begun or self._reads or self._by_batches:
            return False
        self._has_begun = True
        found = (kind, elements)
        self._alike = self._alike + 1 if found == self._opening else 0
        self._opening = found
        return self._alike >= _ALIKE

    def stepped(self) -> None:
        """A step is made."""
        if self._reads:
            self._trained_on = self._read
        self._by_batches = self._reads
        self._reads = self._has_begun = False

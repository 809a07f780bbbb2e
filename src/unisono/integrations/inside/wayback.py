"""Whether a rank can still come to where it makes its steps: by the bytecode of the functions that it is in, if none raises anything.

A rank that evaluates, saves or waits between two steps can; one whose loop is over cannot. That is known without its program's help, and
where nothing shows that a step begins.
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


class WayBack:
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

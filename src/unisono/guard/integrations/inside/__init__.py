"""Code that runs inside the ranks of a foreign program under `unisono run`.

The program is unchanged; only Python's start differs.

`path/sitecustomize.py` is found because its folder is first in PYTHONPATH. It hooks the import of
some modules of torch: once one is loaded, it is passed to the function of this package that `HOOKS`
there names. Nothing here imports torch: the program does.

Here is how the code gets in, and, pure: where a step of a foreign training loop begins, and whether
a rank can still reach the place where it makes its steps. The latter is read from the bytecode of
the functions that the rank is in, if none raises anything: a rank that evaluates, saves or waits
between two steps can make another one; a rank whose loop is over cannot. So a rank that has left
its loop is distinguished from one in it without the program's help, and where nothing shows that a
step begins.
"""

import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from types import CodeType, FrameType

from unisono.guard.integrations.border import VARIABLE

PATH = Path(__file__).parent / "path"
"""The folder that is first in PYTHONPATH; it contains only sitecustomize.py."""

_UNGUARDABLE = {
    "I": "isolated (-I): it reads neither PYTHONPATH nor sitecustomize",
    "E": "started with -E: it reads no PYTHONPATH",
    "S": "started with -S: it reads no sitecustomize",
}


def injected(environment: Mapping[str, str], guard_file: Path) -> dict[str, str]:
    """An environment in which every Python process is guarded, unless its options disable
    sitecustomize.

    Args:
        guard_file: the border's guard.json.
    """
    path = os.pathsep.join(part for part in (str(PATH), environment.get("PYTHONPATH", "")) if part)
    return {**environment, "PYTHONPATH": path, VARIABLE: str(guard_file)}


def why_unguardable(words: Sequence[str]) -> str | None:
    """Why the Python of a command line cannot be guarded; None if it can, or is not Python.

    Args:
        words: the command line, at least one word.
    """
    if not PurePath(words[0]).name.startswith(("python", "pypy")):
        return None
    arguments = iter(words[1:])
    for word in arguments:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        for at, letter in enumerate(word[1:], 2):
            if letter in _UNGUARDABLE:
                return f"this Python is {_UNGUARDABLE[letter]}"
            if letter in "cm":  # the program follows
                return None
            if letter in "WX":  # its value is the rest of the word, or the next one
                if not word[at:]:
                    next(arguments, "")
                break
    return None


# ---- steps of a foreign loop

_EVERY_S = 1.0
_DEEPEST = 200
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")

_Calls = tuple[tuple[CodeType, int], ...]
"""Functions on the stack, the outermost first, each with its offset in the bytecode."""


class StepReachability:
    """The place where the main thread makes its steps, and whether it can be reached again."""

    def __init__(self) -> None:
        self._calls: _Calls = ()
        self._noted = -_EVERY_S

    def note(self, frame: FrameType | None) -> None:
        """Records that a step is made here, at most once per second, since a loop makes steps at
        the same place.
        """
        now = time.monotonic()
        if now - self._noted >= _EVERY_S:
            self._noted = now
            self._calls = _calls_of(frame)

    def is_open(self, frame: FrameType | None) -> bool | None:
        """Whether the main thread can reach that place again; None if no step was made, or its
        position is unknown.
        """
        if frame is None or not self._calls:
            return None
        for (made, at_step), (code, now) in zip(self._calls, _calls_of(frame), strict=False):
            if made is not code:
                return False
            if leads(code, now, at_step):
                return True
            if now != at_step:  # it calls a different function from there
                return False
        return None  # it is at the step, or inside it


def _calls_of(frame: FrameType | None) -> _Calls:
    calls: list[tuple[CodeType, int]] = []
    while frame is not None and len(calls) < _DEEPEST:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(calls)) if frame is None else ()


def leads(code: CodeType, start: int, end: int) -> bool:
    """Whether a function may reach one offset from another, or the same again, if nothing is
    raised.
    """
    follow = _followers(code)
    offsets = sorted(follow)
    first, last = (max((at for at in offsets if at <= offset), default=0) for offset in (start, end))
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
    """For each instruction, those that may follow it."""
    import dis  # imported only when needed

    rows = list(dis.get_instructions(code))
    following = [*(row.offset for row in rows[1:]), None]
    followers: dict[int, tuple[int, ...]] = {}
    for row, after in zip(rows, following, strict=True):
        jumps = (row.argval,) if row.opcode in dis.hasjrel or row.opcode in dis.hasjabs else ()
        continues = after is not None and row.opname not in _ENDS and row.opname not in _ALWAYS
        followers[row.offset] = (*jumps, after) if continues and after is not None else jumps
    return followers


_ALIKE = 3


class StepStarts:
    """Detects the start of a step: a batch of the training loader, or without torch loaders, the
    collective that starts every step.

    A batch for an evaluation, or the barrier after the loop, does not start a step. The training
    loader is the one that was read last before a step. Not thread-safe: only the main thread calls
    it.
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
        """A batch of these rows was read; returns whether it belongs to a step.

        None: a batch that the program itself reports.
        """
        self._read, self._reads = id(rows), True
        return self._trained_on in (None, self._read)

    def collective(self, kind: int, elements: int) -> bool:
        """A collective is called; returns whether it starts a step.

        Only the first after a step may, unless batches are read.
        """
        if self._has_begun or self._reads or self._by_batches:
            return False
        self._has_begun = True
        opening = (kind, elements)
        self._alike = self._alike + 1 if opening == self._opening else 0
        self._opening = opening
        return self._alike >= _ALIKE

    def stepped(self) -> None:
        """A step was made."""
        if self._reads:
            self._trained_on = self._read
        self._by_batches = self._reads
        self._reads = self._has_begun = False

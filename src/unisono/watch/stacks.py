"""Reads the stacks that faulthandler or py-spy has written. Pure."""

import json
import re
from typing import Any

from unisono.text import one_line

MOST_FRAMES = 40
_LINE_LIMIT = 300
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_CUT_SHORT = "..."


def main_thread_of_faulthandler(text: str, *, trains: int | None = None) -> tuple[str, ...]:
    """The main thread's frames, innermost first, as "file:line in function"; empty where there is none, or the text is torn.

    Args:
        text: that faulthandler has written.
        trains: the number of the thread that does the main one's work, if it is among them.

    faulthandler writes the youngest thread first, so the main thread comes last, unless there are more than a hundred: those are left out.
    It calls that one "Current" which got the signal, and that is nearly always the main thread.
    """
    threads: list[tuple[bool, list[str]]] = []
    is_cut, trained = False, None
    for line in text.splitlines():
        if _HEADER.match(line):
            threads.append((line.startswith("Current"), []))
            if trains is not None and f"0x{trains:016x} " in line:
                trained = threads[-1][1]
        elif line == _CUT_SHORT:
            is_cut = True
        elif threads and (found := _FRAME.match(line)):
            threads[-1][1].append(_frame(found["file"], found["line"], found["function"]))
    if not threads:
        return ()
    if trained:
        return tuple(trained[:MOST_FRAMES])
    if is_cut:
        return next((tuple(frames[:MOST_FRAMES]) for is_current, frames in threads if is_current), ())
    return tuple(threads[-1][1][:MOST_FRAMES])


def main_thread_of_py_spy(text: str, *, pid: int) -> tuple[str, ...]:
    """The same from what `py-spy dump --json` prints; a process's main thread has the process's number."""
    try:
        threads: Any = json.loads(text[text.index("[") :])
        frames = next(thread["frames"] for thread in threads if thread["os_thread_id"] == pid)
        return tuple(
            _frame(str(frame["filename"]), str(frame["line"]), str(frame["name"]))
            for frame in frames[:MOST_FRAMES]
        )
    except (ValueError, LookupError, TypeError, StopIteration):
        return ()


def _frame(file: str, line: str, function: str) -> str:
    return one_line(f"{file}:{line} in {function}", limit=_LINE_LIMIT)

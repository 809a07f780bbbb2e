"""Whether the ranks that a front has started, and what they have started themselves, are gone (Linux)."""

import os
import time
from pathlib import Path

from unisono.facts.process import read_stat

_POLL_S = 0.02


def living_ranks(front: int) -> list[int]:
    """The pids of a front's ranks, and of processes that these have forked, by their command lines. Zombies do not live."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and _is_rank_of(folder, str(front).encode()):
            stat = read_stat(int(folder.name))
            if stat is not None and stat.state not in "ZX":
                found.append(int(folder.name))
    return sorted(found)


def wait_until_gone(front: int, *, limit_s: float) -> list[int]:
    """Those that still live after so many seconds; returns as soon as there are none."""
    limit = time.monotonic() + limit_s
    while (left := living_ranks(front)) and time.monotonic() < limit:
        time.sleep(_POLL_S)
    return left


def _is_rank_of(folder: Path, front: bytes) -> bool:
    if folder.name == str(os.getpid()):
        return False
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is not ours to read
        return False
    if b"--events" not in words or b"--front-pid" not in words[:-1]:  # tasks have no events
        return False
    return words[words.index(b"--front-pid") + 1] == front

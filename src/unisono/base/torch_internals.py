"""Private parts of torch in this process: gloo's threads, and the dumps of flight recorders.

torch is never imported here: before it is loaded there is none of either.

A thread of gloo takes the GIL once more after its last collective, to release the collective's
tensors. If the process group is destroyed while the GIL is held, as with DDP's reducer, torch waits
for the thread forever (pytorch#56297); if the interpreter is shutting down, the thread aborts the
process (pytorch#190489). So the GIL is left free before either, until the threads are done.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
_NAME = "pt_gloo_runloop"  # torch's name for them; a test notices a change
_LOOKS, _BETWEEN_LOOKS_S = 5, 0.01


def let_gloo_finish(limit_s: float = LIMIT_S) -> bool:
    """Waits, without the GIL, until gloo's threads sleep; returns at once if there are none.

    A thread that waits for the GIL is woken when it is free, and does not sleep again before it has
    run, however busy the machine is. A thread that waits for a different rank sleeps, too, and is
    not waited for.

    Args:
        limit_s: the longest wait.

    Returns:
        Whether they sleep.
    """
    until, asleep = time.monotonic() + limit_s, 0
    while asleep < _LOOKS:
        states = gloo_states()
        if not states:
            return True
        if time.monotonic() > until:
            return False
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_BETWEEN_LOOKS_S)
    return True


def gloo_states() -> list[str]:
    """The state of each of gloo's threads from proc(5): S for sleeping, R for runnable."""
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):  # empty except on Linux
        try:
            name, _, statistics = stat.read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        except OSError:  # it has exited
            continue
        if name == _NAME:
            states.append(statistics.split()[0])
    return states


_C10D = "torch._C._distributed_c10d"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The names of torch 2.11 to 2.13. A torch built with NCCL has both: the first holds NCCL's groups,
the second those of gloo and others.
"""


def recorders() -> list[Callable[..., bytes]]:
    """torch's flight recorders; each gives its dump."""
    module = sys.modules.get(_C10D)
    return [getattr(module, name) for name in _DUMPS if hasattr(module, name)]


def flight_record(rank_by: Callable[[Any], int] = lambda dump: 0) -> bytes:
    """The dump of one recorder: of each group what was begun and completed last, and the latest
    entries; empty where there is none.

    Args:
        rank_by: gives a number for a parsed dump. Of two recorders the one with the larger number
            is taken; of equal ones, the one whose newest entry is later.
    """
    dumps = [dump() for dump in recorders()]
    return max(dumps, key=lambda dump: _rank(dump, rank_by)) if len(dumps) > 1 else b"".join(dumps)


def _rank(dump: bytes, rank_by: Callable[[Any], int]) -> tuple[int, int]:
    read = json.loads(dump or b"{}")
    newest = max((int(entry["time_created_ns"]) for entry in read.get("entries") or ()), default=0)
    return rank_by(read), newest

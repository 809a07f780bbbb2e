"""gloo's threads in this process, which take the GIL once more after their last collective.

Such a thread releases the collective's tensors under the GIL. If the process group is destroyed while the GIL is held, as with DDP's
reducer, torch waits for the thread forever (pytorch#56297); if the interpreter is shutting down, the thread aborts the process
(pytorch#190489). So the GIL is left free before either, until the threads are done.
"""

import time
from pathlib import Path

LIMIT_S = 5.0
_NAME = "pt_gloo_runloop"  # torch's name for them; a test notices a change
_LOOKS, _BETWEEN_LOOKS_S = 5, 0.01


def let_gloo_finish(limit_s: float = LIMIT_S) -> bool:
    """Waits, without the GIL, until gloo's threads sleep; returns at once if there are none.

    A thread that waits for the GIL is woken when it is free, and does not sleep again before it has run, however busy the machine is. A
    thread that waits for a different rank sleeps, too, and is not waited for.

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
    """The state of each of gloo's threads from proc(5): S for sleeping, R for running or runnable."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):  # empty except on Linux
        try:
            name, _, rest = stat.read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        except OSError:  # it has exited
            continue
        if name == _NAME:
            found.append(rest.split()[0])
    return found

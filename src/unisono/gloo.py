"""gloo's own threads in this process, which want the interpreter's lock once more after their last collective.

Such a thread lets go of the collective's tensors under that lock. Where the process group dies while the lock is held, as with DDP's
reducer, torch waits for the thread for ever (pytorch#56297); where the interpreter is being taken down, the thread aborts the process
(pytorch#190489). So the lock is left free before either, until they have done.
"""

import time
from pathlib import Path

LIMIT_S = 5.0
_NAME = "pt_gloo_runloop"  # as torch calls them; a test notices if it does so no more
_LOOKS, _BETWEEN_LOOKS_S = 5, 0.01


def let_gloo_finish(limit_s: float = LIMIT_S) -> bool:
    """Waits, without the interpreter's lock, until gloo's threads sleep; at once where there are none.

    A thread that wants the lock is woken as soon as it is free, and is not asleep before it has run, however busy the machine is. One that
    waits for another rank sleeps, too: that is not waited for.

    Args:
        limit_s: at the longest.

    Returns:
        whether they sleep.
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
    """What each of gloo's threads does, as the kernel has it (proc(5)): S where it sleeps, R where it runs or wants to."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):  # none where it is no Linux
        try:
            name, _, rest = stat.read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _NAME:
            found.append(rest.split()[0])
    return found

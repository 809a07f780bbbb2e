"""Whether a node may write the files of a head that it has lost."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from unisono.guard.rundir.lock import BEAT_S, Holder, locked_if_ended
from unisono.guard.supervise.decision import NodeLoss

_ENDS_S = 3.0
_WATCH_S = 3 * BEAT_S


@contextlib.contextmanager
def writing_for_head(lock: Path, head: Holder | None, loss: NodeLoss) -> Iterator[bool]:
    """Whether this node may write a lost head's files: the head has ended, and no start has begun
    since.

    None can begin meanwhile.

    Args:
        head: as the lock named it while it lived; None where it did not.
        loss: the end of the connection to it.
    """
    if head is None or not loss.lost_head:  # a head that has given this node up lives
        yield False
        return
    # Of a process that ends the kernel closes connections and locks one after the other; one that
    # was only silent may beat.
    limit_s, watch_s = (0.0, _WATCH_S) if loss.is_cut else (_ENDS_S, 0.0)
    with locked_if_ended(lock, head, limit_s=limit_s, watch_s=watch_s) as is_ours:
        yield is_ours

"""What may be said of a rank of somebody else's program, of which nobody has told what it is about to do. Pure.

It may evaluate on one rank for half an hour, compile, download, wait for another job: that is silence, and no fault. So a rank is named
for its silence alone where that is certain to hold up others: they wait in a collective, and it and all that it has started use no processor
and read and write nothing.
"""

from collections.abc import Sequence

from unisono.watch.picture import Collective
from unisono.watch.record import Beat
from unisono.watch.views import RankView

_WAITED_S = 3.0
_STILL_S = 3.0
_INTERPRETER_S = 10.0
_EQUALLY_SIZED = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")


def holds_up_others(view: RankView, waiting: Sequence[RankView]) -> bool:
    """Whether a rank of somebody else's program surely stands still, and others wait for it.

    Args:
        view: of the rank, which does not wait itself.
        waiting: the ranks that wait.
    """
    assert view.beat is not None
    if all(other.idle_s < _WAITED_S for other in waiting):
        return False
    if view.pulse_idle_s >= _INTERPRETER_S:  # then nobody there counts what it uses, either
        return True
    return view.beat.still_s >= _STILL_S


def nobody_is_left_to_wait(views: Sequence[RankView]) -> bool:
    """Whether all ranks of somebody else's program that have not handed over their results sleep, and their interpreters stand.

    Then nobody waits for them in a collective, and they will not end either: as where a process group dies and waits for its own thread,
    which needs Python's lock. Native code that computes is not asleep.

    Args:
        views: of those ranks; of more than one rank that the program has.
    """
    return all(view.pulse_idle_s >= _INTERPRETER_S and view.process.state == "S" for view in views)


def alike(begun: Collective) -> str:
    """A collective such that ranks whose texts differ cannot be in the same one; ranks may bring unequal pieces to some kinds."""
    sizes = f" {begun.sizes}" if begun.name in _EQUALLY_SIZED else ""
    return f"{begun.name} #{begun.number}{sizes}"


def left_the_loop(beats: Sequence[Beat]) -> bool:
    """Whether, of ranks that have made equally many steps, some have taken a batch for the next one and others have not: those are done.

    Where no loader of torch is used nobody has taken a batch, and that tells nothing.
    """
    return any(beat.micro for beat in beats) and not all(beat.micro for beat in beats)

"""Which checkpoints stay and which go. Pure: the run's store, `checkpoint prune` and a storage elsewhere share it.

The newest intact ones stay, the best stays, those at the multiples of a period stay for ever. One that is damaged, or of which nobody
knows whether it is intact, never counts as kept: nothing goes before as many as are wanted are known to be intact.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published checkpoint.

    Attributes:
        step: optimizer steps done when it was saved.
        intact: whether it is; None before anybody has looked.
        foreign: not signed by this user; it is not ours to delete, and nothing to rely on.
    """

    step: int
    intact: bool | None = None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What is asked for.

    Attributes:
        keep: how many of the newest intact ones stay; at least 1.
        every: those at its multiples stay for ever, in steps; None: no such period.
        protect: steps that stay, as that of the best.
    """

    keep: int
    every: int | None = None
    protect: Collection[int] = ()

    def are_for_ever(self, step: int) -> bool:
        """Whether a step is one of those that stay for ever."""
        return self.every is not None and step > 0 and step % self.every == 0

    def protects(self, step: int) -> bool:
        """Whether a step stays whatever its age and state."""
        return step in self.protect or self.are_for_ever(step)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of them.

    Attributes:
        go: the steps to delete, oldest first.
        ask: the step whose state must be found out before anything can be decided; nothing goes until then.
        oldest_kept: the oldest of the newest that stay; what was set aside before it can go. None if there are too few.
    """

    go: tuple[int, ...] = ()
    ask: int | None = None
    oldest_kept: int | None = None


def decide(candidates: Iterable[Candidate], rules: Rules) -> Decision:
    """Which steps go. Those that are damaged stay until they are older than all that are kept.

    Args:
        candidates: all that are there, in any order, each step once.
        rules: what is asked for.
    """
    assert rules.keep >= 1
    kept: list[int] = []
    go: list[int] = []
    for candidate in sorted(candidates, key=lambda one: one.step, reverse=True):
        if candidate.foreign:
            continue
        if len(kept) < rules.keep:
            if candidate.intact is None:
                return Decision(ask=candidate.step)
            if candidate.intact:
                kept.append(candidate.step)
        elif not rules.protects(candidate.step):
            go.append(candidate.step)
    if len(kept) < rules.keep:
        return Decision()
    return Decision(go=tuple(reversed(go)), oldest_kept=kept[-1])

"""Which checkpoints stay and which go. Pure: the run's store, `checkpoint prune` and a storage elsewhere share it.

The newest intact ones stay, the best stays, those at the multiples of a period stay for ever. One that is damaged, or of which nobody
knows whether it is intact, never counts as kept: nothing goes before as many as are wanted are known to be intact. What was only
written may not be what the disk gives back, so the newest one that was found intact by reading stays, too, until a newer one was.
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
        read_back: whether somebody has read it through since it was written, and found it intact; None before anybody has looked.
    """

    step: int
    intact: bool | None = None
    foreign: bool = False
    read_back: bool | None = None


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
        ask: the step whose state must be found out before anything can be decided, by reading if need be; nothing goes until then.
        recall: the step of which must be known whether it was read back; it need not be read for that, and nothing goes until then.
        oldest_kept: the oldest of the newest that stay; what was set aside before it can go. None if there are too few.
    """

    go: tuple[int, ...] = ()
    ask: int | None = None
    recall: int | None = None
    oldest_kept: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether something must be found out first."""
        return self.ask is not None or self.recall is not None


def decide(candidates: Iterable[Candidate], rules: Rules) -> Decision:
    """Which steps go. Those that are damaged stay until they are older than all that are kept.

    Args:
        candidates: all that are there, in any order, each step once.
        rules: what is asked for.
    """
    assert rules.keep >= 1
    own = sorted((one for one in candidates if not one.foreign), key=lambda one: one.step, reverse=True)
    kept: list[int] = []
    go: list[int] = []
    for candidate in own:
        if len(kept) < rules.keep:
            if candidate.intact is None:
                return Decision(ask=candidate.step)
            if candidate.intact:
                kept.append(candidate.step)
        elif not rules.protects(candidate.step):
            go.append(candidate.step)
    if len(kept) < rules.keep:
        return Decision()
    last = _last_read_back(own, since=go[-1]) if go else None
    if last is not None and last.read_back is None:
        return Decision(recall=last.step)
    spared = last.step if last is not None else None
    return Decision(go=tuple(step for step in reversed(go) if step != spared), oldest_kept=kept[-1])


def _last_read_back(newest_first: Iterable[Candidate], *, since: int) -> Candidate | None:
    """The newest that was read back, or of which nobody has said yet that it was not; None where there is none from that step on."""
    return next((one for one in newest_first if one.step >= since and one.read_back is not False), None)

"""A finding: what one rule makes of the facts of a run. Judging picks among them."""

from dataclasses import dataclass, field

from unisono.diagnose.event import Event


@dataclass(frozen=True, slots=True)
class Finding:
    """One possible cause.

    Attributes:
        cause: an id of the catalogue.
        why: one sentence: what happened, with names and numbers.
        evidence: the lines that show it, the decisive one first.
        ranks: the culprits, never the victims; empty where nobody can be named.
        hosts: the same for hosts.
        confidence: 0 to 1; 1: the log says it in so many words.
        followed: what came of it, in time: the chain after the first cause.
        missing: what would say more: whose log, which variable to set next time.
        facts: particulars for the remedy, for example the name of a module.
        step: the training step at which it happened, where it is known.
        phase: what the run was doing, where it is known.
    """

    cause: str
    why: str
    evidence: tuple[Event, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    confidence: float = 1.0
    followed: tuple[Event, ...] = ()
    missing: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    phase: str | None = None

"""From findings to the verdict, and to what is told beside it: the chain, the alternatives, what is missing."""

from dataclasses import dataclass

from unisono.causes.verdict import Evidence, Verdict
from unisono.diagnose.event import Event
from unisono.diagnose.facts import RunFacts
from unisono.diagnose.finding import Finding
from unisono.diagnose.remedy import remedy

MOST_EVIDENCE = 10
MOST_LINKS = 6


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is made of some logs.

    Attributes:
        verdict: the answer.
        chain: the first cause, then what followed, as lines of evidence.
        alternatives: other causes that were thought of, the next likely first.
        missing: what would say more.
        facts: of the run, for a timeline.
    """

    verdict: Verdict
    chain: tuple[Evidence, ...]
    alternatives: tuple[Verdict, ...]
    missing: tuple[str, ...]
    facts: RunFacts


def tell(findings: list[Finding], facts: RunFacts) -> Diagnosis:
    """The first finding as the verdict, the others as alternatives."""
    first = findings[0]
    return Diagnosis(
        verdict=verdict_of(first, facts),
        chain=_chain(first, facts),
        alternatives=tuple(verdict_of(finding, facts) for finding in findings[1:]),
        missing=first.missing,
        facts=facts,
    )


def verdict_of(finding: Finding, facts: RunFacts) -> Verdict:
    """A finding in the form of DESIGN A4."""
    healthy = finding.cause == "healthy"
    return Verdict(
        cause=finding.cause,
        when="after",
        severity="none" if healthy else "warning" if finding.cause in _HARMLESS else "fatal",
        summary=finding.why,
        ranks=finding.ranks,
        hosts=finding.hosts,
        phase=finding.phase,
        step=finding.step,
        evidence=_evidence(finding.evidence),
        fix=() if healthy else tuple(remedy(finding, facts)),
        confidence=finding.confidence,
    )


_HARMLESS = frozenset({"process_group_destroyed_twice", "teardown_crash"})


def _evidence(events: tuple[Event, ...]) -> tuple[Evidence, ...]:
    found: dict[tuple[str, str], Evidence] = {}
    for event in events:
        found.setdefault((event.where, event.text), Evidence(where=event.where, text=event.text))
    return tuple(found.values())[:MOST_EVIDENCE]


def _chain(finding: Finding, facts: RunFacts) -> tuple[Evidence, ...]:
    """What followed the first cause: one line of each kind, in time."""
    if finding.cause in ("healthy", "undetermined") or not finding.evidence:
        return ()
    first = finding.evidence[0]
    cited = {(event.source, event.line) for event in finding.evidence}
    later: dict[str, Event] = {}
    for event in facts.events:
        after = event.order > first.order if event.source == first.source else event.time is None or first.time is None or event.time >= first.time  # fmt: skip
        if event.kind in ("consequence", "death") and after and (event.source, event.line) not in cited:
            later.setdefault(event.signature, event)
    ordered = sorted(later.values(), key=lambda event: (event.time is None, event.time or 0.0, event.source, event.order))  # fmt: skip
    return _evidence((first, *ordered[:MOST_LINKS]))

"""What unisono itself has said about a run: the verdict at its end, or the stall that was not over
when its output stopped.
"""

import re
from collections.abc import Iterator

from unisono.base.causes import find_cause
from unisono.base.causes.verdict import Evidence, OwnRunOnly, Verdict
from unisono.base.files import iterate_lines
from unisono.guard.diagnosis.lines import shown
from unisono.guard.diagnosis.run_facts import Hypothesis, LogEvent, RunFacts, View
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.timeline import TimelineEntry, read_entry

_RANKS = re.compile(r"\branks? (\d{1,6}(?:(?:, |、)\d{1,6})*(?: (?:and|和) \d{1,6})?)(?!\d)")
_NO_CAUSE = ("undetermined", "healthy")
_MOST_RANKS = 64
_MOST_CHARS = 2_000


def find_stated(view: View) -> list[Hypothesis]:
    """The cause that unisono's own output states, in any language: its last verdict, or else its
    last warning of a stall.
    """
    for signature, confidence in (("unisono_verdict", 0.95), ("unisono_stall", 0.9)):
        stated = [event for event in view.facts.of(signature) if _is_cause(event.fields["cause"])]
        if stated and not _is_over(view, stated[-1]):
            return [_hypothesis(stated[-1], confidence=confidence)]
    return []


def _is_over(view: View, event: LogEvent) -> bool:
    """Whether the run went on after it: it was started again, or its ranks moved."""
    moves = view.facts.of("unisono_moves")
    return view.survived(event) or any(
        one.source == event.source and one.order > event.order for one in moves
    )


def _hypothesis(event: LogEvent, *, confidence: float) -> Hypothesis:
    what = event.fields["what"]
    return Hypothesis(
        event.fields["cause"],
        what,
        (event,),
        _ranks_in(what),
        confidence=confidence,
        step=event.number("step"),
    )


def _ranks_in(text: str) -> tuple[int, ...]:
    """The ranks that a summary names first."""
    match = _RANKS.search(text)
    return tuple(map(int, re.findall(r"\d+", match[1])))[:_MOST_RANKS] if match else ()


def _is_cause(name: str) -> bool:
    return find_cause(name) is not None and name not in _NO_CAUSE


def suspected(run: RunDir, facts: RunFacts) -> Verdict | None:
    """The verdict on a run whose front was killed while it suspected a stall."""
    last = max(_suspicions(run), key=lambda one: one[0], default=None)
    if last is None:
        return None
    _, where, entry = last
    text, cause = shown(str(entry["warning"])[:_MOST_CHARS]), str(entry.get("cause", ""))
    if not text or not _is_cause(cause):
        return None
    ranks = entry.get("ranks")
    return Verdict(
        cause=cause,
        when="after",
        summary=f"the run ended without a result, as its front was killed; its last warning: {text}",
        ranks=tuple(rank for rank in ranks if type(rank) is int)[:_MOST_RANKS]
        if isinstance(ranks, list)
        else (),
        step=facts.step,
        evidence=(Evidence(where=where, text=text),),
        fix=_remedy(cause, facts),
        confidence=0.5 if text.startswith("investigating") else 0.9,
    )


def _remedy(cause: str, facts: RunFacts) -> tuple[str, ...]:
    """The lines of the catalogue that fit the program."""
    entry = find_cause(cause)
    lines = entry.remedy if entry is not None else ()
    return tuple(line for line in lines if facts.framework == "unisono" or not isinstance(line, OwnRunOnly))


def _suspicions(run: RunDir) -> Iterator[tuple[float, str, TimelineEntry]]:
    """Times, places and entries of the suspicions in the timelines of all nodes; an entry without
    text ended one.
    """
    for path in sorted(run.timeline(0).parent.glob("timeline-*.jsonl")):
        for number, line in enumerate(iterate_lines(path), 1):
            entry = read_entry(line) if b'"warning"' in line else None
            if entry is not None and isinstance(when := entry.get("time"), int | float):
                yield float(when), f"{path.relative_to(run.root)}:{number}", entry

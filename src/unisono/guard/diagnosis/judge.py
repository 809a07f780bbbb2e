"""Which hypothesis holds: the order of judgement, the verdict and what is reported beside it.

Consequences never win while anything else is there.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unisono.base.causes.entries import judgement_of
from unisono.base.causes.verdict import Evidence, Verdict
from unisono.guard.diagnosis.article_text import sectioned
from unisono.guard.diagnosis.hypotheses import NARRATION, NO_FAILURE_FROM, Ranking, log_features, rank
from unisono.guard.diagnosis.lines import redacted_json
from unisono.guard.diagnosis.own_verdicts import find_stated
from unisono.guard.diagnosis.remedy import remedy
from unisono.guard.diagnosis.report_terms import Feature
from unisono.guard.diagnosis.report_text import ReportText
from unisono.guard.diagnosis.rules_death import (
    find_cancelled,
    find_deaths,
    find_out_of_memory,
    find_preemption,
    find_ray_deaths,
    find_silence,
)
from unisono.guard.diagnosis.rules_hang import find_hang, find_mismatches, find_uneven
from unisono.guard.diagnosis.rules_named import find_finished, find_named, find_nan, find_user_errors
from unisono.guard.diagnosis.rules_setup import (
    find_hccl,
    find_interfaces,
    find_ray_resources,
    find_rendezvous,
    find_single_device,
    find_unbound,
    find_unequal_nodes,
    find_unscheduled,
    find_unshared,
    find_versions,
    without_nccl,
)
from unisono.guard.diagnosis.run_facts import Hypothesis, LogEvent, RunFacts, View, first_of_each, ranks_of
from unisono.guard.diagnosis.stated_versions import stated_versions

CERTAIN = 0.8
"""Hypotheses with less confidence come after the program's own exceptions."""

_WORDS: tuple[Callable[[View], list[Hypothesis]], ...] = (
    find_versions,
    find_named,
    find_out_of_memory,
    find_single_device,
    find_interfaces,
    find_unshared,
    find_unscheduled,
)
_STRUCTURE: tuple[Callable[[View], list[Hypothesis]], ...] = (
    find_unequal_nodes,
    find_mismatches,
    find_uneven,
    find_deaths,
    find_rendezvous,
    find_silence,
    find_unbound,
    find_hang,
    find_ray_deaths,
    find_hccl,
)


def judge(facts: RunFacts) -> list[Hypothesis]:
    """All hypotheses, the most likely first; never empty."""
    view = View(facts)
    ended = find_finished(view)
    nan = find_nan(view)
    if ended:
        return [*nan, *ended]
    named = sorted((finding for rule in _WORDS for finding in rule(view)), key=_specific)
    certain = [finding for finding in named if finding.confidence >= CERTAIN]
    vague = [finding for finding in named if finding.confidence < CERTAIN]
    user_errors = find_user_errors(view)
    taken = find_preemption(view)
    structure = [finding for rule in _STRUCTURE for finding in rule(view)]
    resources = find_ray_resources(view)
    ranked = [
        *find_stated(view),
        *certain,
        *nan,
        *_unless_caught(user_errors),
        *structure,
        *resources,
        *user_errors,
        *vague,
    ]
    ranked = _with_preemption(taken, ranked)
    return _distinct([*(ranked or find_cancelled(view)), *find_undetermined(view)])


def _specific(finding: Hypothesis) -> tuple[bool, float]:
    return finding.confidence < CERTAIN, judgement_of(finding.cause).specificity


def _unless_caught(user_errors: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The program's exceptions that probably ended it."""
    return [finding for finding in user_errors if finding.confidence > 0.5]


def _with_preemption(taken: list[Hypothesis], ranked: list[Hypothesis]) -> list[Hypothesis]:
    """Preemption by the scheduler is the cause if nothing failed before it."""
    if not taken:
        return ranked
    if not ranked:
        return taken
    scheduler, first = taken[0].evidence[0], ranked[0].evidence[:1]
    by_scheduler = "SignalException" not in scheduler.text
    if not first:
        return [*taken, *ranked]
    same = first[0].source == scheduler.source
    before = first[0].order < scheduler.order if same else not by_scheduler
    return [ranked[0], *taken, *ranked[1:]] if before else [*taken, *ranked]


def _distinct(findings: list[Hypothesis]) -> list[Hypothesis]:
    """One hypothesis for each cause; "undetermined" only if there is no other."""
    distinct: dict[str, Hypothesis] = {}
    for finding in findings:
        distinct.setdefault(finding.cause, finding)
    if len(distinct) > 1:
        distinct.pop("undetermined", None)
    return list(distinct.values())


MOST_EVIDENCE = 10
MOST_LINKS = 6


@dataclass(frozen=True, slots=True)
class DiagnosisResult:
    """The result of a diagnosis.

    Attributes:
        chain: the first cause and its consequences, as lines of evidence.
        alternatives: other possible causes, the most likely first.
        facts: of the run, for a timeline.
        language: of the reports: en, zh, other; empty without one.
        features: what the texts and their log lines say, on which the ranking rests.
        ranking: what may be the cause if no line proves one.
    """

    verdict: Verdict
    chain: tuple[Evidence, ...]
    alternatives: tuple[Verdict, ...]
    missing: tuple[str, ...]
    facts: RunFacts
    language: str = ""
    features: tuple[Feature, ...] = ()
    ranking: Ranking = field(default_factory=Ranking)

    def to_json(self, *, every: bool = False) -> Mapping[str, object]:
        """The object of `unisono diagnose --json`, without secrets.

        Args:
            every: whether to add the alternatives.
        """
        body: dict[str, object] = self.verdict.to_json()
        body["chain"] = [link.model_dump() for link in self.chain]
        body["missing"] = list(self.missing)
        body["hypotheses"] = [one.to_json() for one in self.ranking.hypotheses]
        body["questions"] = [one.zh if self.language == "zh" else one.en for one in self.ranking.questions]
        body["ruled_out"] = list(self.ranking.ruled_out)
        body["earlier_runs"] = list(self.facts.earlier_runs)
        if every:
            body["alternatives"] = [verdict.to_json() for verdict in self.alternatives]
        redacted: Mapping[str, object] = redacted_json(body)
        return redacted

    @property
    def is_proved(self) -> bool:
        """Whether lines of logs show the cause, or that the run is healthy."""
        return self.verdict.cause != "undetermined" and self.verdict.confidence >= CERTAIN


def make_diagnosis(
    findings: list[Hypothesis],
    facts: RunFacts,
    reported: Sequence[Feature] = (),
    *,
    language: str = "",
    reports: Sequence[ReportText] = (),
) -> DiagnosisResult:
    """The diagnosis: the first hypothesis as the verdict, the others as alternatives.

    Args:
        findings: of the rules, the most likely first.
        language: of the reports; empty: there are logs, too.
        reports: their log lines were chosen by somebody.
    """
    excerpts = frozenset(report.name for report in reports)
    on_windows = any(feature.id == "windows" for feature in reported)
    findings = [
        _as_proved(without_nccl(finding, facts, on_windows=on_windows), excerpts) for finding in findings
    ]
    printed = {f"{one.name}:{row.line}" for one in reports for row in one.passages if row.kind == "log"}
    reported = [one for one in reported if one.where not in printed or one.id not in _TEACHING]
    features = (*reported, *log_features(facts, findings))
    ranking = rank(features, framework=facts.framework, is_failure=not language)
    if not language and not any(name in excerpts for name in facts.sources):
        ranking = replace(ranking, ruled_out=_not_in_complete_logs(facts, ranking))
    findings = sorted(findings, key=lambda finding: _is_of_a_title(finding, reports))
    ranking = _with_known_bugs(_with_fixes_of_text(ranking, reports), reports)
    first = findings[0]
    proved = first.confidence >= CERTAIN and _is_stated(first, reported, ranking, reports)
    if language and not proved and first.cause not in ("healthy", "undetermined"):
        findings = [*find_undetermined(View(facts)), *findings]
    first = findings[0]
    verdict = verdict_of(first, facts)
    if language and first.cause == "undetermined":
        verdict = _of_a_report(verdict, ranking)
    uncertain = first.cause == "undetermined" or (first.cause != "healthy" and first.confidence < 1.0)
    return DiagnosisResult(
        verdict=verdict,
        chain=_chain(first, facts),
        alternatives=tuple(verdict_of(finding, facts) for finding in findings[1:]),
        missing=first.missing,
        facts=facts,
        language=language,
        features=features,
        ranking=ranking if uncertain else Ranking(),
    )


_OF_A_RUN = frozenset({"narrates", "first_person"})
_PERSONAL = _OF_A_RUN | {"asks_help"}
_RARELY_FAILURE = 0.9
_TEACHING = frozenset(
    {"changelog", "instruction", "second_person", "conditional", "question_only", "works_now"}
)
"""What a text says of itself: a person's run, or a guide, a changelog or a question about what may
happen.
"""


def _with_fixes_of_text(ranking: Ranking, reports: Sequence[ReportText]) -> Ranking:
    """The ranking; the first cause has what an article gives as its fix, too."""
    fixes = [
        report.verbatim(passage.line, passage.text)
        for report in reports
        for passage in sectioned(report.passages).fixes()
    ]
    if not fixes or not ranking.hypotheses:
        return ranking
    first, *others = ranking.hypotheses
    return replace(ranking, hypotheses=(replace(first, fix_in_text=tuple(fixes)), *others))


def _with_known_bugs(ranking: Ranking, reports: Sequence[ReportText]) -> Ranking:
    """The ranking; a known bug of a version that a report states is the first fix of its cause."""
    if all(one.cause != "version_known_bad" for one in ranking.hypotheses):
        return ranking
    stated = [one.bug for report in reports for one in stated_versions(report.passages) if one.bug]
    hypotheses = (
        replace(one, fix=(*stated, *one.fix)) if one.cause == "version_known_bad" else one
        for one in ranking.hypotheses
    )
    return replace(ranking, hypotheses=tuple(hypotheses))


def _is_of_a_title(finding: Hypothesis, reports: Sequence[ReportText]) -> bool:
    """Whether only the title of a report states it: the lines below say what it really was."""
    titles = {(report.name, report.title_line) for report in reports}
    return bool(finding.evidence) and all((event.source, event.line) in titles for event in finding.evidence)


def _is_stated(
    finding: Hypothesis,
    reported: Sequence[Feature],
    ranking: Ranking,
    reports: Sequence[ReportText],
) -> bool:
    """Whether a line of a report is of the reporter's run, rather than an example in a guide."""
    names = {feature.id for feature in reported}
    if ranking.no_failure <= NO_FAILURE_FROM and names & NARRATION:
        return True
    first = finding.evidence[0] if finding.evidence else None
    personal = bool(names & (_PERSONAL if ranking.no_failure <= _RARELY_FAILURE else _OF_A_RUN))
    printed = first is not None and any(
        report.name == first.source and report.is_printed(first.line, quoted=personal) for report in reports
    )
    return printed and (personal or not names & _TEACHING)


_SAID_BY_THE_RANK = ("cuda_oom", "disk_full", "port_in_use", "missing_dependency")
"""Frequent causes that the rank itself writes down: an exception of its own, before anything else
ends.
"""
_MOST_RULED_OUT = 3


def _not_in_complete_logs(facts: RunFacts, ranking: Ranking) -> tuple[str, ...]:
    """The frequent causes that complete logs would show, and these do not."""
    heard = {rank for rank, rank_facts in facts.ranks.items() if rank_facts.last is not None}
    complete = facts.world_size and facts.world_size <= len(heard)
    if not complete or any(source.cut_head for source in facts.sources.values()):
        return ()
    named = {event.cause for event in facts.events} | {one.cause for one in ranking.hypotheses}
    return tuple(cause for cause in _SAID_BY_THE_RANK if cause not in named)[:_MOST_RULED_OUT]


def _as_proved(finding: Hypothesis, excerpts: Container[str]) -> Hypothesis:
    """A finding; a general one proves less if its lines are some that somebody chose to quote, and
    one whose lines have other causes as often proves less anyway.
    """
    judgement = judgement_of(finding.cause)
    quoted = any(event.source in excerpts for event in finding.evidence[:1])
    vague = finding.evidence and all(event.signature in judgement.proves_less for event in finding.evidence)
    if vague or (quoted and judgement.needs_whole_logs):
        return replace(finding, confidence=min(finding.confidence, 0.6))
    return finding


def _of_a_report(verdict: Verdict, ranking: Ranking) -> Verdict:
    """An undetermined verdict on a report, in the words that fit: of a log, its last lines would be
    the evidence.
    """
    summary = (
        "no log line proves the cause; these fit, most likely first"
        if ranking.hypotheses
        else "the text reports no failure that is known here"
    )
    return verdict.model_copy(update={"summary": summary, "evidence": (), "fix": (), "confidence": 0.3})


def with_answer(diagnosis: DiagnosisResult, feature: Feature) -> DiagnosisResult:
    """The diagnosis after a question was answered."""
    features = (*diagnosis.features, feature)
    return replace(
        diagnosis,
        features=features,
        ranking=rank(features, framework=diagnosis.facts.framework, is_failure=True),
    )


def verdict_of(finding: Hypothesis, facts: RunFacts) -> Verdict:
    """The verdict for a hypothesis."""
    healthy = finding.cause == "healthy"
    return Verdict(
        cause=finding.cause,
        when="after",
        severity="none" if healthy else "warning" if judgement_of(finding.cause).harmless else "fatal",
        summary=finding.why,
        ranks=finding.ranks,
        hosts=finding.hosts,
        phase=finding.phase,
        step=finding.step,
        evidence=_evidence(finding.evidence),
        fix=() if healthy else tuple(remedy(finding, facts)),
        confidence=finding.confidence,
    )


def _evidence(events: tuple[LogEvent, ...]) -> tuple[Evidence, ...]:
    evidence: dict[tuple[str, str], Evidence] = {}
    for event in events:
        evidence.setdefault((event.where, event.text), Evidence(where=event.where, text=event.text))
    return tuple(evidence.values())[:MOST_EVIDENCE]


def _chain(finding: Hypothesis, facts: RunFacts) -> tuple[Evidence, ...]:
    """Consequences of the first cause: one line of each kind, in order of time."""
    if finding.cause in ("healthy", "undetermined") or not finding.evidence:
        return ()
    first = finding.evidence[0]
    cited = {(event.source, event.line) for event in finding.evidence}
    later: dict[str, LogEvent] = {}
    for event in facts.events:
        after = (
            event.order > first.order
            if event.source == first.source
            else event.time is None or first.time is None or event.time >= first.time
        )
        if event.kind in ("consequence", "death") and after and (event.source, event.line) not in cited:
            later.setdefault(event.signature, event)
    ordered = sorted(
        later.values(), key=lambda event: (event.time is None, event.time or 0.0, event.source, event.order)
    )
    return _evidence((first, *ordered[:MOST_LINKS]))


_RECORD = (
    "next time set TORCH_NCCL_TRACE_BUFFER_SIZE=20000 (TORCH_FR_BUFFER_SIZE since torch 2.9),"
    " TORCH_NCCL_DUMP_ON_TIMEOUT=1 and NCCL_DEBUG=INFO on all ranks: the flight recorder's dumps of every"
    " rank show which rank did not arrive"
)


def find_undetermined(view: View) -> list[Hypothesis]:
    """The hypothesis without a cause, with the information that is missing."""
    victims = [*view.consequences, *(trace.event for trace in view.facts.tracebacks if view.is_victim(trace))]
    if victims:
        seen = ranks_of(victims)
        scope = f"only the effects on ranks {', '.join(map(str, seen[:8]))}" if seen else "only consequences"
        world = view.facts.world_size
        others = [str(rank) for rank in range(min(world or 0, 64)) if rank not in seen]
        logs = (
            f"the logs of ranks {', '.join(others[:16])}"
            if others
            else "the logs of all other ranks, from their beginning"
        )
        return [
            Hypothesis(
                "undetermined",
                f"{scope} are visible; the log of the rank that failed first is missing",
                first_of_each(victims),
                confidence=0.3,
                missing=(logs, _RECORD, "dmesg of every rank's host"),
            )
        ]
    ends = view.failing_exits or list(view.facts.exits)
    if ends:
        return [
            Hypothesis(
                "undetermined",
                "processes ended, and no line shows why",
                tuple(one.event for one in ends[:4]),
                confidence=0.3,
                missing=("the logs of all ranks", "dmesg of their hosts"),
            )
        ]
    errors = [
        event
        for event in view.facts.events
        if event.kind in ("error", "death") and not view.survived(event) and not view.is_skipped(event)
    ]
    if errors:
        return [
            Hypothesis(
                "undetermined",
                "something failed, and the line that shows the cause is missing",
                tuple(errors[:4]),
                confidence=0.3,
                missing=("the log from its beginning", "the logs of all ranks"),
            )
        ]
    lines = sum(source.lines for source in view.facts.sources.values())
    last = [source.tail[-1] for source in view.facts.sources.values() if source.tail]
    if not lines or not last:
        return [
            Hypothesis(
                "undetermined",
                "there is nothing in the logs",
                (),
                confidence=1.0,
                missing=("the logs of the run",),
            )
        ]
    where = (
        f" at step {view.facts.step}" + (f" of {view.facts.steps}" if view.facts.steps else "")
        if view.facts.step is not None
        else ""
    )
    return [
        Hypothesis(
            "undetermined",
            f"the logs show neither a failure nor an end: they stop{where}",
            tuple(last[:4]),
            confidence=0.5,
            missing=(
                "what comes after the last line, if the run is over",
                "the logs of the other ranks",
                "the launcher's own output, and dmesg",
            ),
            step=view.facts.step,
        )
    ]

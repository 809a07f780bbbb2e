"""Ranks causes for a report or a log that does not prove one.

Pure: features in, hypotheses and questions out.

The score of a cause is a softmax over sums of weights, calibrated: the catalogue says what speaks
for a cause and against it, `weights.json` has the numbers and the corrections that
`scripts/fit_hypotheses.py` fitted on cases, so that of the causes with score 0.8 about 80 % are
right. Scores need not add up to 1: several causes may fit a text, e.g. a stalled rank and what
stalled it.
"""

import functools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from unisono.base.causes import CATALOGUE, remedy_for_foreign_program
from unisono.base.causes.entries import Signs, all_entries
from unisono.base.causes.verdict import OwnRunOnly
from unisono.guard.diagnosis.line_prefixes import split_prefix
from unisono.guard.diagnosis.report_terms import Feature
from unisono.guard.diagnosis.run_facts import Hypothesis, RunFacts, View

NO_FAILURE = "no_failure"
"""The outcome for a text that reports no failure; no cause of the catalogue."""
MOST = 3
"""Maximum number of hypotheses."""
LIKELY, POSSIBLE = 0.7, 0.15
"""Scores from which a cause is called likely or possible."""
_MOST_BECAUSE, _MOST_QUESTIONS = 6, 2
_LEAST_SCORE = 0.02
_PROVED = 0.8
"""Confidence of a finding of the logs from which it counts as stated by a line."""
_RULED_OUT_SHARE = 0.02
NO_FAILURE_FROM = 0.4
"""Probability of no failure from which log lines are taken for examples of a guide or a changelog,
and no cause is called likely.
"""
_NONE_IF_EXPLAINED = 0.1
"""Largest probability of no failure for a text that explains one."""
_CERTAINLY_NONE = 0.97
"""Probability of no failure from which no cause is named at all."""

DENIED_SHARE = 0.5
"""A feature that is denied, in a text or as the answer to a question, speaks against a cause with
this share of its weight.
"""

Likelihood = Literal["likely", "possible", "remote"]


@dataclass(frozen=True, slots=True)
class RankedCause:
    """A possible cause with its evidence.

    Attributes:
        score: the calibrated probability, 0 to 1.
        because: what speaks for it, the strongest first; against: what speaks against it.
        check: commands that would confirm or exclude it.
        fix: what to do if it is the cause, for any program; fix_here: the same with unisono;
            fix_in_text: what the text itself gives as the fix.
    """

    cause: str
    score: float
    because: tuple[Feature, ...] = ()
    against: tuple[Feature, ...] = ()
    check: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    fix_here: tuple[str, ...] = ()
    fix_in_text: tuple[str, ...] = ()

    @property
    def likelihood(self) -> Likelihood:
        """The score in a word."""
        return "likely" if self.score >= LIKELY else "possible" if self.score >= POSSIBLE else "remote"

    def to_json(self) -> Mapping[str, object]:
        """An item of `hypotheses`."""
        return {
            "cause": self.cause,
            "likelihood": self.likelihood,
            "score": round(self.score, 3),
            "because": [_evidence(one) for one in self.because],
            "against": [_evidence(one) for one in self.against],
            "check": list(self.check),
            "fix": [*self.fix, *self.fix_in_text],
            "fix_here": list(self.fix_here),
        }


@dataclass(frozen=True, slots=True)
class Question:
    """A question that would tell causes apart.

    Attributes:
        feature: what a "yes" adds.
    """

    feature: str
    en: str
    zh: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Possible causes, the most likely first.

    Attributes:
        hypotheses: at most `MOST`; empty if the text reports no failure.
        questions: the most telling first.
        unlikely: causes that are frequent, and that this text speaks against, each with the reason.
        ruled_out: causes that complete logs would show, and these do not.
        no_failure: the probability that nothing failed; the scores are lower by this share.
    """

    hypotheses: tuple[RankedCause, ...] = ()
    questions: tuple[Question, ...] = ()
    unlikely: tuple[tuple[str, str], ...] = ()
    ruled_out: tuple[str, ...] = ()
    no_failure: float = 0.0


@dataclass(frozen=True)
class _Entry:
    weights: Mapping[str, float]
    prior: float
    check: tuple[str, ...]
    here: str


@dataclass(frozen=True)
class Table:
    """What speaks for each cause, with numbers.

    Attributes:
        entries: by cause; levels: the numbers of the words of the table, and of lines of logs;
            temperature: of the softmax.
        slope, shift: of the calibration: log odds of a score = slope * those of the softmax + shift
            (Platt scaling).
        questions: all of them.
    """

    entries: Mapping[str, _Entry]
    levels: Mapping[str, float]
    temperature: float
    slope: float = 1.0
    shift: float = 0.0
    questions: tuple[Question, ...] = field(default=())

    def calibrated(self, chance: float) -> float:
        """The score for a probability of the softmax."""
        odds = math.log(max(chance, 1e-12) / max(1 - chance, 1e-12))
        return 1 / (1 + math.exp(-(self.slope * odds + self.shift)))

    @functools.cached_property
    def answers(self) -> Mapping[Question, tuple[Mapping[str, float], frozenset[str]]]:
        """By question: how probable a yes is with each cause, and the lines of logs that answer
        it.
        """
        return {
            question: (
                {cause: _chance(self.weight(cause, question.feature)) for cause in self.entries},
                frozenset(_shown_by(question.feature, self)),
            )
            for question in self.questions
        }

    def weight(self, cause: str, feature: str) -> float:
        """How much a feature speaks for a cause, in log odds; negative: against."""
        kind, _, name = feature.partition(":")
        if (stated := self.entries[cause].weights.get(feature)) is not None:
            return stated
        if kind in ("proved", "suggested", "line", "warning"):
            return self.levels[kind] if name == cause else 0.0
        if kind in ("stated", "helped") and self.entries[cause].weights.get(name, 0.0) > 0:
            return self.levels[kind]
        if kind == "not":
            return -DENIED_SHARE * self.entries[cause].weights.get(name, 0.0)
        return 0.0


_WORDS = ("own", "strong", "some", "weak", "against", "excludes")


@functools.cache
def default_table() -> Table:
    """The table with the numbers of weights.json."""
    return make_table(
        json.loads(files("unisono.guard.diagnosis").joinpath("weights.json").read_text(encoding="utf-8"))
    )


def make_table(numbers: Mapping[str, Any]) -> Table:
    """The table of what speaks for each cause, from the catalogue and `table.toml`, with these
    numbers.
    """
    levels, corrections = numbers["levels"] | numbers.get("lines", {}), numbers["corrections"]
    other = tomllib.loads(files("unisono.guard.diagnosis").joinpath("table.toml").read_text(encoding="utf-8"))
    none = Signs(some=tuple(other[NO_FAILURE]["some"]), against=tuple(other[NO_FAILURE]["against"]))
    entries = {
        cause: _weighed(signs, levels, corrections.get(cause, {}))
        for cause, signs in (*_signs_of_causes(), (NO_FAILURE, none))
    }
    questions = tuple(Question(feature, *words) for feature, words in other["question"].items())
    slope, shift = numbers.get("calibration", (1.0, 0.0))
    return Table(entries, levels, numbers["temperature"], slope, shift, questions)


def _signs_of_causes() -> Iterator[tuple[str, Signs]]:
    return ((entry.cause.id, entry.signs) for entry in all_entries() if entry.signs is not None)


def _weighed(signs: Signs, levels: Mapping[str, float], fitted: Mapping[str, float]) -> _Entry:
    """The signs of a cause with numbers.

    Args:
        levels: of the words of the table.
        fitted: corrections of the weights and of the prior.
    """
    weights = {name: levels[word] for word in reversed(_WORDS) for name in getattr(signs, word)}
    weights = {
        name: weights.get(name, 0.0) + fitted.get(name, 0.0)
        for name in (*weights, *(name for name in fitted if name not in weights and name != "prior"))
    }
    prior = signs.common * levels["common"] + signs.rare * levels["rare"]
    return _Entry(weights, prior + fitted.get("prior", 0.0), signs.check, signs.here)


def log_features(facts: RunFacts, findings: Sequence[Hypothesis]) -> list[Feature]:
    """What the lines of logs say: findings of the rules, and lines that indicate a cause and that
    the run did not survive.
    """
    view = View(facts)
    features: dict[str, Feature] = {}
    for finding in findings:
        if finding.cause in ("undetermined", "healthy"):
            continue
        kind = "proved" if finding.confidence >= _PROVED else "suggested"
        where, text = (
            (finding.evidence[0].where, _words(finding.evidence[0].text))
            if finding.evidence
            else ("", finding.why)
        )
        features[f"{kind}:{finding.cause}"] = Feature(f"{kind}:{finding.cause}", where, text, "log")
    for event in facts.events:
        if event.kind != "warning" and (view.survived(event) or view.is_skipped(event)):
            continue
        if event.cause in CATALOGUE and event.kind in ("warning", "error", "death"):
            name = f"{'warning' if event.kind == 'warning' else 'line'}:{event.cause}"
            features.setdefault(name, Feature(name, event.where, _words(event.text), "log"))
    return list(features.values())


def _words(text: str) -> str:
    """A line of a log without what stands before its message."""
    return split_prefix(text)[1].strip() or text


def scores(features: Iterable[str], table: Table) -> dict[str, float]:
    """The probability of each cause, if something failed."""
    seen = set(features)
    logits = {
        cause: _logit(cause, seen, table) / table.temperature
        for cause in table.entries
        if cause != NO_FAILURE
    }
    top = max(logits.values())
    powers = {cause: math.exp(logit - top) for cause, logit in logits.items()}
    whole = sum(powers.values())
    return {cause: power / whole for cause, power in powers.items()}


def no_failure(features: Iterable[str], table: Table) -> float:
    """The probability that a text reports no failure."""
    return 1 / (1 + math.exp(-_logit(NO_FAILURE, set(features), table)))


EXPLAINS = "explains"
"""Sign that a text explains one failure, with its cause and its fix."""
NARRATION = frozenset({"narrates", "first_person", "asks_help", "tracebacks"})
"""Signs that a text is about a run of its author."""
_FAILING = frozenset(
    [
        "timeout",
        "crash_silent",
        "killed",
        "segfault",
        "nan_loss",
        "gpu_memory",
        "slow",
        "memory_grows",
        "refused",
        "at_end",
        "fails_one_works_two",
        "missing_files",
        "corrupt",
        "shape",
        "module",
    ]
)


@functools.cache
def _own_features() -> frozenset[str]:
    """The features that speak for one cause alone: each is the word of a failure."""
    return frozenset(name for _, signs in _signs_of_causes() for name in signs.own)


def _is_failing(feature: str) -> bool:
    """Whether a feature says that something went wrong, rather than how the run is set up."""
    kind = feature.partition(":")[0]
    return (
        feature in _FAILING
        or feature in _own_features()
        or feature.startswith("hang")
        or kind in ("useless", "line", "proved", "suggested", "tracebacks")
    )


_CALM = frozenset({"question_only", "works_now", "changelog"})
"""What a text without a failure says of itself."""


def _is_calm(names: Sequence[str]) -> bool:
    """Whether a text asks or tells something, and nothing failed."""
    return bool(_CALM & set(names)) and "fails_now" not in names and not any(map(_is_failing, names))


def is_about_a_failure(features: Sequence[Feature]) -> bool:
    """Whether a text beside logs may be about their run, rather than a README."""
    names = [feature.id for feature in features]
    return bool(NARRATION & set(names)) or no_failure(names, default_table()) <= NO_FAILURE_FROM


def _is_narrated(names: Sequence[str]) -> bool:
    return bool(NARRATION & set(names)) and any(map(_is_failing, names))


def _logit(cause: str, features: Iterable[str], table: Table) -> float:
    return table.entries[cause].prior + sum(table.weight(cause, feature) for feature in features)


def rank(
    features: Sequence[Feature], *, framework: str = "", is_failure: bool = False, table: Table | None = None
) -> Ranking:
    """The ranking for what a text says.

    Args:
        features: of the text and its log lines.
        framework: of the program, as in `RunFacts.framework`.
        is_failure: whether something is known to have failed; else the text may be a guide or a
            changelog.
        table: another one than that of the package, for fitting and tests.
    """
    used = table or default_table()
    names = [feature.id for feature in features]
    chances, none = scores(names, used), 0.0 if is_failure else no_failure(names, used)
    if EXPLAINS in names and any(map(_is_failing, names)):
        none = min(none, _NONE_IF_EXPLAINED)
    elif not is_failure and not _is_narrated(names):
        none = max(none, NO_FAILURE_FROM + 0.05)
    is_calm = none > NO_FAILURE_FROM and _is_calm(names)
    if not features or none > _CERTAINLY_NONE or is_calm:
        return Ranking(no_failure=none)
    most = 1 - none if none <= NO_FAILURE_FROM else min(1 - none, LIKELY - 0.01)
    chances = {cause: used.calibrated(chance) * most for cause, chance in chances.items()}
    order = sorted(chances, key=lambda cause: -chances[cause])
    supported = [cause for cause in order if any(used.weight(cause, name) > 0 for name in names)] or order[:1]
    chosen = [*supported[:1], *(cause for cause in supported[1:MOST] if chances[cause] >= _LEAST_SCORE)]
    return Ranking(
        hypotheses=tuple(_ranked(cause, chances[cause], features, framework, used) for cause in chosen),
        questions=_questions(features, chances, used),
        unlikely=_unlikely(features, chances, used),
        no_failure=none,
    )


def _ranked(
    cause: str, score: float, features: Sequence[Feature], framework: str, table: Table
) -> RankedCause:
    weighed = sorted(
        ((table.weight(cause, feature.id), feature) for feature in features), key=lambda pair: -abs(pair[0])
    )
    remedy = CATALOGUE[cause].remedy
    here = [str(line) for line in remedy if isinstance(line, OwnRunOnly)]
    entry = table.entries[cause]
    return RankedCause(
        cause,
        score,
        because=tuple(feature for weight, feature in weighed if weight > 0)[:_MOST_BECAUSE],
        against=tuple(feature for weight, feature in weighed if weight < 0)[:_MOST_BECAUSE],
        check=tuple(line.replace("{devices}", _devices(features)) for line in entry.check),
        fix=remedy_for_foreign_program(remedy, framework),
        fix_here=tuple(([entry.here] if entry.here else []) + here),
    )


_DEVICES = re.compile(r"CUDA_VISIBLE_DEVICES\W{1,3}(\d[\d,]{0,60})")


def _devices(features: Sequence[Feature]) -> str:
    """The devices that the report names, for a command."""
    return next((match[1].strip(",") for one in features if (match := _DEVICES.search(one.text))), "0,1")


def _questions(
    features: Sequence[Feature], chances: Mapping[str, float], table: Table
) -> tuple[Question, ...]:
    """The questions with the largest expected gain of information, for those that the text does not
    answer.
    """
    seen = {name for feature in features for name in (feature.id, feature.id.removeprefix("not:"))}
    whole = sum(chances.values())
    shares = {cause: chance / whole for cause, chance in chances.items()}
    entropy = _entropy(shares.values())
    gains = {
        question: _gain(yes, shares, entropy)
        for question, (yes, shown_by) in table.answers.items()
        if question.feature not in seen and shown_by.isdisjoint(seen) and _decides(yes, shares)
    }
    best = sorted(gains, key=lambda question: -gains[question])
    return tuple(question for question in best if gains[question] > 0.01)[:_MOST_QUESTIONS]


_TELLING = 1.5
"""Weight from which a feature is a cause's own sign."""


def _shown_by(feature: str, table: Table) -> set[str]:
    """Lines of logs that answer the question for a feature: those of the cause whose own sign it
    is.
    """
    causes = [cause for cause in table.entries if table.weight(cause, feature) >= _TELLING]
    return (
        {f"{kind}:{cause}" for cause in causes for kind in ("warning", "line", "proved")}
        if len(causes) == 1
        else set()
    )


def _decides(yes: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Whether the answers to a question would put different causes first."""
    first = max(shares, key=lambda cause: shares[cause] * yes[cause])
    return first != max(shares, key=lambda cause: shares[cause] * (1 - yes[cause]))


def _gain(yes: Mapping[str, float], shares: Mapping[str, float], entropy: float) -> float:
    """The expected fall of entropy, in nats, if a question is answered with yes or no.

    Args:
        yes: how probable a yes is with each cause.
        shares: of the causes; they sum to 1.
        entropy: of the shares.
    """
    share = sum([part * yes[cause] for cause, part in shares.items()])
    after_yes = after_no = 0.0  # entropies, negative
    for cause, part in shares.items():
        if (after := part * yes[cause] / share) > 0:
            after_yes += after * math.log(after)
        if (after := part * (1 - yes[cause]) / (1 - share)) > 0:
            after_no += after * math.log(after)
    return entropy + share * after_yes + (1 - share) * after_no


def _chance(weight: float) -> float:
    """How probable a feature is with a cause that it has this weight for; a third without any."""
    return min(0.95, max(0.05, 0.33 * math.exp(0.5 * weight)))


def _entropy(shares: Iterable[float]) -> float:
    return -sum(share * math.log(share) for share in shares if share > 0)


def _unlikely(
    features: Sequence[Feature], chances: Mapping[str, float], table: Table
) -> tuple[tuple[str, str], ...]:
    """Frequent causes that the text speaks against."""
    reasons: list[tuple[str, str]] = []
    if len(features) < _LEAST_FOR_EXCLUSION:
        return ()
    for cause, entry in table.entries.items():
        if entry.prior <= 0 or chances.get(cause, 1.0) > _RULED_OUT_SHARE:
            continue
        against = [feature for feature in features if table.weight(cause, feature.id) <= -0.8]
        if against:
            reasons.append((cause, f'{against[0].where} "{against[0].text}"'))
    return tuple(reasons[:3])


_LEAST_FOR_EXCLUSION = 8
"""Features of a text from which its silence about a cause tells something."""


def _evidence(feature: Feature) -> dict[str, str]:
    return {"where": feature.where, "text": feature.text, "kind": feature.kind}

"""What a report says, as features: symptoms, stages, topology, tools, settings, and what was tried.

By dictionaries, no model.

The dictionaries are `terms/en.toml` and `terms/zh.toml`, a list of phrases for each feature; their
syntax is explained in the first.
"""

import functools
import re
import tomllib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal

from unisono.guard.diagnosis.article_text import sectioned
from unisono.guard.diagnosis.report_text import Language, Passage

FeatureKind = Literal["log", "symptom", "setting", "version", "hardware", "statement"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
_KIND_OF_SECTION: dict[str, FeatureKind] = {
    "symptom": "symptom",
    "literal": "symptom",
    "topology": "hardware",
    "setting": "setting",
    "statement": "statement",
    "tried": "statement",
    "context": "statement",
}
_NEGATABLE = ("symptom",)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a report says.

    Attributes:
        id: a name of the dictionaries, `not:NAME` if it is negated, `helped:NAME` or `useless:NAME`
            for a setting that was tried.
        where: the place, as `file:line`.
        text: the sentence or line.
        kind: as in the JSON of a hypothesis.
    """

    id: str
    where: str
    text: str
    kind: FeatureKind


@dataclass(frozen=True, slots=True)
class _Phrase:
    """A phrase of a feature.

    Attributes:
        feature: its name; section: the table of the dictionary.
        hints: a text must contain one of these strings: checked first, since that is fast.
    """

    feature: str
    section: str
    text: str
    hints: tuple[str, ...]


@functools.cache
def _phrases() -> tuple[_Phrase, ...]:
    """The phrases of all languages together: people mix them."""
    return tuple(
        _Phrase(feature, section, phrase, _hints(phrase))
        for section, features in _sections().items()
        for feature, phrases in features.items()
        for phrase in dict.fromkeys(phrases)
    )


_OPTIONAL = re.compile(r"\[[^\[\]]{0,400}\]\?|.\?")
_GROUP = re.compile(r"\[([^\[\]]{0,800})\]")
_BETWEEN = re.compile(r"[\s.*?#|/_=:-]+")


def _hints(phrase: str) -> tuple[str, ...]:
    """The longest word outside of groups; else one word of each alternative of the first group."""
    needed = _OPTIONAL.sub(" ", phrase.lower())
    word = max(_BETWEEN.split(_GROUP.sub(" ", needed)), key=len)
    if len(word) > 1 or (word and not word.isascii()):
        return (word,)
    if group := _GROUP.search(needed):
        return tuple(max(_BETWEEN.split(one), key=len) for one in group[1].split("|"))
    return (word,)


@functools.cache
def _compiled(phrase: str) -> re.Pattern[str]:
    return re.compile(pattern_of(phrase), re.ASCII)


@functools.cache
def _sections() -> dict[str, dict[str, list[str]]]:
    """section → feature → phrases of all languages."""
    sections: dict[str, dict[str, list[str]]] = {}
    for language in LANGUAGES:
        text = (
            files("unisono.guard.diagnosis").joinpath("terms", f"{language}.toml").read_text(encoding="utf-8")
        )
        for section, features in tomllib.loads(text).items():
            for feature, phrases in features.items():
                sections.setdefault(section, {}).setdefault(feature, []).extend(phrases)
    return sections


def feature_names() -> frozenset[str]:
    """All features of the dictionaries."""
    return frozenset(feature for features in _sections().values() for feature in features) | {"tracebacks"}


_PART = re.compile(r"\.\.|\[|\]|\||\*|\?|#| |.")


def pattern_of(phrase: str) -> str:
    """The regular expression of a phrase. Its repetitions are bounded and not nested.

    A word of ASCII letters begins and ends where no letter is beside it, a number where no decimals
    are; Chinese needs no such boundary.

    Raises:
        ValueError: if brackets do not match.
    """
    flat = re.sub(r" ?\.\. ?", "..", phrase.strip().lower())
    parts = _PART.findall(flat)
    last_group = flat.rfind("[") if flat.endswith("]") else len(flat)
    pieces, before_groups, before, index = list[str](), list[str](), " ", 0
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if part == "[":
            before_groups.append(before)
        elif part == "|" and before_groups:
            before = before_groups[-1]
        elif part == "]":
            if not before_groups:
                break
            before_groups.pop()
        if _is_word(part) and before in _BOUNDARIES:
            pieces.append(r"(?<![a-z0-9])")
        pieces.append(_piece(part, before, gap_over_commas=phrase.isascii()))
        if _is_word(part) and (not after or (after in "|]" and index > last_group)):
            pieces.append(r"(?![a-z0-9]|\.\d)" if part.isdigit() else r"(?![a-z0-9])")
        if part not in "[|":
            before = " " if part == ".." or not part.isascii() else part
        index += len(part)
    if before_groups or flat.count("[") != flat.count("]"):
        raise ValueError(f"the brackets of {phrase!r} do not match")
    return "".join(pieces)


_BOUNDARIES = frozenset(" -/(+=:,.\"'")


def _is_word(sign: str) -> bool:
    return len(sign) == 1 and sign.isascii() and sign.isalnum()


def _piece(part: str, before: str, *, gap_over_commas: bool) -> str:
    if part == "..":
        return r"(?:[^.。!?;,]|,(?![\u3400-\u9fff])){0,40}?" if gap_over_commas else r"[^.。!?;,、]{0,24}?"
    if part == "[":
        return "(?:"
    if part == "]":
        return ")"
    if part in "|?":
        return part
    if part == "*":
        return r"[\w.]{0,14}"
    if part == "#":
        return r"[\d][\d.,:]{0,11}"
    if part == " ":
        return r"[\s_`-]{0,3}" if before and not before.isascii() else r"[\s_/`-]{1,3}"
    return re.escape(part)


_NEGATION = re.compile(
    r"(?:\b(?:no|not|never|without|isn't|wasn't|aren't|doesn't|don't|didn't|cannot|neither|nor|instead"
    r" of|rather than)\s(?:[\w-]{1,14}\s){0,2}"
    r"|(?:没有|并没有|没|不是|并非|不会|不再|未|无)[^,。;,、\s]{0,3})$"
)


@dataclass(frozen=True, slots=True)
class _Match:
    """A feature in a sentence, with the place of its phrase."""

    feature: str
    section: str
    phrase: str
    start: int
    end: int


_OTHER_WORDS = re.compile(r"原封不动|雷打不动|[你您]好|(?<=argument |ttribute )['\"`]\w{1,60}")
"""Words that mean something else: idioms, greetings, and names of arguments and attributes."""


def find_features(name: str, passages: Sequence[Passage]) -> list[Feature]:
    """The features of a text, each with its first place.

    What an article gives as the cause is believed, what it gives as the fix has helped, and its
    general advice does not count.

    Args:
        passages: of the text; of log lines only settings and hardware are read.
    """
    text = sectioned(passages[:_MOST_PASSAGES])
    read, sections = text.passages, text.sections if text.is_article else ("",) * len(text.passages)
    whole = "\n".join(passage.text for passage in read).lower()
    phrases = [phrase for phrase in _phrases() if any(hint in whole for hint in phrase.hints)]
    of_logs = [phrase for phrase in phrases if phrase.section in _OF_LOGS]
    of_errors = [phrase for phrase in phrases if phrase.section in _OF_ERRORS]
    features: dict[str, Feature] = {}
    if any(passage.kind == "log" and _TRACEBACK.search(passage.text) for passage in read):
        features["tracebacks"] = Feature("tracebacks", name, "", "log")
    if text.is_article:
        features["explains"] = Feature("explains", name, "", "statement")
    for passage, section in zip(read, sections, strict=True):
        if section == "advice":
            continue
        for match in _VARIABLE.finditer(passage.text):
            setting = f"set:{match[1]}"
            features.setdefault(setting, Feature(setting, f"{name}:{passage.line}", match[0], "setting"))
        used = phrases
        if passage.kind == "log":
            used = of_errors if _FAILS.search(passage.text) else of_logs
        for feature in _of_passage(name, passage, used):
            features.setdefault(feature.id, feature)
            if stated := _stated_by(section, feature):
                features.setdefault(stated.id, stated)
    if text.is_article and "fails_one_works_two" in features:
        features.pop("works_alone", None)
        features.pop("believed:works_alone", None)
    return [
        feature
        for name, feature in features.items()
        if not _EXCLUDED_BY.get(name, frozenset()) & features.keys()
        and (name in _HAPPENED or f"useless:{name}" not in features)
    ]


_HAPPENED = frozenset({"terminal_closed"})
"""What a report tells beside an attempt that did not help, and that is not the attempt."""
_BROAD = frozenset({"versions", "checkpoint", "tokens", "hardware", "user_code", "works_alone"})
"""Features that the explanation of any failure has."""


def _stated_by(section: str, feature: Feature) -> Feature | None:
    """What a section of an article says of a feature: that it is the cause, or that it helped."""
    kinds = {"cause": ("symptom", "stated"), "fix": ("setting", "helped")}
    kind, word = kinds.get(section, ("", ""))
    if feature.kind != kind or not _is_plain(feature.id):
        return None
    return replace(feature, id=f"{word}:{feature.id}", kind="statement")


def _is_plain(name: str) -> bool:
    """Whether a feature is a word of the text itself, and one that says something of the cause."""
    return ":" not in name and name not in _BROAD


_EXCLUDED_BY = {
    "single_gpu": frozenset({"multi_gpu", "multi_node", "works_alone"}),
    "fails_one_works_two": frozenset({"works_alone"}),
}
"""Features that others contradict: who compares one GPU with several does not have one."""
_TRACEBACK = re.compile(
    r"Traceback \(most|File \"[^\"]{1,300}\", line \d|\[rank\d+\]|^\s{0,8}[\w.]{0,80}(?:Error|Exception): "
)
_VARIABLE = re.compile(
    r"\b((?:CUDA|NCCL|GLOO|TORCH|MASTER|HF|OMP|PYTORCH)_[A-Z0-9_]{1,40})=([^\s;,，]{1,3}(?:[^\s;，]{0,80}))"
)
_MOST_PASSAGES = 4000
_OF_LOGS = frozenset({"setting", "topology"})
_OF_ERRORS = frozenset({"setting", "topology", "literal"})
_FAILS = re.compile(
    r"error|fail|exception|warn|fatal|killed|cannot|can't|unable|not found|no such|no"
    r" space|refused|timeout|timed out|abort|invalid|mismatch|missing|unexpected|not"
    r" |signal|undefined|denied|incompatib|corrupt|incomplete|unknown|guess|hang|larger|exceed|too"
    r" (?:many|old|large)",
    re.IGNORECASE,
)
"""A line of a log that says that something is wrong: its words count as those of a person."""


def _matches(text: str, phrases: Sequence[_Phrase]) -> list[_Match]:
    """The features in a text in lower case, each once."""
    matches: dict[str, _Match] = {}
    for phrase in phrases:
        if phrase.feature in matches or not any(hint in text for hint in phrase.hints):
            continue
        if match := _compiled(phrase.text).search(text):
            matches[phrase.feature] = _Match(phrase.feature, phrase.section, phrase.text, *match.span())
    return list(matches.values())


_NAMES = re.compile(
    r"[\w.-]{0,80}/[\w./+-]{1,300}|\b[a-z_]\w{0,60}(?:\.[a-z_]\w{0,60}){1,12}|\bnvidia [\w -]{1,40}"
)
"""Paths, dotted names of modules, and names of devices, in lower case."""


def _of_passage(name: str, passage: Passage, phrases: Sequence[_Phrase]) -> Iterator[Feature]:
    text = _OTHER_WORDS.sub(lambda match: " " * len(match[0]), passage.text.lower())
    where = f"{name}:{passage.line}"
    matches = _matches(text, phrases)
    if passage.kind != "prose" and _NAMES.search(text):
        # The modules of a traceback and the names of devices are no settings of the run.
        bare = _NAMES.sub(lambda match: " " * len(match[0]), text)
        matches = [
            match for match in matches if match.section != "setting" or _compiled(match.phrase).search(bare)
        ]
    names = {match.feature for match in matches}
    for match in matches:
        quote = _around(passage.text, match)
        negated = match.section in _NEGATABLE and _NEGATION.search(text[: match.start][-32:]) is not None
        name_of_it = f"not:{match.feature}" if negated else match.feature
        yield Feature(name_of_it, where, quote, _KIND_OF_SECTION[match.section])
        if passage.kind != "prose":
            continue
        if match.section in ("setting", "literal") and (outcome := _outcome(names)):
            yield Feature(f"{outcome}:{match.feature}", where, quote, "statement")
        if match.section in ("literal", "symptom") and "believed" in names:
            yield Feature(f"believed:{match.feature}", where, quote, "statement")


_CONTEXT_CHARS = 40


def _around(text: str, match: _Match) -> str:
    """The words of a sentence around a phrase: half as many characters where they are Chinese."""
    around = _CONTEXT_CHARS if text.isascii() else _CONTEXT_CHARS // 2
    if len(text) <= 3 * around or len(text.lower()) != len(text):
        return text[: 6 * around]
    first, last = max(0, match.start - around), min(len(text), match.end + around)
    if first and (space := text.find(" ", first, match.start)) >= 0:
        first = space + 1
    if last < len(text) and (space := text.rfind(" ", match.end, last)) >= 0:
        last = space
    return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}"


def _outcome(names: Container[str]) -> str:
    """What came of an attempt, in the words of its sentence."""
    return "useless" if "useless" in names else "helped" if "helped" in names else ""

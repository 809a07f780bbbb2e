"""Shows output in Chinese: printed lines are matched with the texts of the catalogue, and their
values are inserted into the translation.

The sources are English, and so are files, logs and JSON. A text travels between processes and nodes
as it is; only the last moment, where a front prints for a person, translates it
(docs/decisions/0029-translated-where-it-is-printed.md). A sentence without a translation is printed
in English, never half of it. Imported only if the language is not English.
"""

import re
from functools import cached_property, lru_cache
from pathlib import Path

from unisono.base.text import columns

CATALOGUE = Path(__file__).parent / "zh" / "LC_MESSAGES" / "unisono.po"
PLACEHOLDER = re.compile(r"\{[a-z_][a-z0-9_]*\}")
LABELS = ("WHAT", "WHO", "DETECTED", "EVIDENCE", "FIX", "THEN", "EARLIER", "ASK")
"""Labels of the lines of a verdict."""

_ENTRY = re.compile(r'^msgid "(.+)"\nmsgstr "(.*)"$', re.MULTILINE)
_DEEPEST = 8
_HAN, _LATIN = re.compile("[\u3400-\u9fff]"), re.compile("[A-Za-z0-9]")
_PROSE = re.compile(r"(?<![\w./=`-])[a-z]{2,} (?:[a-z]{1,} )?[a-z]{2,}(?![\w./=`-])")
_WORD = re.compile(
    rf"{_PROSE.pattern}|\b(?:the|is|are|was|were|of|and|to|in|an|not|no|for|with|on|at|by|from|it|its|has"
    rf"|have|be|this|that|what|you|free)\b"
)
_HALF = re.compile("(?<![\\w`'])(?:is|are|was|were|has|have|of|waits),?[ ，]*[\u3400-\u9fff，、（]")
"""An English verb in front of Chinese: values were cut at the wrong place."""
_RUN = re.compile(r"(?:\{[a-z_0-9]+\})+")
_JOINT, _QUOTED = re.compile(r"[:;,] "), re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")
_LIST = re.compile(r", (?![^(]*\))")
_MARK = re.compile(r"[,;:]|(?: (?:\(|at |of |in |on ))")
# fmt: off
_NAMES = frozenset({"model", "data", "batch", "memory", "start", "steps", "results", "device", "devices",
                    "config", "system", "settings", "network", "ranks", "eval", "step", "plan", "cut",
                    "split", "bad", "where", "why", "fix", "next", "result"})
# fmt: on
"""Words that are labels of ours, and names of keys and arguments, too: as values they stay."""
# The fewer letters a template has, the less English may be in its values.
_LEAST, _WEAK, _STRONG = 3, 9, 12
_INDENTED = re.compile(r"(\s*(?:[-•] |\d+\. |\d+ {2,})?)(.*)", re.DOTALL)
_COLUMN = re.compile(r"(\S[\w.-]*(?: [A-Z]+|(?: [a-z]+){1,2})?)( {2,})(\S.*)", re.DOTALL)
_WIDEST_LABEL = 20  # columns; a wider column has keys
_STATUS = re.compile(r"((?:pass|WARN|FAIL|\?) +[a-z_.0-9]+ +)(\S.*)", re.DOTALL)
_LABELLED = re.compile(
    r"(error|warning|where|why|fix|next|result|checkpoint|checkpoints|evaluation|cause|check|against|with"
    r" unisono|if this|unlikely|ruled out): +(\S.*)",
    re.DOTALL,
)
_CAUSE = re.compile(r"(.*?)(  \[\w+\])", re.DOTALL)
_SOURCE = re.compile(r"(\S[^:;]{0,120}?): (.+)", re.DOTALL)
_BRACKETED = re.compile(r"(.+?) \(([^()]*(?:\([^()]*\)[^()]*)*)\)", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[a-z`)\]\d][.?!]) (?=[A-Z`])|(?<=\?) ")


def escaped(text: str) -> str:
    """A text as it stands between the quotes of the catalogue."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _unescaped(text: str) -> str:
    return (
        re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text) if "\\" in text else text
    )


def read_entries(path: Path = CATALOGUE) -> dict[str, str]:
    """The translations by the English text, without the empty ones; the catalogue has a line for
    each text.
    """
    pairs = _ENTRY.findall(path.read_text("utf-8"))
    return {_unescaped(english): _unescaped(chinese) for english, chinese in pairs if chinese}


def literals(template: str) -> list[str]:
    """The pieces of a template around its placeholders."""
    return PLACEHOLDER.split(template)


class Chinese:
    """Translates lines and sentences.

    Args:
        entries: of the catalogue.
    """

    def __init__(self, entries: dict[str, str]) -> None:
        self._entries = entries
        self._known = lru_cache(maxsize=512)(self._find)

    @cached_property
    def _templates(self) -> list[tuple[str, str]]:
        """The longest literal piece of each template, and the template; those with most text come
        first.
        """
        split = ((template, literals(template)) for template in self._entries if "{" in template)
        templates = [
            (sum(map(len, pieces)), max(pieces, key=len), template)
            for template, pieces in split
            if len(pieces) > 1
        ]
        templates.sort(key=lambda one: -one[0])
        return [(piece, template) for _, piece, template in templates]

    def __call__(self, text: str) -> str:
        """Printed lines in Chinese, each as far as the catalogue goes; without one it stays as it
        is.
        """
        return "\n".join(map(self.line, text.split("\n")))

    def beginning(self, text: str) -> str:
        """The text of a command in a list of commands, which may be the first sentence or a part of
        it.
        """
        shown = self(text)
        if shown == text and len(text) > _LEAST:
            start = text.removesuffix("...")
            whole = next(
                (chinese for english, chinese in self._entries.items() if english.startswith(start)), text
            )
            return whole.partition("。")[0] + "。" if whole != text else text
        return shown

    def line(self, text: str) -> str:
        """One printed line: its indent and label, and the sentence behind it."""
        indent, body = _INDENTED.fullmatch(text).groups()  # type: ignore[union-attr]
        if not body.strip() or (body not in self._entries and self._is_foreign(body)):
            return text
        if exact := self._entries.get(body):
            return indent + exact
        if match := _STATUS.fullmatch(body):
            return indent + match[1] + self._or_english(match[2])
        if match := _LABELLED.fullmatch(body):
            return indent + self._after_label(match[1], match[2])
        if (match := _COLUMN.fullmatch(body)) and "  " not in match[3].partition("  [")[0]:
            width = len(match[1]) + len(match[2])
            label = match[1] if width > _WIDEST_LABEL else self._entries.get(match[1], match[1])
            return indent + _padded(label, width) + self._or_english(match[3])
        if "  " in body.partition("  [")[0]:  # a row of a table
            return text
        return indent + self._or_english(body)

    def _after_label(self, label: str, text: str) -> str:
        return f"{self._entries.get(label, label)}：{self._or_english(text)}"

    @staticmethod
    def _is_foreign(text: str) -> bool:
        """Whether a line holds no English: numbers, paths, Chinese."""
        return not re.search(r"[A-Za-z]{2}|e\.g", text)

    def sentence(self, text: str, *, depth: int = 0) -> str | None:
        """The translation of a sentence, or of several; None if a part of it has none."""
        return self._known(text.strip(), depth)

    def _or_english(self, text: str) -> str:
        translated = self.sentence(text)
        return text if translated is None else translated

    def _find(self, text: str, depth: int) -> str | None:
        if depth > _DEEPEST or not re.search(r"[A-Za-z]{2}|e\.g", text):
            return None
        return (
            self._entries.get(text)
            or self._by_template(text, depth, foreign=False)
            or self._in_parts(text, depth)
            or self._by_template(text, depth, foreign=True)
        )

    def _by_template(self, text: str, depth: int, *, foreign: bool) -> str | None:
        """The translation by the template with most text that matches.

        Args:
            text: a sentence.
            depth: of the value that it is.
            foreign: whether a value may be a sentence in English, e.g. of a library; and the text a
                joint of two sentences.
        """
        marks = [mark for mark in (" · ", "; ") if mark in text]
        for piece, template in self._templates:
            if piece not in text or not (foreign or all(mark.strip() in template for mark in marks)):
                continue
            match = _pattern(template).fullmatch(text)
            filled = None if match is None else self._filled(template, match, depth, foreign=foreign)
            if filled and not _HALF.search(filled):
                return filled
        return None

    def _filled(self, template: str, match: re.Match[str], depth: int, *, foreign: bool) -> str | None:
        """The translation of a template with the values of a text; None if it has too little text
        of its own for a value in English.
        """
        weight = sum(map(str.isalpha, "".join(literals(template))))
        if foreign and weight < _STRONG:
            return None
        filled = self._entries[template]
        for run, value in zip(_RUN.findall(template), match.groups(), strict=True):
            if template.partition(run)[0].count("`") % 2:  # code
                filled = _inserted(filled, run, value)
                continue
            one = run.count("{") == 1
            if one and weight < _WEAK and value not in self._entries and (not value or _is_joint(value)):
                return None
            chinese = self._value(value, depth + 1, weight) if one else self._joined_values(value, depth + 1)
            if chinese is None and not foreign:
                return None
            filled = _inserted(filled, run, value if chinese is None else chinese)
        return filled.replace("\1", "{")

    def _value(self, value: str, depth: int, weight: int = _STRONG) -> str | None:
        """A value as it is inserted; None for an English sentence that has no translation.

        Args:
            value: of a placeholder.
            depth: of the value.
            weight: letters of the template; with few of them, a single English word counts as a
                sentence.
        """
        if value in _NAMES:
            return value if weight > _LEAST else None
        if value.count("(") != value.count(")"):  # cut at the wrong place
            return None
        translated = self.sentence(value, depth=depth)
        if translated is not None:
            return translated
        if weight <= _LEAST and value.isalpha() and value.islower():
            return None
        return None if (_WORD if weight < _WEAK else _PROSE).search(_QUOTED.sub("", value)) else value

    def _joined_values(self, text: str, depth: int) -> str | None:
        """Two values in a row: as one sentence, or the second one begins with a mark."""
        halves = [(text[: mark.start()], text[mark.start() :]) for mark in _MARK.finditer(text)][::-1]
        for head, clause in halves:  # a sentence that begins with a mark
            tail = self._entries.get(clause) or self._by_template(clause, depth, foreign=False)
            if tail and (first := self._value(head, depth)) is not None:
                return first + tail
        if (whole := self.sentence(text, depth=depth)) is not None:
            return whole
        for head, clause in halves:
            inner = self.sentence(clause[1:], depth=depth) if clause[0] in ",;:" else None
            if inner and (first := self._value(head, depth)) is not None:
                return first + "，；："[",;:".index(clause[0])] + inner
        return None if _PROSE.search(text) else text

    def _in_parts(self, text: str, depth: int) -> str | None:
        """A line that was joined from sentences: each translated, or none."""
        if match := _CAUSE.fullmatch(text):
            inner = self.sentence(match[1], depth=depth + 1)
            return None if inner is None else inner + match[2]
        for separator, joint in ((" · ", " · "), ("; ", "；")):
            if separator in text and (joined := self._each(text.split(separator), joint, depth)):
                return joined
        if len(sentences := _SENTENCE_END.split(text)) > 1 and (joined := self._each(sentences, "", depth)):
            return joined
        if len(parts := _LIST.split(text)) > 1 and (joined := self._each(parts, "，", depth, strict=True)):
            return joined
        if (match := _BRACKETED.fullmatch(text)) and (
            joined := self._each([match[1], match[2]], "\0", depth)
        ):
            return joined.replace("\0", "（") + "）"
        if (match := _SOURCE.fullmatch(text)) and "://" not in match[1]:
            inner = self.sentence(match[2], depth=depth + 1)
            head = self._value(match[1], depth + 1)
            return None if inner is None or head is None else f"{head}：{inner}"
        return None

    def _each(self, parts: list[str], joint: str, depth: int, *, strict: bool = False) -> str | None:
        """The parts joined; None if one is an English sentence (strict: has an English word)
        without translation, or none has one.
        """
        translated = [
            self.sentence(part, depth=depth + 1) if " " in part or not strict else None for part in parts
        ]
        english = _WORD if strict else _PROSE
        if not any(translated) or any(
            one is None and english.search(part) for one, part in zip(translated, parts, strict=True)
        ):
            return None
        return joint.join(part if one is None else one for one, part in zip(translated, parts, strict=True))


def _inserted(text: str, run: str, value: str) -> str:
    """A translation with a value, a blank between Chinese and letters or digits, none within
    Chinese.
    """
    value = value.replace("{", "\1")
    before, _, after = text.partition(run)
    if _HAN.match(value[:1]) and _HAN.match(before[-2:-1]):
        before = before.rstrip(" ")
    if _HAN.match(value[-1:]) and _HAN.match(after[1:2]):
        after = after.lstrip(" ")
    gap = " " if _HAN.match(before[-1:]) and _LATIN.match(value[:1]) else ""
    end = " " if _HAN.match(after[:1]) and _LATIN.match(value[-1:]) else ""
    return before + gap + value + end + after


def _is_joint(value: str) -> bool:
    """Whether a value holds several sentences, not only words in quotes."""
    return bool(_JOINT.search(_QUOTED.sub("", value).strip(" ,")))


def _padded(label: str, width: int) -> str:
    return label + " " * max(width - columns(label), 1)


@lru_cache(maxsize=1024)
def _pattern(template: str) -> re.Pattern[str]:
    """What a template matches; a group for each run of placeholders: without text between them they
    hold one value.
    """
    pieces, runs = _RUN.split(template), [*_RUN.findall(template), ""]
    groups = [r"([\d,]+)" if run == "{n}" else "(.*?)" if run else "" for run in runs]
    return re.compile(
        "".join(re.escape(piece) + group for piece, group in zip(pieces, groups, strict=True)), re.DOTALL
    )


def chinese() -> Chinese:
    """The translator with the catalogue of the package."""
    return Chinese(read_entries())

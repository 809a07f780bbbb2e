"""A report that a person wrote, as sentences and log lines: Markdown, saved pages, e-mails, issue
forms, chat messages.

Nothing is run, fetched or followed. The size is bounded, line numbers are those of the file.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Literal

from unisono.base.causes.signatures import match_line
from unisono.base.text import plain

MOST_BYTES = 1 << 20
"""Size of a report: a larger file is read as a log alone."""
_SENTENCE_CHARS, _LINE_CHARS = 600, 4000
_MOST_PASSAGES = 20_000

Kind = Literal["prose", "log", "code"]
Language = Literal["en", "zh", "other"]


@dataclass(frozen=True, slots=True)
class Passage:
    """A sentence, a line of a log, or a part of a line that is set as code.

    Attributes:
        line: its number in the file, from 1.
        text: without markup, control characters and full-width punctuation.
        kind: prose: a sentence of the reporter; log: a line that a program printed, or a line of a
            config or a shell; code: inline code or a quotation within a sentence.
    """

    line: int
    text: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class ReportText:
    """A text, split.

    Attributes:
        passages: in the order of the text.
        lines: number of lines of the file.
        rows: the lines themselves, for quotations; empty for a page in HTML.
    """

    name: str
    passages: tuple[Passage, ...]
    language: Language
    lines: int
    rows: tuple[str, ...] = ()

    def verbatim(self, line: int, quote: str) -> str:
        """A quotation in the very characters of the file, of one line, without marks that reorder
        text; as it is if it is not found.

        Args:
            line: the number of the line where its passage begins.
            quote: a passage or a part of one: without markup, with other spaces and punctuation.
        """
        letters = "".join(_letters(quote))
        for row in self.rows[line - 1 : line - 1 + _WRAPPED_LINES] if letters else ():
            places = [(letter, place) for place, sign in enumerate(row) for letter in _letters(sign)]
            text = "".join(letter for letter, _ in places)
            length = len(letters)
            if (start := text.find(letters)) < 0:
                length = _common(text, letters)
                start = len(text) - length
            if length >= min(len(letters), _LEAST_QUOTED):
                return plain(_whole_words(row, places[start][1], places[start + length - 1][1] + 1))
        return quote

    def log_text(self) -> str:
        """The lines of logs alone; all others are empty, so that line numbers stay.

        Inline code counts if it is a known log line.
        """
        rows = [""] * self.lines
        for passage in self.passages:
            if passage.kind == "log" or (passage.kind == "code" and _is_quoted_log(passage.text)):
                before = rows[passage.line - 1]
                rows[passage.line - 1] = f"{before}\r{passage.text}" if before else passage.text
        return "\n".join(rows) + "\n"

    @property
    def title_line(self) -> int:
        """The number of its first line that is not empty; 0: it has none."""
        return self.passages[0].line if self.passages else 0

    def is_printed(self, line: int, *, quoted: bool = False) -> bool:
        """Whether a program printed what stands in a line: it is a line of its own, and not words
        within a sentence.

        Args:
            quoted: whether a long quotation within a sentence counts, too.
        """
        return any(
            passage.line == line
            and (
                (passage.kind == "log" and is_log_line(passage.text))
                or (quoted and passage.kind != "prose" and len(passage.text) >= _LONG_QUOTATION)
            )
            for passage in self.passages
        )


_LONG_QUOTATION = 40
"""Characters of a log line that names more than the kind of an error."""


_WRAPPED_LINES = 12
_LEAST_QUOTED = 6
_WORD_SIGN = re.compile(r"[A-Za-z0-9_-]")
_CLOSING = "。.!?;:)]}\"'”』」%"


def _letters(text: str) -> Iterator[str]:
    """The letters and digits of a text, in the form in which passages have them."""
    return (sign for sign in unicodedata.normalize("NFKC", text) if sign.isalnum())


def _whole_words(row: str, first: int, last: int) -> str:
    """A part of a line, with the words that it begins and ends in, and what closes it."""
    while first and _WORD_SIGN.match(row[first]) and _WORD_SIGN.match(row[first - 1]):
        first -= 1
    while last < len(row) and _WORD_SIGN.match(row[last]) and _WORD_SIGN.match(row[last - 1]):
        last += 1
    while last < len(row) and row[last] in _CLOSING:
        last += 1
    return row[first:last]


def _common(text: str, quote: str) -> int:
    """How many characters at the end of a line begin a quotation that goes on below."""
    most = min(len(text), len(quote))
    return next((length for length in range(most, 0, -1) if text.endswith(quote[:length])), 0)


def _is_quoted_log(text: str) -> bool:
    """Whether inline code or a quotation is a line of a log rather than a name."""
    return bool(match_line(text)) or _EXCEPTION.match(text) is not None


_EXCEPTION = re.compile(r"(?:[\w.]{0,120}(?:Error|Exception)|AssertionError):\s")


def read_report(name: str, data: bytes) -> ReportText | None:
    """The report in a file, or None if the file is a log, or too long for a report.

    Args:
        name: the file's name, for example `report.md`.
        data: its contents, at most `MOST_BYTES` + 1 bytes.
    """
    if len(data) > MOST_BYTES:
        return None
    text = _decoded(data)
    if not _may_be_report(name, text):
        return None
    rows = _html_rows(text) if _is_html(text) else enumerate(text.split("\n"), 1)
    passages = _passages(rows)
    if not _is_report(name, passages):
        return None
    prose = " ".join(passage.text for passage in passages if passage.kind == "prose")
    language = language_of(prose)
    lines = () if _is_html(text) else tuple(text.split("\n"))
    bare = tuple(_with_bare_logs(passages, language))
    return ReportText(name, bare, language, text.count("\n") + 1, lines)


def _with_bare_logs(passages: list[Passage], language: Language) -> Iterator[Passage]:
    """The passages, with lines of logs that only their words betray: known ones, and English lines
    of a Chinese report.
    """
    for passage in passages:
        is_bare = (
            passage.kind == "prose"
            and passage.text.isascii()
            and "`" not in passage.text
            and passage.text.count(" ") >= 2
            and not _PERSON.search(passage.text)
            and (language == "zh" or bool(match_line(passage.text)))
        )
        yield replace(passage, kind="log") if is_bare else passage


def sentences_of(text: str) -> list[Passage]:
    """Words of a person without a file, e.g. of a command line."""
    return [Passage(1, sentence, "prose") for sentence in _sentences(_normal(text[:MOST_BYTES]))]


_CJK = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_OTHER_SCRIPT = re.compile(r"[\u0370-\u03ff\u0400-\u052f\u0590-\u06ff\u0900-\u0dff\u0e00-\u0e7f]")
_FREQUENT_ENGLISH = re.compile(
    r"\b(?:the|is|and|of|to|it|in|on|with|not|when|i|my|at|after|a|no|for|but|this|that|how|why|does|can"
    r"|from|works?|fails?|hangs?)\b",
    re.IGNORECASE,
)
_CJK_SHARE, _ENGLISH_SHARE = 0.08, 0.04


def language_of(text: str) -> Language:
    """The language of some prose: English, Chinese, or a language without a dictionary."""
    head = text[:20_000]
    letters = sum(1 for sign in head if sign.isalpha()) or 1
    if len(_KANA_OR_HANGUL.findall(head)) / letters > _CJK_SHARE / 2:
        return "other"
    if len(_CJK.findall(head)) / letters > _CJK_SHARE:
        return "zh"
    if len(_OTHER_SCRIPT.findall(head)) / letters > _CJK_SHARE:
        return "other"
    words = len(re.findall(r"\w+", head)) or 1
    short = words < 12
    return "en" if short or len(_FREQUENT_ENGLISH.findall(head)) / words > _ENGLISH_SHARE else "other"


def _decoded(data: bytes) -> str:
    """The text of bytes in UTF-8, UTF-16 with a byte order mark, or GB 18030."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    try:
        text = data.decode("gb18030")
    except UnicodeDecodeError:
        return data.decode("utf-8", errors="replace")
    return text if len(_CJK.findall(text[:20_000])) > 8 else data.decode("utf-8", errors="replace")


# ------------------------------------------------------------------ saved pages

_HTML = re.compile(r"<!doctype html|<html[\s>]|<body[\s>]", re.IGNORECASE)
_LEFT_OUT = frozenset(
    [
        "script",
        "style",
        "nav",
        "header",
        "footer",
        "aside",
        "form",
        "button",
        "svg",
        "noscript",
        "template",
        "select",
        "iframe",
        "head",
    ]
)
_BLOCKS = frozenset(
    [
        "p",
        "div",
        "li",
        "tr",
        "br",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "pre",
        "td",
        "th",
        "blockquote",
        "article",
        "section",
        "ul",
        "ol",
        "table",
        "hr",
        "dt",
        "dd",
    ]
)
_VOID = frozenset(
    ["br", "hr", "img", "input", "meta", "link", "source", "wbr", "area", "base", "col", "embed", "track"]
)


def _is_html(text: str) -> bool:
    return _HTML.search(text[:4096]) is not None


class _Page(HTMLParser):
    """Collects the text of a page: (line, text, whether it is preformatted)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[tuple[int, str]] = []
        self._parts: list[str] = []
        self._line = 1
        self._hidden = self._pre = 0
        self._hidden_tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            self._hidden += tag == self._hidden_tag
        elif tag in _LEFT_OUT:
            self._hidden, self._hidden_tag = 1, tag
        elif tag == "pre":
            self.end_row()
            self._pre += 1
            self.rows.append((self.getpos()[0], "```"))
        elif tag == "code" and not self._pre:
            self._parts.append("`")
        elif tag in _BLOCKS:
            self.end_row()

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            self._hidden -= tag == self._hidden_tag
        elif tag == "pre" and self._pre:
            self.end_row()
            self._pre -= 1
            self.rows.append((self.getpos()[0], "```"))
        elif tag == "code" and not self._pre:
            self._parts.append("`")
        elif tag in _BLOCKS and tag not in _VOID:
            self.end_row()

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        first, *more = data.split("\n")
        self._add(self.getpos()[0], first)
        for number, part in enumerate(more, 1):
            if self._pre:
                self.end_row()
            self._add(self.getpos()[0] + number, part if self._pre else f" {part}")

    def end_row(self) -> None:
        """Ends a line of text."""
        text = "".join(self._parts)
        if text.strip():
            self.rows.append((self._line, text if self._pre else text.strip()))
        self._parts = []

    def _add(self, line: int, text: str) -> None:
        if not self._parts:
            self._line = line
        if text:
            self._parts.append(text)


def _html_rows(text: str) -> list[tuple[int, str]]:
    page = _Page()
    page.feed(text)
    page.close()
    page.end_row()
    return page.rows


# ------------------------------------------------------------------ lines

_FENCE = re.compile(r"\s{0,40}(?:`{3,}|~{3,})")
_QUOTE = re.compile(r"[\s>]{0,4000}")
_BULLET = re.compile(r"^\s{0,40}(?:[-*+•]|\d{1,3}[.)、])\s+(?=\S)")
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+")
_MARKUP = re.compile(
    r"!?\[([^\]\n]{0,300})\]\([^)\n]{0,600}\)"
    r"|(?<![A-Za-z0-9_*])\*\*(?=\S)([^*\n]{1,300})(?<=\S)\*\*(?![A-Za-z0-9_*])"
    r"|(?<![A-Za-z0-9_])__(?=\S)([^_\n]{1,300}\s[^_\n]{1,300})(?<=\S)__(?![A-Za-z0-9_])"
    r"|</?(?:b|i|br|p|details|summary|kbd|sub|sup)/?>",
    re.IGNORECASE,
)
"""A link, an emphasis, or a tag. Only pairs are one: `2**3`, `**kwargs` and `__init__` are words of
the report.
"""
_INLINE = re.compile(
    r"`{1,3}([^`\n]{2,1500})`{1,3}|[“「『]([^“”「」『』\n]{6,600})[”」』]|\"([^\"\n]{12,600})\""
)
_FOREIGN_RUN = re.compile(r"[!-~][ -~]{18,1500}[!-~]")
"""ASCII within a Chinese sentence: nearly always words of a program."""
_LOG_LINE = re.compile(
    r"""^\s{0,200}(?:
      \[?\d{4}[-/]\d\d[-/]\d\d[T ,_]\d\d:\d\d | \[?\d\d:\d\d:\d\d | [IWEF]\d{4}\s\d\d:
    | [A-Z][a-z]{2}\s+\d{1,2}\s\d\d:\d\d:\d\d
    | \[?(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL|TRACE)\b[\]:|\s] | \[(?:rank|Rank\s)\d+\]
    | \[\d+\]:?\s | \S{1,80}:\d{1,9}:\d{1,9}\s\[\d+\]\sNCCL
    | Traceback\s\(most | File\s"[^"]{1,300}",\sline
    | [\w.]{0,120}(?:Error|Exception|Warning|Interrupt|Exit)\b(?::\s|\(|$) | raise\s\w | \^{3,}
    | \(\w[^)\n]{0,80}pid=\d+ | \d{1,3}%\|  | [$>]\s\S | \$\s?\w
    | (?:export|set|source|conda|pip3?|python3?|torchrun|deepspeed|accelerate|bash|sh|srun|sbatch
      |mpirun|ray|nvidia-smi|docker|kubectl|swift|xtuner|llamafactory-cli|CUDA_VISIBLE_DEVICES=\S*
      |[A-Z][A-Z0-9_]{3,40}=\S*)\s+[-\w./"'$={(]
    | [A-Z][A-Z0-9_]{3,40}=\S*\s{0,8}\\?$ | --?\w[\w-]*[=\s]\S+\s*\\?$ | [\w.-]{2,60}:\s{1,4}\S{1,120}$
    | \w[\w.]{1,60}\s?=\s?[^=\s]\S{0,200}$ | [{}\[\]()]+,?$ | "[\w.]+":\s
    | \+[-=+]{6,} | \|.{4,300}\|$ | [-=*#]{8,} | \w+:\d+:\d+\s | exitcode\s | \#\d+\s | frame\s\#\d+
    | terminate\scalled | srun:\s | slurmstepd: | Killed$ | Segmentation\sfault
    )""",
    re.VERBOSE,
)
_COMMAND = re.compile(
    r"\s{0,200}(?:set|source|conda|pip3?|python3?|torchrun|deepspeed|accelerate|bash|sh|srun|sbatch|mpirun|ray"
    r"|nvidia-smi|docker|kubectl|swift|xtuner|llamafactory-cli)\s"
)
"""The name of a program at the beginning of a line: of a command, or of a sentence about it."""
_SETTING = re.compile(r"[\w.-]{2,60}:\s{1,4}\S{1,120}$")
_WORDS = re.compile(r"[A-Za-z']{2,}|[\u4e00-\u9fff]")
_MAIL_HEADER = re.compile(
    r"(?:From|To|Cc|Date|Message-ID|Received|Content-Type|MIME-Version|X-[\w-]+|Reply-To): ", re.IGNORECASE
)


def _passages(rows: Iterable[tuple[int, str]]) -> list[Passage]:
    passages: list[Passage] = []
    fenced = False
    prose: list[tuple[int, str]] = []  # the lines of a paragraph
    for number, raw in rows:
        row = plain(raw.replace("\r", " ")[:_LINE_CHARS]).replace("\t", " ")
        row = row[_QUOTE.match(row).end() :] if row.lstrip().startswith(">") else row  # type: ignore[union-attr]
        if fence := _FENCE.match(row):
            fenced = not fenced
            row = row[fence.end() :].strip("`~ ")
            if not row or row.isalnum():  # the language of the block
                row = ""
        text = _prose(row, fenced=fenced)
        if prose and not _continues(prose[-1][1], row, text):
            passages += _of_paragraph(prose)
            prose = []
        if text:
            prose.append((number, text))
        elif row.strip() and not _MAIL_HEADER.match(row):
            passages.append(Passage(number, row, "log"))
        if len(passages) > _MOST_PASSAGES:
            break
    return passages + _of_paragraph(prose)


def _prose(row: str, *, fenced: bool) -> str:
    """The words of a person in a line, without markup; empty for a line of a log and for an empty
    line.
    """
    if not row.strip() or _MAIL_HEADER.match(row) or is_log_line(row) or (fenced and not _is_sentence(row)):
        return ""
    text = _normal(_HEADING.sub("", _BULLET.sub("", row)))
    return "" if "`" not in row and is_log_line(text) else text


_WRAPPED_CHARS = 40
_ENDED = (".", "!", "?", ":", ";", "。", "|")


def _continues(before: str, row: str, text: str) -> bool:
    """Whether a line continues the sentence of the line before: texts of e-mails and some editors
    are wrapped.
    """
    return bool(
        text
        and len(before) >= _WRAPPED_CHARS
        and not before.rstrip().endswith(_ENDED)
        and row.lstrip()[:1].islower()
        and not _CJK.search(before)
    )


def _of_paragraph(lines: Sequence[tuple[int, str]]) -> list[Passage]:
    """The passages of some lines of prose that belong together, each with the line where it
    begins.
    """
    passages: list[Passage] = []
    for number, text in lines:
        passages += [Passage(number, match[match.lastindex or 0], "code") for match in _INLINE.finditer(text)]
        runs = _FOREIGN_RUN.finditer(text) if _CJK.search(text) else ()
        passages += [
            Passage(number, match[0], "code")
            for match in runs
            if "`" not in match[0] and match[0].count(" ") >= 2
        ]
    left = list(lines)
    for sentence in _sentences(_MARKUP.sub(_without_markup, " ".join(text for _, text in lines))):
        while len(left) > 1 and sentence[:_BEGINNING] not in left[0][1]:
            left.pop(0)
        passages.append(Passage(left[0][0], sentence, "prose"))
    return passages


def _without_markup(match: re.Match[str]) -> str:
    """The text of a link or an emphasis; a space for a tag, which may stand between two words."""
    return " " if match.lastindex is None else match[match.lastindex]


_BEGINNING = 12


def is_log_line(row: str) -> bool:
    """Whether a line was printed by a program or is part of a config or a shell session, as far as
    its form tells.
    """
    if _LOG_LINE.match(row):
        if _COMMAND.match(row) and _is_sentence(row):
            return False
        words = len(_WORDS.findall(row))
        return not (_SETTING.match(row.strip()) and _CJK.search(row)) and not (
            row.lstrip()[:2] in ("# ", "> ") and words > 3
        )
    return False


def _is_sentence(row: str) -> bool:
    """Whether a line in a code block is a sentence all the same: people put whole reports into
    one.
    """
    if len(_CJK.findall(row)) >= 6:
        return True
    words = _WORDS.findall(row)
    signs = sum(1 for sign in row if sign in "{}[]()=<>/\\|_:;\"'#@$")
    return len(words) >= 7 and signs <= len(words) // 5 and len(_FREQUENT_ENGLISH.findall(row)) >= 3


def _normal(text: str) -> str:
    """Full-width letters and punctuation as ASCII, so that a log line that an input method changed
    is known again.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", text).replace("“", '"').replace("”", '"').replace("’", "'")


_SENTENCE_END = re.compile(
    r"(?<=[。!?;])\s*|(?<=[a-z)\]\"'\d]{2}[.])\s+(?=[A-Z\"'(\u4e00-\u9fff])|(?<=[a-z]{2}\.)\s+"
)


_BESIDE_CJK = re.compile(r"(?<=[\u3400-\u9fff]) | (?=[\u3400-\u9fff])")


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a line, without the spaces that some put between Chinese and other words."""
    for part in _SENTENCE_END.split(text):
        sentence = _BESIDE_CJK.sub("", " ".join(part.split()))
        yield from (
            sentence[start : start + _SENTENCE_CHARS] for start in range(0, len(sentence), _SENTENCE_CHARS)
        )


_PROSE_NAMES = (".md", ".html", ".htm", ".eml", ".rst", ".markdown")
_PERSON = re.compile(
    r"\b(?:i|i'm|i've|my|we|our|me|hi|hello|thanks|please|anyone|does anybody|help|describe the bug|expected"
    r" behaviou?r|reproduction|system info|environment|steps to"
    r" reproduce)\b|我|请问|求助|大佬|怎么|为什么|谢谢|你好|您好|大家|环境|复现|报错|问题",
    re.IGNORECASE,
)
"""Words of a person, which some programs print, too."""
_ADDRESS = re.compile(
    r"\b(?:I|Im|ive)(?:'m|'ve|'d)?\s[a-z]{2}|^(?:Hi|Hello|Dear|Hey)\b|\b[Tt]hank(?:s|"
    r" you)\b|\b(?:[Aa]nyone|[Aa]nybody|any (?:idea|help|hint|advice))\b|^#{1,4}"
    r" \S|\*\*(?:Describe|Expected|To Reproduce|Environment)"
    r"|\b(?:[Hh]ow (?:can|do|to)|[Ww]hy|[Ww]hat) .{3,200}\?|\b(?:our|my|our)"
    r" (?:cluster|run|job|training|script|code|setup|server|model|machine|nodes?)\b|\b[Ww]e"
    r" (?:have|train|run|see|tried|get|use)\b|\b(?:hangs?|stuck|crash(?:es)?|fails?)"
    r" (?:after|when|at|while|with|on|in)\b"
)
"""Words by which a person addresses others."""
_LEAST_CJK = 8


_HEAD_CHARS, _TAIL_CHARS = 24_000, 8_000


def _may_be_report(name: str, text: str) -> bool:
    """A quick look at the ends of a file, where a person's words stand: most files are logs, and
    there may be thousands.
    """
    if name.lower().endswith(_PROSE_NAMES) or text.count("\n", 0, _HEAD_CHARS) <= _LONG:
        return True
    ends = text[:_HEAD_CHARS] + text[-_TAIL_CHARS:]
    return _ADDRESS.search(ends) is not None or len(_CJK.findall(ends)) >= _LEAST_CJK


def _is_report(name: str, passages: list[Passage]) -> bool:
    """Whether a person wrote the text, or a part of it.

    Programs print sentences, too, but do not ask for help.

    A file whose name says that it is a text needs no proof; a log needs two sentences of a person.
    """
    prose = [passage for passage in passages if passage.kind == "prose"]
    if name.lower().endswith(_PROSE_NAMES):
        return bool(prose)
    least = 2 if _LOG_NAME.search(name) or len(passages) > _LONG else 1
    written = 0
    for passage in prose:
        written += bool(_ADDRESS.search(passage.text)) or len(_CJK.findall(passage.text)) >= _LEAST_CJK
        if written >= least:
            return True
    english = sum(1 for passage in prose if len(_FREQUENT_ENGLISH.findall(passage.text)) >= _LEAST_ENGLISH)
    return least == 1 and english >= max(1, len(passages) / 4)


_LEAST_ENGLISH = 2
"""Frequent words of a sentence, rather than of a program's message."""


_LOG_NAME = re.compile(r"log|rank|node|dmesg|events|smi|std|\.out|\.err", re.IGNORECASE)
_LONG = 12
"""Passages of a text from which one sentence may be an accident."""

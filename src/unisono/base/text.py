"""Text for people: foreign text made safe to show, secrets removed, and quantities with units,
parsed and shown.
"""

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

# C0 and C1 controls, DEL, and the bidirectional and zero-width marks that can hide or reorder text.
_MARKS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff"
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a complete CSI sequence, not only its first byte
    # OSC sets titles, links and the clipboard; one without an end takes nothing with it.
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"
    rf"|[{_MARKS}]"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` without control characters; newlines and tabs stay."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def escape_controls(text: str) -> str:
    r"""`text` with escapes, e.g. `\x1b`, for the characters that `plain` removes; joiners, of which
    emoji and Persian words are made, stay.
    """
    return re.sub(rf"(?![\u200c\u200d])[{_MARKS}\ud800-\udfff]", lambda sign: repr(sign[0])[1:-1], text)


def escape_json(text: str) -> str:
    """JSON of the same value, with escapes for the characters that `plain` removes."""
    return re.sub(rf"[{_MARKS}\ud800-\udfff]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def one_line(text: str, *, limit: int = 0) -> str:
    """`text` on one line, without control characters; cut between words to at most `limit`
    characters, if given, with an ellipsis.
    """
    flat = " ".join(plain(text).split())
    return flat if not limit or len(flat) <= limit else _cut(flat, limit - 1)


def _cut(text: str, kept: int) -> str:
    """The first `kept` characters or a few less, up to the end of a word, with an ellipsis."""
    words = text[:kept] if text[kept].isspace() else text[:kept].rpartition(" ")[0]
    return (words if len(words) > kept // 2 else text[:kept]).rstrip() + "…"


_LABEL = re.compile(
    r"(?:\s*\S+ {2,}|\s+\w+(?:: +|： *)|(?:error|warning): |(?:错误|警告)：|\s*- |\s*\d+\. )(?=\S)"
)
"""`EVIDENCE  `, `  fix:   `, `  - `, `  1. `: the following lines start below what follows it."""
# `3.1 s` stays on one line.
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|[kMGTsh]|ms|min)\b)")
_LEAST_TEXT = 24  # columns beside a label
_ASCII_WORD = re.compile(r"(\s*)(\S+)")
_WIDE = r"\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"
# Chinese breaks between characters, except before closing and after opening punctuation.
_WORD = re.compile(rf"(\s*)((?:[（「《“]?[{_WIDE}]|[^\s{_WIDE}“”]+)[，。；：、！？）」》”)\].,;:]*|[^\s])")


def wrapped(text: str, width: int, *, hanging: int = 2) -> str:
    """`text` with line breaks between words where a line has more than `width` columns; unchanged
    if `width` is 0.

    The further lines of a line without a label are indented by `hanging` columns. A word that is
    longer than a line, e.g. a path, stays whole: the terminal breaks it, and it can still be
    copied.
    """
    return "\n".join(_wrapped_line(line, width, hanging) for line in text.split("\n")) if width else text


def _wrapped_line(line: str, width: int, hanging: int) -> str:
    if columns(line) <= width:
        return line
    indent, lines, last = _indent(line, width, hanging), list[str](), ""
    words = _ASCII_WORD if line.isascii() else _WORD
    for gap, word in words.findall(_BEFORE_UNIT.sub("\0", line)):
        if last.strip() and columns(last + gap + word) > width:
            lines.append(last)
            last = " " * max(0, min(indent, width - columns(word))) + word
        else:
            last += gap + word
    return "\n".join([*lines, last]).replace("\0", " ")


def _indent(line: str, width: int, hanging: int) -> int:
    """The indent of the second line: below the text after a label, else a little to the right of a
    short indent.
    """
    label = _LABEL.match(line)
    if label is not None and label.end() <= width - _LEAST_TEXT:
        return columns(label[0])
    leading = len(line) - len(line.lstrip())
    return leading if leading > 4 else leading + hanging


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut between words with an ellipsis; uncut if it is 0."""
    if not width or columns(text) <= width:
        return text
    kept = width - 1
    while columns(text[:kept]) >= width:
        kept -= 1
    return _cut(text, kept)


def fitting(text: str, width: int) -> str:
    """Parts joined by ` · ` in at most `width` columns: the first and the last part stay as long as
    possible.
    """
    parts = text.split(" · ")
    while len(parts) > 2 and columns(" · ".join(parts)) > width:
        del parts[-2]
    return shortened(" · ".join(parts), width)


def columns(text: str) -> int:
    """The columns of `text` on a terminal: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def library_words(error: BaseException, *, library: str = "transformers") -> str:
    """The innermost error of a library on one line, marked as the library's words."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return f"{library} says: {one_line(text, limit=250) or type(error).__name__}"


def nearest(word: str, choices: list[str], *, alike: float = 0.6) -> str | None:
    """The closest match for `word` in `known`, or None if none is close: `alike` from 0 to 1, at
    which they are equal.
    """
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=alike)
    return close[0] if close else None


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text",
    "bool": "true or false",
    "dict": "an object",
    "model": "an object",
    "mapping": "an object",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
}


def validation_words(error: Any) -> str:
    """The first error of a pydantic ValidationError in plain words: the key, the value, and what it
    should be.
    """
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"])) or "it"
    kind, context = str(first["type"]), first.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing"
    if kind == "extra_forbidden":
        return f"{key} is unknown to this version of unisono"
    if kind == "value_error":
        return f"{key}: {one_line(str(context.get('error')), limit=200)}"
    value = one_line(repr(first["input"]), limit=60)
    if kind == "literal_error":
        return f"{key} is {value} and should be {context.get('expected')}"
    expected = _KINDS.get(kind.partition("_")[0])
    return (
        f"{key} is {value} and should be {expected}"
        if expected
        else f"{key} is {value}, which is out of its range"
    )


def why_unreadable(error: OSError | ValueError) -> str:
    """Why a JSON file cannot be read, from the error of reading or validating it."""
    if hasattr(error, "errors"):  # pydantic's
        return validation_words(error)
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: line {error.lineno}, column {error.colno}"
    return (
        "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else one_line(str(error), limit=200)
    )


Unit = Literal["steps", "epochs", "tokens"]

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKMGBT]?)\s*([A-Za-z%]*)\s*$")
_LONGEST = 60  # characters; with more blanks the pattern would take minutes
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_UNITS: dict[str, Unit] = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "token": "tokens",
    "tokens": "tokens",
}


def _split(text: str) -> tuple[float, str]:
    """The number in `text`, scaled by its k, M or G, and the unit."""
    match = _NUMBER.match(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not an amount with a unit")
    number = float(match[1].replace("_", "")) * _SCALE[match[2]]
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is too large")
    return number, match[3]


@dataclass(frozen=True, slots=True)
class Duration:
    """An amount of training: `3 epochs`, `500 steps` or `2M tokens`."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `3 epochs`, `500 steps`, `2M tokens`.

        Raises:
            ValueError: if the unit is missing or unknown, the amount is not positive, or steps and
                tokens are not whole.
        """
        amount, word = _split(text)
        unit = _UNITS.get(word.lower())
        if unit is None:
            raise ValueError(
                f"{text!r} has no unit; write for example `3 epochs`, `500 steps` or `2M tokens`"
            )
        if amount <= 0:
            raise ValueError(f"{text!r} must be more than zero")
        if unit != "epochs" and amount != int(amount):
            raise ValueError(f"{text!r}: {unit} must be a whole number")
        return cls(amount, unit)

    def __str__(self) -> str:
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount} {self.unit[:-1] if amount == 1 else self.unit}"


@dataclass(frozen=True, slots=True)
class Warmup:
    """A warmup: a number of steps, or a share of all steps."""

    amount: float
    unit: Literal["steps", "%"]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `3%` or `100 steps`.

        Raises:
            ValueError: if it is neither, or the share is not between 0 and 100.
        """
        amount, word = _split(text)
        if word == "%":
            if not 0 <= amount <= 100:
                raise ValueError(f"{text!r} must be between 0% and 100%")
            return cls(amount, "%")
        if _UNITS.get(word.lower()) == "steps" and amount == int(amount):
            return cls(amount, "steps")
        raise ValueError(f"{text!r} is not a valid warmup; write for example `3%` or `100 steps`")

    def steps(self, total: int) -> int:
        """The number of steps of a run of `total` steps."""
        if self.unit == "steps":
            return min(int(self.amount), total)
        return min(total, math.ceil(total * self.amount / 100))

    def __str__(self) -> str:
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount}%" if self.unit == "%" else f"{amount} steps"


def parse_seconds(text: str) -> float:
    """Seconds of `25 seconds`, `25 s`, `2 minutes` or `1 hour`.

    Raises:
        ValueError: if there is no such unit.
    """
    amount, word = _split(text)
    factor = {
        "s": 1,
        "second": 1,
        "seconds": 1,
        "min": 60,
        "minute": 60,
        "minutes": 60,
        "h": 3600,
        "hour": 3600,
        "hours": 3600,
    }.get(word.lower())
    if factor is None:
        raise ValueError(f"{text!r} has no unit of time; write for example `25 seconds` or `2 minutes`")
    return amount * factor


def parse_bytes(text: str) -> int:
    """Bytes of `1 GB`, `50 MB` or `800 kB`; units are decimal.

    Raises:
        ValueError: if there is no such unit, or it is less than a byte.
    """
    amount, word = _split(text)
    if word != "B" or amount < 1:
        raise ValueError(f"{text!r} is not a valid size; write for example `1 GB` or `50 MB`")
    return int(amount)


_FOUR_DIGITS = 999.5  # rounds to 1000


def _three_digits(size: float) -> str:
    return f"{size:.3g}" if abs(size) < _FOUR_DIGITS else f"{size:,.0f}"


def show_bytes(n_bytes: float) -> str:
    """`12.3 MB`: decimal units, three digits."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < _FOUR_DIGITS or unit == "TB":
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1000
    raise AssertionError


_PLACE = re.compile(r"(.*)([:#])(\d+)", re.DOTALL)


def shown_places(places: Sequence[str], *, most: int = 6) -> str:
    """Places such as `rows.jsonl:7` with consecutive ones as a range, in up to `most` parts:
    `rows.jsonl:1-3, 7, b.jsonl:4 and 12 more`.

    A file is named once for all its places that follow one another.
    """
    parts: list[tuple[str, int, int]] = []  # file with its mark, first and last number
    for entry in places:
        match = _PLACE.fullmatch(entry)
        file, number = (match[1] + match[2], int(match[3])) if match else (entry, -1)
        if parts and match and parts[-1][0] == file and parts[-1][2] == number - 1:
            parts[-1] = (file, parts[-1][1], number)
        else:
            parts.append((file, number, number))
    texts, before = [], ""
    for file, first, last in parts[:most]:
        numbers = "" if first < 0 else str(first) if first == last else f"{first}-{last}"
        texts.append(numbers if file == before and numbers else file + numbers)
        before = file
    omitted = sum(last - first + 1 for _, first, last in parts[most:])
    return ", ".join(texts) + (f" and {omitted:,} more" if omitted else "")


def show_seconds(seconds: float) -> str:
    """`0.8 s`, `1 min 40 s`, `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, remainder = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def show_count(n: float) -> str:
    """`1,234` up to ten thousand, then `12.3 k`, `1.23 M`, `4.56 G`."""
    if abs(n) < 10_000:
        return f"{n:,.0f}"
    size = float(n)
    for unit in ("", "k", "M", "G", "T"):
        if abs(size) < _FOUR_DIGITS or unit == "T":
            return f"{_three_digits(size)} {unit}".strip()
        size /= 1000
    raise AssertionError


_URL_WITH_SECRET = re.compile(
    r"^[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@"  # scheme://user:password@
    r"|^https?://[^/@\s]+@"  # https://token@
    # for example …?sig=…
    r"|^[a-z][a-z0-9+.-]*://\S*[?&](?:\w*token|sig|x-amz-signature|password|api_?key|secret)=",
    re.IGNORECASE,
)
# tokens that begin as only tokens do: Hugging Face, AWS, GitHub, GitLab, OpenAI and Anthropic,
# Slack, Google, NVIDIA, PyPI, Docker, JWT
_SHAPES = (
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|sk-(?:[A-Za-z0-9]{2,12}-)?[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}"
    r"|ya29\.[A-Za-z0-9_-]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|pypi-[A-Za-z0-9_-]{40,}|dckr_pat_[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
)
_TOKEN = re.compile(rf"^(?:{_SHAPES})$")
_SECRET_NAME = re.compile(
    r"(^|_)(token|secret|password|passwd|passphrase|api_?key|access_?key|private_?key|credential)s?(_|$)",
    re.IGNORECASE,
)
# The same within a longer text.
_SECRET_IN_TEXT = re.compile(
    r"(?<=://)[^/?#\s]{1,500}(?=@)"
    r"|(?<=[?&])((?:\w*token|sig|x-amz-(?:signature|credential|security-token)|password|api_?key|secret)=)[^&\s\"']+"
    rf"|(?<![A-Za-z0-9])(?:{_SHAPES})(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SHAPES = (
    r"(?:token|secret|password|passwd|passphrase|credentials?"
    r"|(?:api|access|secret|private|account|signing|encryption|auth)[_-]?key|(?<=_)(?:pass|pwd))"
)
_VALUE = r"(?P<value>\"[^\"\n]{1,2000}|'[^'\n]{1,2000}|[^\s\"',;&)\]}]{4,4000})"
_NAMED_SECRET = re.compile(  # HF_TOKEN=…, "api_key": "…", --token …, password: …
    rf"(?P<before>(?:(?<![A-Za-z0-9_-])--?|(?<![A-Za-z0-9]))(?P<lead>[A-Za-z0-9_.-]{{0,30}}?){_SHAPES}"
    rf"(?![A-Za-z0-9_])(?:[\"']?\]?\s{{0,3}}(?:=>|[=:])\s{{0,3}}|[\"']?,?\s{{1,3}}(?=\S)))"
    rf"{_VALUE}",
    re.IGNORECASE,
)
_HEADER = re.compile(  # Authorization: Bearer …, Cookie: …, wandb login …, sshpass -p …
    r"((?:authorization|x-auth-token|x-api-key|private-token)[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:bearer"
    r"|basic|token|digest)\s{1,3})?|\bbearer\s{1,3}|\b(?:set-)?cookie:\s{0,3}"
    r"|\bwandb login (?:--[\w=-]{1,40} ){0,4}|\bsshpass -p ?)([^\s\"',`-][^\s\"',`]{7,4000})",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"[\"']?(?:none|null|true|false|str|string|\d{1,7}|[<\[{(*…$].*)[\"']?$", re.IGNORECASE | re.DOTALL
)
# fmt: off
_MODEL_TOKENS = frozenset({
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "audio", "video", "vision", "stop", "start", "end",
    "special", "next", "last", "first", "num", "max", "min", "per", "new", "decoder_start", "each",
})
"""A token of a model's vocabulary is not a secret: pad_token: "…"."""

# Looked for first, since most lines have none of them.
_HINTS_OF_TOKENS = (
    "://", "?", "&", "hf_", "api_org_", "akia", "asia", "gh", "github_pat_", "glpat-", "sk-", "xox", "aiza", "ya29.",
    "nvapi-", "pypi-", "dckr_pat_", "eyj",
)
# fmt: on
_HINTS_OF_HEADERS = ("authorization", "token", "x-api-key", "bearer", "cookie", "wandb login", "sshpass")
_HINTS_OF_NAMES = ("token", "secret", "passw", "passphrase", "credential", "key", "_pass", "_pwd")


# ---- secrets


def redact(text: str) -> str:
    """Text of a different program with secrets replaced by `…`: errors of storages quote URLs, logs
    print variables.
    """
    low = text.lower()
    if any(sign in low for sign in _HINTS_OF_TOKENS):
        text = _SECRET_IN_TEXT.sub(lambda match: f"{match[1] or ''}…", text)
    if any(sign in low for sign in _HINTS_OF_HEADERS):
        text = _HEADER.sub(r"\1…", text)
    if any(sign in low for sign in _HINTS_OF_NAMES):
        text = _NAMED_SECRET.sub(_redacted_value, text)
    return text


def _redacted_value(match: re.Match[str]) -> str:
    lead, before, value = match["lead"].lower().strip("_.-"), match["before"], match["value"]
    spaced = not before.rstrip().endswith(("=", ":", ">"))
    if spaced and not before.startswith("-"):  # "the token was", not "--token was"
        return match[0]
    if lead.rpartition("_")[2] in _MODEL_TOKENS or lead in _MODEL_TOKENS or _PLACEHOLDER.match(value):
        return match[0]
    return before + (value[0] if value[0] in "\"'" else "") + "…"


def is_secret(value: object) -> bool:
    """Whether a value looks like a secret: a known kind of token, or a URL with credentials."""
    return isinstance(value, str) and bool(_URL_WITH_SECRET.match(value) or _TOKEN.match(value))


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY."""
    return bool(_SECRET_NAME.search(name))


def is_left_by_launcher(name: str) -> bool:
    """Whether a variable of this name belongs to a job of some launcher, or to accelerate."""
    return bool(_LEFTOVER.match(name))


# They would make torch or peft look for other ranks.
_LEFTOVER = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE"
    r"|NODE_RANK|NNODES|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_.*|NCCL_.*|GLOO_.*|PET_.*"
    r"|ACCELERATE_.*|FSDP_.*|DS_.*|DEEPSPEED_.*|MEGATRON_LM_.*|OMPI_COMM_WORLD_.*|PMI_.*|MV2_COMM_WORLD_.*)$"
)


_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9._-]{1,253})|\[(?P<v6>[0-9A-Fa-f:.]{2,45})\])(?::\d{1,5})?", re.ASCII
)


def host_name(header: str | None) -> str | None:
    """The name or address in a Host header, in lower case and without its port (RFC 9110, 7.2).

    None if the header is missing or not valid.
    """
    match = _HOST.fullmatch(header or "")
    return (match["name"] or match["v6"]).lower() if match else None

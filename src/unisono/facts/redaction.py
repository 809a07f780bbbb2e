"""Secrets recognized by their shape or their name: never stored, shown or sent."""

import re

_URL_WITH_SECRET = re.compile(
    r"^[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@"  # scheme://user:password@
    r"|^https?://[^/@\s]+@"  # https://token@
    r"|^[a-z][a-z0-9+.-]*://\S*[?&](?:\w*token|sig|x-amz-signature|password|api_?key|secret)=",  # …?sig=
    re.IGNORECASE,
)
_SHAPES = (  # tokens that begin as only tokens do: Hugging Face, AWS, GitHub, GitLab, OpenAI and Anthropic, Slack, Google, NVIDIA, PyPI, Docker, JWT
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|sk-(?:[A-Za-z0-9]{2,12}-)?[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
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
_KINDS = r"(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|secret|private|account|signing|encryption|auth)[_-]?key|(?<=_)(?:pass|pwd))"
_VALUE = r"(?P<value>\"[^\"\n]{1,2000}|'[^'\n]{1,2000}|[^\s\"',;&)\]}]{4,4000})"
_NAMED_SECRET = re.compile(  # HF_TOKEN=…, "api_key": "…", --token …, password: …
    rf"(?P<before>(?:(?<![A-Za-z0-9_-])--?|(?<![A-Za-z0-9]))(?P<lead>[A-Za-z0-9_.-]{{0,30}}?){_KINDS}(?![A-Za-z0-9_])(?:[\"']?\]?\s{{0,3}}(?:=>|[=:])\s{{0,3}}|[\"']?,?\s{{1,3}}(?=\S)))"
    rf"{_VALUE}",
    re.IGNORECASE,
)
_HEADER = re.compile(  # Authorization: Bearer …, Cookie: …, wandb login …, sshpass -p …
    r"((?:authorization|x-auth-token|x-api-key|private-token)[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:bearer|basic|token|digest)\s{1,3})?|\bbearer\s{1,3}|\b(?:set-)?cookie:\s{0,3}"
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


def redact(text: str) -> str:
    """Text of a different program with secrets replaced by `…`: errors of storages quote URLs, logs print variables."""
    low = text.lower()
    if any(sign in low for sign in _HINTS_OF_TOKENS):
        text = _SECRET_IN_TEXT.sub(lambda found: f"{found[1] or ''}…", text)
    if any(sign in low for sign in _HINTS_OF_HEADERS):
        text = _HEADER.sub(r"\1…", text)
    if any(sign in low for sign in _HINTS_OF_NAMES):
        text = _NAMED_SECRET.sub(_redacted_value, text)
    return text


def _redacted_value(found: re.Match[str]) -> str:
    lead, before, value = found["lead"].lower().strip("_.-"), found["before"], found["value"]
    spaced = not before.rstrip().endswith(("=", ":", ">"))
    if spaced and not before.startswith("-"):  # "the token was", not "--token was"
        return found[0]
    if lead.rpartition("_")[2] in _MODEL_TOKENS or lead in _MODEL_TOKENS or _PLACEHOLDER.match(value):
        return found[0]
    return before + (value[0] if value[0] in "\"'" else "") + "…"


def is_secret(value: object) -> bool:
    """Whether a value looks like a secret: a known kind of token, or a URL with credentials."""
    return isinstance(value, str) and bool(_URL_WITH_SECRET.match(value) or _TOKEN.match(value))


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY."""
    return bool(_SECRET_NAME.search(name))

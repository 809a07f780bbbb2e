"""What is a secret by its looks: such a thing is neither kept, shown nor sent."""

import re

_URL_WITH_SECRET = re.compile(
    r"^[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@"  # scheme://user:password@
    r"|^https?://[^/@\s]+@"  # https://token@
    r"|^[a-z][a-z0-9+.-]*://\S*[?&](?:\w*token|sig|x-amz-signature|password|api_?key|secret)=",  # …?sig=
    re.IGNORECASE,
)
_TOKEN = re.compile(r"^(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,})$")
_SECRET_NAME = re.compile(
    r"(^|_)(token|secret|password|passwd|passphrase|api_?key|access_?key|private_?key|credential)s?(_|$)",
    re.IGNORECASE,
)
# The same within a longer text.
_VEILED = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"
    r"|(?<=[?&])((?:\w*token|sig|x-amz-(?:signature|credential|security-token)|password|api_?key|secret)=)[^&\s\"']+"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b",
    re.IGNORECASE,
)


def veil(text: str) -> str:
    """Another program's text with `…` in place of what is a secret by its looks: errors of storages quote URLs."""
    return _VEILED.sub(lambda found: f"{found[1] or ''}…", text)


def is_secret(value: object) -> bool:
    """Whether a value is a secret by its looks: a known kind of token, or a URL with credentials."""
    return isinstance(value, str) and bool(_URL_WITH_SECRET.match(value) or _TOKEN.match(value))


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY."""
    return bool(_SECRET_NAME.search(name))

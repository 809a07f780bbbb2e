"""Makes foreign text safe to show: rows, model answers, host names and logs lose what would steer a terminal."""

import re

# C0 and C1 controls, DEL, and the bidirectional and zero-width marks that can hide or reorder what is shown.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a whole CSI sequence goes, not only its first byte
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` without control characters; newlines and tabs stay."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def one_line(text: str, *, limit: int = 0) -> str:
    """`text` on one line, without control characters, cut to `limit` characters with an ellipsis if `limit` is given."""
    flat = " ".join(plain(text).split())
    return flat if not limit or len(flat) <= limit else flat[: limit - 1] + "…"


def library_words(error: BaseException, *, library: str = "transformers") -> str:
    """The innermost reason of an error of a library, on one line and marked as its words and not ours."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return f"{library} says: {one_line(said, limit=250) or type(error).__name__}"


def nearest(word: str, known: list[str]) -> str | None:
    """The one of `known` that is most like `word`, or None if none is near."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return close[0] if close else None

"""From tokens to text as they come: whole characters only, and nothing from a stop string on."""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer gives for bytes that are not yet a character
_WINDOW = 8  # tokens before the newest that can change how it is written


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it; all of it if there is none."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(places)] if places else text


class StopStrings:
    """Says whether an answer has come to one of its stop strings; looks at its end only."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # A character takes at most four tokens, where each is a byte.
        self._window = 4 * max(map(len, stops), default=0) + _WINDOW

    def __call__(self, place: int, answer: Sequence[int]) -> bool:
        """Whether the answer must end here."""
        del place
        end = decode(self._tokenizer, answer[-self._window :])
        return any(stop in end for stop in self._stops)


class TextStream:
    """The text of an answer in pieces. All pieces together are the text up to its first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._settled = 0  # tokens whose text is out
        self._start = 0  # tokens before this one no longer matter to how others are written
        self._held = ""  # could be the beginning of a stop string
        self._ended = False

    def push(self, token: int) -> str:
        """What can be shown now that this token has come."""
        self._ids.append(token)
        known = decode(self._tokenizer, self._ids[self._start : self._settled])
        text = decode(self._tokenizer, self._ids[self._start :])
        if text.endswith(_BROKEN) or len(text) <= len(known):
            return ""  # more bytes of the same character are to come
        self._start, self._settled = self._settled, len(self._ids)
        return self._out(text[len(known) :])

    def close(self) -> str:
        """What was held back, when no more tokens come."""
        known = decode(self._tokenizer, self._ids[self._start : self._settled])
        rest = self._out(decode(self._tokenizer, self._ids[self._start :])[len(known) :])
        held, self._held = self._held, ""
        return rest if self._ended else rest + held

    def _out(self, piece: str) -> str:
        if self._ended:
            return ""
        text = self._held + piece
        cut = cut_at_stop(text, self._stops)
        if len(cut) < len(text):
            self._ended, self._held = True, ""
            return cut
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)

"""Text through a tokenizer: ids, and which tokens hold some characters."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tokens(Protocol):
    """An encoded text."""

    ids: list[int]

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        """First and end token that hold any of the characters first..end; None if that is not certain."""
        ...


def encode_texts(tokenizer: Any, texts: Sequence[str], *, special: bool) -> Sequence[Tokens]:
    """The tokens of each text, as `tokenizer(text, add_special_tokens=special)` gives them, neither cut nor padded."""
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [_SlowTokens(tokenizer, text, special=special) for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [
        _FastTokens(encoding) for encoding in backend.encode_batch(list(texts), add_special_tokens=special)
    ]


class _FastTokens:
    """Of the tokenizers library, which knows the characters of each token."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.ids: list[int] = encoding.ids

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        encoding = self._encoding
        begin, last = encoding.char_to_token(first), encoding.char_to_token(end - 1)
        if begin is None or last is None:
            return self._by_extents(first, end)
        while last + 1 < len(self.ids):  # a character may be spread over several tokens
            following = encoding.token_to_chars(last + 1)
            if following is None or following[0] >= end or following[0] == following[1]:
                break
            last += 1
        return begin, last + 1

    def _by_extents(self, first: int, end: int) -> tuple[int, int] | None:
        """For tokenizers that leave blanks out of a token's characters: a token reaches back to the one before it."""
        offsets = np.array(self._encoding.offsets, dtype=np.int64).reshape(-1, 2)
        reached: npt.NDArray[np.int64] = np.maximum.accumulate(offsets[:, 1])
        begins = np.minimum(offsets[:, 0], np.concatenate([[0], reached[:-1]]))
        inside = np.flatnonzero((begins < end) & (offsets[:, 1] > first))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else None


class _SlowTokens:
    """Of a tokenizer in Python: places are found by encoding beginnings of the text, where these line up."""

    def __init__(self, tokenizer: Any, text: str, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._bare: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        self.ids: list[int] = tokenizer(text, add_special_tokens=True).input_ids if special else self._bare
        self._lead = self._place_of_bare()

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        begin, stop = self._tokens_before(first), self._tokens_before(end)
        if begin is None or stop is None or self._lead is None:
            return None
        return self._lead + begin, self._lead + stop

    def _tokens_before(self, character: int) -> int | None:
        part = self._tokenizer(self._text[:character], add_special_tokens=False).input_ids
        return len(part) if self._bare[: len(part)] == part else None

    def _place_of_bare(self) -> int | None:
        n = len(self._bare)
        return next((i for i in range(len(self.ids) - n + 1) if self.ids[i : i + n] == self._bare), None)

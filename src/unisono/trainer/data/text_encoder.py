"""From texts to tokens, with the tokens of given characters; within limits of time and memory,
since a tokenizer.json has patterns of others.
"""

import contextlib
import json
import signal
import string
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from unisono.base.errors import DataError
from unisono.base.text import library_words
from unisono.guard.facts.limits import memory_limited, usable_cores


class Tokens(Protocol):
    """An encoded text.

    Attributes:
        ids: (L,) its tokens.
    """

    ids: list[int]

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The ids, (L,) int32."""
        ...

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        """Begin and end of the tokens that contain any of the characters first..end; None if that
        cannot be determined.
        """
        ...


class TextEncoder:
    """Encodes texts with one tokenizer.

    The tokenizers library takes a quarter less time if it does not record the characters of each
    token. Tokens of a byte-level tokenizer are bytes of the text: the lengths of tokens give their
    characters, for texts in which these are needed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, special: bool, ranges: bool = True) -> Sequence[Tokens]:
        """The tokens of each text, as `tokenizer(text, add_special_tokens=special)` gives them,
        without truncation or padding.

        Args:
            texts: any number.
            special: whether the tokenizer adds its special tokens.
            ranges: False where `range` of the tokens will not be called.
        """
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            return [_SlowTokens(self._tokenizer, text, special=special) for text in texts]
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        vocabulary = self._vocabulary if ranges and not special else None
        in_bytes = vocabulary is not None and vocabulary.repeated <= 32 + vocabulary.aligned // 8
        encode_batch = backend.encode_batch_fast if in_bytes or not ranges else backend.encode_batch
        with bounded_encoding(sum(map(len, texts))):
            pairs = zip(texts, encode_batch(list(texts), add_special_tokens=special), strict=True)
        if vocabulary is None or not in_bytes:
            return [_FastTokens(encoding) for _, encoding in pairs]
        return [_ByteTokens(vocabulary, text, encoding.ids) for text, encoding in pairs]

    def with_escaped(self, text: str, escaped: Sequence[tuple[int, int]], *, special: bool) -> Tokens:
        """The tokens of a text in which some control tokens are text.

        Args:
            text: the text.
            escaped: begin and end character of each of these.
            special: whether the tokenizer adds its special tokens.
        """
        borders = [0, *(position for span in escaped for position in span), len(text)]
        pieces = [text[first:end] for first, end in pairwise(borders)]
        between = iter(self.encode(pieces[::2], special=False))
        backend = self._tokenizer.backend_tokenizer
        with self.control_tokens_as_text():
            as_text = iter(
                [_FastTokens(backend.encode(one, add_special_tokens=False)) for one in pieces[1::2]]
            )
        tokens = [next(as_text if at % 2 else between) for at in range(len(pieces))]
        return _JoinedTokens(tokens, [len(piece) for piece in pieces], self._added() if special else ([], []))

    @contextlib.contextmanager
    def control_tokens_as_text(self) -> Iterator[None]:
        """A context in which a fast tokenizer reads its special tokens as text."""
        backend = self._tokenizer.backend_tokenizer
        before, backend.encode_special_tokens = backend.encode_special_tokens, True
        try:
            yield
        finally:
            backend.encode_special_tokens = before

    def _added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and behind a text."""
        (bare,), (whole,) = (self.encode(["a"], special=special) for special in (False, True))
        n = len(bare.ids)
        first = next((i for i in range(len(whole.ids) - n + 1) if whole.ids[i : i + n] == bare.ids), 0)
        return whole.ids[:first], whole.ids[first + n :]

    @cached_property
    def _vocabulary(self) -> "_ByteVocabulary | None":
        return _ByteVocabulary.of(self._tokenizer.backend_tokenizer)


ENCODING_S = 30.0  # CPU seconds, beside
_ENCODING_S_EACH = 20e-6  # for each character: usual tokenizers take a microsecond
_ENCODING_BYTES = 4 << 30  # of memory, beside
_ENCODING_BYTES_EACH = 1 << 10  # for each character: usual are 180
_THREAD_BYTES = 128 << 20  # of address space that a thread of the library reserves
_PROBE = "".join(letter * 40 + "!" for letter in string.printable) + string.printable
"""Runs, on which bad patterns backtrack, and what a pattern may look for behind them."""
_PROBE_S, _PROBE_BYTES = 5.0, 256 << 20  # 2 ms and below 1 MB are usual


@contextlib.contextmanager
def bounded_encoding(
    characters: int, *, cpu_s: float = ENCODING_S, memory_bytes: int = _ENCODING_BYTES
) -> Iterator[None]:
    """A context for the tokenizers library, which no exception can interrupt; a tokenizer.json has
    patterns of others.

    The kernel ends a process whose CPU time is over (child.TOKENIZER_HAS_NO_END), and the library
    one that gets no more memory.

    Args:
        characters: of all texts.
        cpu_s: CPU seconds, beside those for the characters.
        memory_bytes: beside those for characters and threads.

    Raises:
        DataError: if the library fails.
    """
    memory_bytes += characters * _ENCODING_BYTES_EACH + usable_cores() * _THREAD_BYTES
    signal.setitimer(signal.ITIMER_PROF, cpu_s + characters * _ENCODING_S_EACH)
    try:
        with memory_limited(memory_bytes):
            yield
    except (
        BaseException
    ) as error:  # the library raises Exception itself, and pyo3's PanicException, which is none
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError.of(
            "the tokenizer cannot encode a text",
            where="model.tokenizer, or the model's own tokenizer.json",
            why=library_words(error, library="tokenizers"),
            fix="use the files of the original model",
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def probe_tokenizer(tokenizer: Any) -> None:
    """Encodes a text on which patterns that backtrack without end, and replacements that fill the
    memory, show it at once.

    Raises:
        DataError: if the tokenizer cannot encode it.
    """
    if tokenizer.is_fast:
        with bounded_encoding(len(_PROBE), cpu_s=_PROBE_S, memory_bytes=_PROBE_BYTES):
            tokenizer.backend_tokenizer.encode(_PROBE)


class _Listed:
    """Tokens as a list, and as an array once it is needed."""

    ids: list[int]

    @cached_property
    def array(self) -> npt.NDArray[np.int32]:
        return np.fromiter(self.ids, np.int32, len(self.ids))


class _FastTokens(_Listed):
    """Tokens of the tokenizers library, which knows the characters of each token."""

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
        """For tokenizers that exclude spaces from a token's characters: a token extends back to the
        previous one.
        """
        offsets = np.array(self._encoding.offsets, dtype=np.int64).reshape(-1, 2)
        reached: npt.NDArray[np.int64] = np.maximum.accumulate(offsets[:, 1])
        begins = np.minimum(offsets[:, 0], np.concatenate([[0], reached[:-1]]))
        inside = np.flatnonzero((begins < end) & (offsets[:, 1] > first))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else None


class _ByteVocabulary:
    """The bytes of each token of a byte-level tokenizer that has occurred.

    Attributes:
        backend: of the tokenizers library.
        aligned: texts whose tokens were their bytes.
        repeated: texts that were encoded a second time, with offsets.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.aligned = self.repeated = 0
        self._bytes: list[bytes | None] = []
        self._sizes = np.zeros(0, np.int64)
        for number, token in backend.get_added_tokens_decoder().items():
            self._keep(number, str(token.content).encode())

    @classmethod
    def of(cls, backend: Any) -> Self | None:
        """The vocabulary of a tokenizer whose tokens are the bytes of each text that its normalizer
        leaves as it is; else None.
        """
        try:
            decoder, normalizer = (
                part and json.loads(part.__getstate__()) for part in (backend.decoder, backend.normalizer)
            )
        except Exception as error:  # for a part in Python the library raises Exception itself, not a subclass
            if type(error) is not Exception:
                raise
            return None
        is_byte_level = decoder and decoder["type"] == "ByteLevel"
        is_kept = not normalizer or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD")
        is_random = getattr(backend.model, "dropout", None)  # encoded again, a text would have other tokens
        return cls(backend) if is_byte_level and is_kept and not is_random else None

    def ends(self, tokens: _Listed, text: str) -> npt.NDArray[np.int64] | None:
        """Where each token of a text ends, in bytes, (L,) int64; None if the tokens are not the
        bytes of the text.
        """
        ids = tokens.ids
        try:
            joined = b"".join(map(self._bytes.__getitem__, ids))  # type: ignore[arg-type]  # None raises a TypeError
        except (TypeError, IndexError):
            if not self._learn(ids):
                return None
            joined = b"".join(map(self._bytes.__getitem__, ids))  # type: ignore[arg-type]
        if joined != text.encode():
            return None
        self.aligned += 1
        return self._sizes.take(tokens.array).cumsum()

    def _learn(self, ids: list[int]) -> bool:
        """Keeps the bytes of tokens that have not occurred before; False if a number is too large
        to keep it in a list.
        """
        new = [n for n in {*ids} if n >= len(self._bytes) or self._bytes[n] is None]
        if max(new) >= _MOST_TOKENS:
            return False
        for number in new:
            try:
                self._keep(number, bytes(map(_BYTE_OF.__getitem__, self.backend.id_to_token(number))))
            except KeyError:  # not a token of bytes; with b"" the tokens are not the bytes of the text
                self._keep(number, b"")
        return True

    def _keep(self, number: int, content: bytes) -> None:
        if number >= _MOST_TOKENS:
            return
        if number >= len(self._bytes):
            more = max(number + 1, 2 * len(self._bytes)) - len(self._bytes)
            self._bytes += [None] * more
            self._sizes = np.append(self._sizes, np.zeros(more, np.int64))
        self._bytes[number] = content
        self._sizes[number] = len(content)


_MOST_TOKENS = 1 << 24  # a tokenizer.json may give its tokens any numbers

# The byte of each character of a byte-level vocabulary (Radford et al. 2019): printable ones stand
# for themselves.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class _ByteTokens(_Listed):
    """Tokens of a byte-level tokenizer.

    Where their bytes do not give the characters, the text is encoded again, with offsets.
    """

    def __init__(self, vocabulary: _ByteVocabulary, text: str, ids: list[int]) -> None:
        self._vocabulary = vocabulary
        self._text = text
        self.ids = ids

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        ends, text = self._ends, self._text
        # offsets may exclude spaces
        if ends is None or text[first : first + 1] == " " or text[end - 1 : end] == " ":
            return self._with_offsets.range(first, end)
        if not text.isascii():
            first, end = len(text[:first].encode()), len(text[:end].encode())
        return int(ends.searchsorted(first, "right")), int(ends.searchsorted(end)) + 1

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64] | None:
        return self._vocabulary.ends(self, self._text)

    @cached_property
    def _with_offsets(self) -> _FastTokens:
        self._vocabulary.repeated += 1
        return _FastTokens(self._vocabulary.backend.encode(self._text, add_special_tokens=False))


class _JoinedTokens(_Listed):
    """Tokens of consecutive pieces of a text."""

    def __init__(
        self, pieces: Sequence[Tokens], lengths: Sequence[int], added: tuple[list[int], list[int]]
    ) -> None:
        self.ids = [*added[0], *(i for piece in pieces for i in piece.ids), *added[1]]
        self._pieces = pieces
        self._characters = [0, *accumulate(lengths)]
        self._tokens = list(accumulate((len(piece.ids) for piece in pieces), initial=len(added[0])))

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        begin, stop = self._in_piece(first), self._in_piece(end - 1)
        return None if begin is None or stop is None else (begin[0], stop[1])

    def _in_piece(self, character: int) -> tuple[int, int] | None:
        """The tokens of one character."""
        number = bisect_right(self._characters, character) - 1
        at = character - self._characters[number]
        span = self._pieces[number].range(at, at + 1)
        return None if span is None else (span[0] + self._tokens[number], span[1] + self._tokens[number])


class _SlowTokens(_Listed):
    """Tokens of a tokenizer in Python: places are found by encoding prefixes of the text, if their
    tokens are prefixes, too.
    """

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

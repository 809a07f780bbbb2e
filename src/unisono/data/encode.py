"""From examples to tokens, with the tokens that count in the loss."""

import contextlib
import json
import signal
import string
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from unisono.config.schema import SourceSection
from unisono.data import Completion, Conversation, Example, Exchange, Preference, RowError, Text, grouped
from unisono.data.answer_spans import Rendered, Span, render_answers, with_next_turn
from unisono.data.control_tokens import ControlTokens, ControlTokensMode, refuse_control_tokens, refuse_slow
from unisono.data.formats import FormatName, all_text, to_example
from unisono.data.preference_rows import read_preference, with_answer_of
from unisono.data.rendered_parts import Part, RenderedParts
from unisono.data.template import (
    CHARACTERS,
    ChatTemplate,
    choose_template,
    fallback_template,
    known_stop_ids,
    timers_armed,
)
from unisono.data.thoughts import has_keys, placed, stripped
from unisono.data.token_table import Encoded, EncodedUnit, share_of
from unisono.errors import DataError
from unisono.facts.limits import memory_limited, usable_cores
from unisono.text import library_words, one_line


class Tokens(Protocol):
    """An encoded text.

    Attributes:
        ids: (L,) its tokens.
    """

    ids: list[int]

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The same, (L,) int32."""
        ...

    def range(self, first: int, end: int) -> tuple[int, int] | None:
        """Begin and end of the tokens that contain any of the characters first..end; None if that cannot be determined."""
        ...


class TextEncoder:
    """Encodes texts with one tokenizer.

    The tokenizers library takes a quarter less time if it does not record the characters of each token. Tokens of a byte-level
    tokenizer are bytes of the text: the lengths of tokens give their characters, for texts in which these are needed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, special: bool, ranges: bool = True) -> Sequence[Tokens]:
        """The tokens of each text, as `tokenizer(text, add_special_tokens=special)` gives them, without truncation or padding.

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
            found = zip(texts, encode_batch(list(texts), add_special_tokens=special), strict=True)
        if vocabulary is None or not in_bytes:
            return [_FastTokens(encoding) for _, encoding in found]
        return [_ByteTokens(vocabulary, text, encoding.ids) for text, encoding in found]

    def with_escaped(self, text: str, escaped: Sequence[tuple[int, int]], *, special: bool) -> Tokens:
        """The tokens of a text in which some control tokens are text.

        Args:
            text: the text.
            escaped: begin and end character of each of these.
            special: whether the tokenizer adds its special tokens.
        """
        borders = [0, *(place for span in escaped for place in span), len(text)]
        pieces = [text[first:end] for first, end in pairwise(borders)]
        tokens = self.encode(pieces, special=False)
        backend = self._tokenizer.backend_tokenizer
        with self.control_tokens_as_text():
            as_text = [_FastTokens(backend.encode(piece, add_special_tokens=False)) for piece in pieces[1::2]]
        found = [as_text[at // 2] if at % 2 else tokens[at] for at in range(len(pieces))]
        return _JoinedTokens(found, [len(piece) for piece in pieces], self._added() if special else ([], []))

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
_PROBE_S, _PROBE_BYTES = 5.0, 1 << 30  # 2 ms are usual


@contextlib.contextmanager
def bounded_encoding(
    characters: int, *, cpu_s: float = ENCODING_S, memory_bytes: int = _ENCODING_BYTES
) -> Iterator[None]:
    """A context for the tokenizers library, which no exception can interrupt; a tokenizer.json has patterns of others.

    The kernel ends a process whose CPU time is over (child.TOKENIZER_HAS_NO_END), and the library one that gets no more memory.

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
    # The library raises Exception itself, and its panics are pyo3's PanicException, which is no Exception.
    except BaseException as error:
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
    """Encodes a text on which patterns that backtrack without end, and replacements that fill the memory, show it at once.

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
        """For tokenizers that exclude spaces from a token's characters: a token extends back to the previous one."""
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
        """The vocabulary of a tokenizer whose tokens are the bytes of each text that its normalizer leaves as it is; else None."""
        try:
            decoder, normalizer = (
                part and json.loads(part.__getstate__()) for part in (backend.decoder, backend.normalizer)
            )
        # For a part that is written in Python the library raises Exception itself, not a subclass.
        except Exception as error:
            if type(error) is not Exception:
                raise
            return None
        is_byte_level = decoder and decoder["type"] == "ByteLevel"
        is_kept = not normalizer or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD")
        is_random = getattr(backend.model, "dropout", None)  # encoded again, a text would have other tokens
        return cls(backend) if is_byte_level and is_kept and not is_random else None

    def ends(self, tokens: _Listed, text: str) -> npt.NDArray[np.int64] | None:
        """Where each token of a text ends, in bytes, (L,) int64; None if the tokens are not the bytes of the text."""
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
        """Keeps the bytes of tokens that have not occurred before; False if a number is too large to keep it in a list."""
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

# The byte of each character of a byte-level vocabulary (Radford et al. 2019): printable ones stand for themselves.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class _ByteTokens(_Listed):
    """Tokens of a byte-level tokenizer. Where their bytes do not give the characters, the text is encoded again, with offsets."""

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
        found = self._pieces[number].range(at, at + 1)
        return None if found is None else (found[0] + self._tokens[number], found[1] + self._tokens[number])


class _SlowTokens(_Listed):
    """Tokens of a tokenizer in Python: places are found by encoding prefixes of the text, if their tokens are prefixes, too."""

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


ENCODER_VERSION = 3
"""Part of the cache's key: incremented whenever the same rows could give different tokens or a different loss mask."""

_BATCH_CHARACTERS = 1 << 22  # characters encoded at once; the tokenizer takes about 180 bytes for each

_SHOWN = 400  # characters of a rendered row in a warning

LossOn = Literal["answers", "last-answer", "all"]
Thoughts = Literal["loss", "ignore", "strip"]


@dataclass(frozen=True, slots=True)
class _Job:
    """A text to encode.

    Attributes:
        text: the text.
        answers: trained characters; None: all of them.
        whole: whether it is a complete text: the tokenizer adds its special tokens, and end of sequence is appended.
        not_rendered: parts of the row that are not in the text, in words.
        escaped: characters of control tokens that are text.
        has_control_tokens: whether control tokens of the row's own text are read as such.
        weights: of each answer in the loss, above 0 and up to 1; empty: all 1.
    """

    text: str
    answers: list[Span] | None
    whole: bool
    not_rendered: tuple[str, ...] = ()
    escaped: tuple[Span, ...] = ()
    has_control_tokens: bool = False
    weights: Sequence[float] = ()


class RowEncoder(Protocol):
    """Encodes rows: an Encoder, or a data.lf_encoder.LfEncoder."""

    tokenizer: Any
    stop_ids: set[int]
    warnings: list[str]

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None as long as there is none and no row needed one."""
        ...

    @property
    def absent_tokens(self) -> list[str]:
        """Tokens that the template writes and the tokenizer does not have; -1 is in their places."""
        ...

    def read_row(self, name: FormatName, row: dict[str, Any], source: SourceSection) -> Example:
        """The example of a row of a source.

        Raises:
            RowError: if a column is missing or has an invalid value.
        """
        ...

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """The tokens of each example, or its error."""
        ...

    def encode_pairs(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a pair, the prompt with the chosen answer, and with the rejected one; or its error."""
        ...

    def encode_ratings(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a rated answer, the prompt with it, and with the answer of the example before; or its error.

        The first example gets the answer of the last one.
        """
        ...


class Encoder:
    """Encodes rows with one tokenizer, one template and one rule for the loss.

    Attributes:
        tokenizer: of transformers.
        template: the chat template; None as long as there is none and no row needed the fallback.
        stop_ids: the tokens that end an answer.
        warnings: warnings for the user, each once.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        directory: Path,
        template_file: str | None = None,
        loss_on: LossOn = "answers",
        check_template: bool = True,
        end_at_stop: bool = True,
        show_first: str | None = None,
        thoughts: Thoughts = "loss",
        control_tokens: ControlTokensMode = "keep",
    ) -> None:
        self.tokenizer = tokenizer
        self._thoughts = thoughts
        self._control = ControlTokens(tokenizer)
        self._control_mode = control_tokens
        if control_tokens == "escape":
            refuse_slow(tokenizer)
        self.stop_ids = known_stop_ids(tokenizer, directory)
        stops = tuple(
            str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(self.stop_ids) if i < len(tokenizer)
        )
        self.template: ChatTemplate | None = None
        self._use(choose_template(tokenizer, template_file, stops=stops))
        self.warnings: list[str] = []
        self._texts = TextEncoder(tokenizer)
        self._loss_on = loss_on
        self._check = check_template
        self._end_at_stop = end_at_stop
        self._probed = False
        self._show_first = show_first

    @property
    def absent_tokens(self) -> list[str]:
        """None: a chat template is text, which any tokenizer has tokens for."""
        return []

    def read_row(self, name: FormatName, row: dict[str, Any], source: SourceSection) -> Example:
        """The example of a row of a source.

        Raises:
            RowError: if a column is missing or has an invalid value.
        """
        if name == "preference":
            return read_preference(row, source.columns, source.tags)
        return to_example(name, row, source.columns, source.tags)

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """The tokens of each example, or its error.

        Raises:
            DataError: if the template leaves the end of an answer untrained, or there is no token that ends one.
        """
        return self._encoded(self._jobs(examples))

    def _jobs(self, examples: Sequence[Example]) -> list[_Job | RowError]:
        if not self._probed and any(not isinstance(example, Text) for example in examples):
            self._probed = True
            self._probe(examples)
        with timers_armed():
            jobs = [_bounded(self._job(example)) for example in examples]
        self._show([job for job in jobs if isinstance(job, _Job)])
        return jobs

    def _encoded(self, jobs: Sequence[_Job | RowError]) -> list[Encoded | RowError]:
        encoded: dict[int, Encoded | RowError] = {}
        for whole in (False, True):
            chosen = [(i, job) for i, job in enumerate(jobs) if isinstance(job, _Job) and job.whole is whole]
            for group in grouped(((one, len(one[1].text)) for one in chosen), most=_BATCH_CHARACTERS):
                texts = self._texts.encode(
                    [job.text for _, job in group],
                    special=whole,
                    ranges=any(job.answers for _, job in group),
                )
                for (i, job), tokens in zip(group, texts, strict=True):
                    own = (
                        self._texts.with_escaped(job.text, job.escaped, special=whole)
                        if job.escaped
                        else tokens
                    )
                    encoded[i] = self._finish(job, own)
        return [job if isinstance(job, RowError) else encoded[i] for i, job in enumerate(jobs)]

    def encode_pairs(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a pair, the prompt with the chosen answer, and with the rejected one; or its error."""
        return self._units([example.answers for example in _preferences(examples)], ("chosen", "rejected"))

    def encode_ratings(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a rated answer, the prompt with it, and with the answer of the example before; or its error.

        The first example gets the answer of the last one.
        """
        rated = _preferences(examples)
        own = [example.answers[0] for example in rated]
        others = [*own[-1:], *own[:-1]]
        units = self._units(
            [[answer, with_answer_of(answer, other)] for answer, other in zip(own, others, strict=True)],
            ("its answer", "with the mismatched answer, that of the row before"),
        )
        return [
            unit if isinstance(unit, RowError) else replace(unit, label=example.desirable)
            for unit, example in zip(units, rated, strict=True)
        ]

    def _units(
        self, groups: Sequence[Sequence[Conversation | Completion]], names: tuple[str, str]
    ) -> list[EncodedUnit | RowError]:
        """The units of two answers after the same prompt, or the first error of each; `names` are those of the sides."""
        jobs = self._jobs([example for group in groups for example in group])
        parts = iter(zip(jobs, self._encoded(jobs), strict=True))
        return [_unit([next(parts) for _ in group], names, end_at_stop=self._end_at_stop) for group in groups]

    def _show(self, jobs: list[_Job]) -> None:
        """Adds the first rendered row to the warning that asks for it."""
        if self._show_first is not None and jobs:
            self.warnings.append(f"{self._show_first}, e.g. {one_line(jobs[0].text, limit=_SHOWN)}")
            self._show_first = None

    def _use(self, template: ChatTemplate | None) -> None:
        self.template = template
        if template is not None:
            self._parts = RenderedParts(template.try_render)
        if template is not None and template.end_of_turn is not None:
            self.stop_ids.add(self.tokenizer.convert_tokens_to_ids(template.end_of_turn))

    def _probe(self, examples: Sequence[Example]) -> None:
        """Sets the fallback template if a conversation needs it, and checks once how the template ends an answer."""
        if self.template is None:
            if not any(isinstance(example, Conversation) for example in examples):
                self._probed = False
                return
            substitute = fallback_template(self.tokenizer)
            self._use(substitute)
            self.warnings.append(
                f"the tokenizer has no chat template; rows are rendered as {substitute.origin}"
            )
        template = self.template
        if not self._check or template is None or template.frame is None:
            return
        question = Conversation(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
        job = self._job(question)
        if isinstance(job, RowError):
            return  # the first row with this error reports it
        tokens = self._texts.encode([job.text], special=False)[0]
        trained = tokens.ids if job.answers is None else self._trained_ids(job, tokens)
        if not self.stop_ids.intersection(trained):
            raise DataError.of(
                "the chat template leaves the stop token of an answer out of the loss",
                where=f"data.template: {template.origin}",
                why=f"it trains {one_line(repr(self.tokenizer.decode(trained)), limit=80)}; "
                f"an answer ends with {self._stop_names()}; the trained model would not stop",
                fix="end each answer with that token (inside the generation block, if it has one), or set data.check_template: false",
            )

    def _trained_ids(self, job: _Job, tokens: Tokens) -> list[int]:
        ranges = [tokens.range(first, end) for first, end in job.answers or []]
        return [token for found in ranges if found is not None for token in tokens.ids[found[0] : found[1]]]

    def _stop_names(self) -> str:
        names = [str(self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(self.stop_ids)]
        return " or ".join(names) or "a token that the tokenizer does not name (it has no eos_token)"

    def _job(self, example: Example) -> _Job | RowError:
        try:
            if isinstance(example, Text):
                return self._text_job(example)
            assert not isinstance(example, Exchange | Preference)  # of LfEncoder; encoded answer by answer
            if isinstance(example, Completion):
                if self.template is None:
                    return self._completion_job(example)
                turns = [
                    {"role": "user", "content": example.prompt},
                    {"role": "assistant", "content": example.completion},
                ]
                example = Conversation(turns)
            return self._conversation_job(example)
        except RowError as error:
            return error

    def _completion_job(self, example: Completion) -> _Job:
        """Without a template, prompt and completion are concatenated unchanged."""
        if not example.completion.strip():
            raise RowError("the completion is empty", "write an answer, or remove the row")
        if self.tokenizer.eos_token_id is None:
            raise DataError.of(
                "the tokenizer has no end-of-sequence token",
                where="model.tokenizer",
                why="a completion could not be ended",
                fix="set the tokenizer's eos_token",
            )
        text = example.prompt + example.completion
        answers = None if self._loss_on == "all" else [(len(example.prompt), len(text))]
        return self._plain_job(text, answers, control=self._control_in([example.prompt, example.completion]))

    def _text_job(self, example: Text) -> _Job:
        if not example.text.strip():
            raise RowError("the text is empty", "remove the row")
        kept = self._control_mode == "keep"  # such texts are often rendered already
        return self._plain_job(example.text, None, control=None if kept else self._control_in([example.text]))

    def _plain_job(self, text: str, answers: list[Span] | None, *, control: str | None) -> _Job:
        escapes = control is not None and self._control_mode == "escape"
        escaped = tuple(self._control.spans_in(text)) if escapes else ()
        return _Job(text, answers, True, escaped=escaped, has_control_tokens=bool(control) and not escapes)

    def _control_in(self, texts: Sequence[str]) -> str | None:
        """The first control token in the texts of a row.

        Raises:
            RowError: if there is one, and `data.control_tokens` is "bad".
        """
        found = self._control.first_in(texts)
        if self._control_mode == "bad":
            refuse_control_tokens(found)
        return found

    def _conversation_job(self, example: Conversation) -> _Job:
        assert self.template is not None
        control = self._control_in(_contents_of(example))
        escapes = control is not None and self._control_mode == "escape"
        hidden = self._control.hidden(example) if escapes else None
        example = example if hidden is None else hidden.conversation
        if self._thoughts == "strip":
            example = stripped(example)
        elif has_keys(example):
            key, in_content = self.template.thought_key, self.template.keeps_thoughts_in_content
            example = placed(example, key=key, in_content=in_content)
        rendered = self._rendered(example)
        job = self._without_lost(rendered, self._parts.lost(example, rendered.text))
        if job.answers is not None:
            text, ended = with_next_turn(self.template, job.text, job.answers)
            job = replace(job, text=text, answers=ended)
        if hidden is not None:
            restored = hidden.restored(job.text, job.answers or [])
            answers = None if job.answers is None else restored.spans
            return replace(job, text=restored.text, answers=answers, escaped=tuple(restored.escaped))
        return replace(job, has_control_tokens=control is not None)

    def _rendered(self, example: Conversation) -> Rendered:
        """The text of a conversation with its answers; without them if every token counts."""
        assert self.template is not None
        if self._loss_on == "all":
            return Rendered(self.template.render(example.messages, example.tools), [], [], [])
        return render_answers(self.template, example, last_only=self._loss_on == "last-answer")

    def _without_lost(self, rendered: Rendered, lost: Sequence[Part]) -> _Job:
        """The job of a rendering, without answers whose thoughts are lost.

        Raises:
            RowError: if a part is lost that the answers depend on, or no answer is left.
        """
        counts_all = self._loss_on == "all"
        untaught: dict[int, Part] = {}
        for part in lost:
            is_trained = counts_all or not rendered.messages or part.message in rendered.messages
            if part.kind == "thought" and part.role == "assistant":
                if is_trained and self._thoughts == "loss":
                    untaught[part.message] = part
            elif part.kind != "content" or part.role != "assistant" or is_trained:
                raise RowError(f"{part} is not rendered by the chat template", _fix_of(part))
        notes = [
            f"the answer of message {part.message + 1} does not count, without {part.quoted}"
            if part.message in untaught
            else part.quoted
            for part in lost
        ]
        if counts_all and not untaught:
            return _Job(rendered.text, None, False, not_rendered=tuple(notes))
        messages = rendered.messages or [-1] * len(rendered.answers)
        kept = [number for number, message in enumerate(messages) if message not in untaught]
        if untaught and (not kept or not rendered.messages):
            part = next(reversed(untaught.values()))
            raise RowError(f"{part} is not rendered by the chat template", _fix_of(part))
        answers, weights = [rendered.answers[i] for i in kept], [rendered.weights[i] for i in kept]
        return _Job(rendered.text, answers, False, weights=weights, not_rendered=tuple(notes))

    def _finish(self, job: _Job, tokens: Tokens) -> Encoded | RowError:
        ids, array = tokens.ids, tokens.array
        eos = self.tokenizer.eos_token_id if job.whole else None
        if eos is not None and ids[-1:] != [eos]:
            array = np.append(array, np.int32(eos))
        targets = np.zeros(len(array), np.bool_)
        shares = np.zeros(len(array), np.uint8) if any(map(share_of, job.weights)) else None
        if job.answers is None:
            targets[:] = True
        for number, (first, end) in enumerate(job.answers or [], 1):
            found = tokens.range(first, end)
            if found is None:
                return RowError(
                    "the tokenizer does not map the answer's characters to tokens",
                    "use a fast tokenizer (tokenizer.json)",
                )
            begin, stop = found
            last = stop if job.whole else self._after_stop(ids, begin, stop)
            if last is None:
                return RowError(
                    f"the stop token of answer {number} is not in the loss: an answer ends with {self._stop_names()}",
                    "end each answer with it in the template, or set data.check_template: false",
                )
            targets[begin:last] = True
            if shares is not None:
                shares[begin:last] = share_of(job.weights[number - 1])
        targets[len(ids) :] = True  # the appended end of sequence
        targets[:1] = False
        return Encoded(
            array,
            targets,
            shares=shares,
            not_rendered=job.not_rendered,
            has_control_tokens=job.has_control_tokens,
        )

    def _after_stop(self, ids: list[int], begin: int, end: int) -> int | None:
        """The place after the last stop token of an answer; the model does not write what the template puts after it."""
        for place in range(end - 1, begin - 1, -1):
            if ids[place] in self.stop_ids:
                return place + 1
        return None if self._check else end


def _bounded(job: _Job | RowError) -> _Job | RowError:
    if isinstance(job, RowError) or len(job.text) <= CHARACTERS:
        return job
    return RowError(
        f"it has {len(job.text):,} characters; the maximum is {CHARACTERS:,}", "split it into several rows"
    )


def _preferences(examples: Sequence[Example]) -> list[Preference]:
    assert all(isinstance(example, Preference) for example in examples)
    return list(examples)  # type: ignore[arg-type]  # asserted


def _unit(
    parts: list[tuple[_Job | RowError, Encoded | RowError]], names: tuple[str, str], *, end_at_stop: bool
) -> EncodedUnit | RowError:
    """The unit of encoded answers with the same prompt, in the same tokens.

    A tokenizer may join the end of a prompt and the beginning of an answer in one token. Such tokens are part of the answers: the prompt
    ends where the tokens of the sides begin to differ.

    What a template writes after the stop token (Qwen's: a newline) is not part of an answer: the model never writes it, and its probability
    would count in that of the answer. Only a reward model, whose users score whole rendered rows, sees it.
    """
    jobs, sides = [job for job, _ in parts], [side for _, side in parts]
    errors = [(name, side) for name, side in zip(names, sides, strict=True) if isinstance(side, RowError)]
    if errors:
        name, error = errors[0]
        return error if len(errors) > 1 else RowError(f"{name}: {error.why}", error.fix)
    if len({job.text[: (job.answers or [(0, 0)])[-1][0]] for job in jobs if isinstance(job, _Job)}) > 1:
        return RowError(
            "the chat template renders the prompt differently before each answer",
            "make the beginning of both answers alike (e.g. reasoning in both), or set data.template to a different one",
        )
    rows = [side for side in sides if isinstance(side, Encoded)]
    ends = [int(np.argmax(row.targets)) for row in rows]
    begin = _shared(*(row.ids[: min(ends)] for row in rows))
    for row, end in zip(rows, ends, strict=True):
        row.targets[max(begin, 1) : end] = True
    if end_at_stop:
        rows = [_through_answer(row) for row in rows]
    return EncodedUnit(tuple(rows))


def _through_answer(row: Encoded) -> Encoded:
    """The row up to its last token in the loss."""
    trained = np.flatnonzero(row.targets)
    return row.part(slice(int(trained[-1]) + 1)) if len(trained) else row


def _shared(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """The length of the common beginning of two rows of the same length."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if len(different) else len(one)


def _contents_of(example: Conversation) -> list[str]:
    """The texts of the messages."""
    plain = all(len(message) == 2 for message in example.messages)
    return [message["content"] for message in example.messages] if plain else [all_text(example)]


def _fix_of(part: Part) -> str:
    """What to do about a part that is lost."""
    if part.kind == "thought":
        return "set data.template to one that keeps it, or data.thoughts: ignore (the answer counts without it) or strip (no row has thoughts)"
    if part.kind == "content" and part.role not in ("user", "assistant", "system", "tool"):
        return "write a role that the template knows, or set data.template to one that knows this one"
    return "set data.template to one that renders it, or remove it from the row"

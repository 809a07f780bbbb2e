"""Ingests rows: reads, encodes and fits them, counts them in the ledger, and hands their pieces to
the writer.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from unisono.base.errors import DataError, Problem
from unisono.base.events import Reporter
from unisono.base.files import expand
from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.config.heads import CLASSIFY, ClassifySection, EmbedSection
from unisono.trainer.config.sections import GRPO, PAIRS, PREFERENCE, RATINGS
from unisono.trainer.data import (
    BadRow,
    EmptyAnswerError,
    Example,
    Exchange,
    Labelled,
    Ledger,
    OpenPrompt,
    Place,
    Preference,
    RawRow,
    Row,
    RowError,
    RowFile,
    Similar,
    SourceCounts,
)
from unisono.trainer.data.encode import RowEncoder
from unisono.trainer.data.formats import FLAGS, FormatName
from unisono.trainer.data.labelled_rows import LabelSets
from unisono.trainer.data.pictures.boxes import TAGS, boxed, with_boxes
from unisono.trainer.data.pictures.processor import named_class
from unisono.trainer.data.pictures.row_pictures import (
    PictureColumns,
    has_objects,
    has_picture,
    row_hosts,
    take_pictures,
    with_pictures,
)
from unisono.trainer.data.pictures.store import PictureError, TablePicture
from unisono.trainer.data.prompt_rows import prompt_turns
from unisono.trainer.data.readers import read_rows
from unisono.trainer.data.row_names import RowNames
from unisono.trainer.data.similar_rows import Sides
from unisono.trainer.data.source_format import (
    ONLY_PAIRS,
    ONLY_RATED,
    PAIR,
    RATING,
    SourceFormat,
    settle_format,
    with_file_names,
)
from unisono.trainer.data.sources import RowSource, names_pictures
from unisono.trainer.data.token_table import Encoded, EncodedUnit, TokenWriter

TooLong = Literal["error", "cut", "drop", "split", "balanced", "keep-answer"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A row in pieces of at most max_length tokens, or a unit of two sides, each of at most
    max_length tokens.

    Attributes:
        pieces: one; several if it was split; none if it was dropped, or if no token of it counts in
            the loss. Of a unit its two sides.
        what: used, cut, split, drop, or error.
        tokens_cut: tokens of the row that are not in any piece.
    """

    pieces: list[Encoded]
    what: Literal["used", "cut", "split", "drop", "error"]
    tokens_cut: int = 0


def fit(row: Encoded, *, max_length: int, too_long: TooLong, opening: Sequence[int] = ()) -> Fitted:
    """The row within max_length tokens; `opening` are tokens with which rows begin, and which
    `keep-answer` keeps.

    The pieces of a split row overlap by one token: the first token of a piece is context only, and
    is predicted in the previous piece, so that no loss token is lost. Pieces without a loss token
    are dropped.
    """
    length = len(row.ids)
    if length <= max_length:
        return Fitted([row] if row.targets.any() else [], "cut" if row.cut else "used", row.cut)
    if too_long == "balanced":
        kept = _balanced(row, max_length)
        return Fitted([kept] if kept.targets.any() else [], "cut", length - len(kept.ids))
    if too_long == "cut":
        kept = row.part(slice(max_length))
        return Fitted([kept] if kept.targets.any() else [], "cut", length - max_length)
    if too_long == "keep-answer":
        is_used = row.targets.any()
        return _keep_answer(EncodedUnit((row,)), max_length, opening) if is_used else Fitted([], "cut")
    if too_long == "split":
        return _split(row, max_length)
    return Fitted([], "drop" if too_long == "drop" else "error")


def fit_unit(unit: EncodedUnit, *, max_length: int, too_long: TooLong, opening: Sequence[int] = ()) -> Fitted:
    """The unit with each side within max_length tokens.

    A cut takes the end of the answers, and `keep-answer` the beginning of the prompt, so that both
    sides keep the same prompt. Of a pair the longer side decides whether it is too long, of a rated
    answer its own side: the mismatched one is always cut.
    """
    if unit.is_whole:
        return _fit_whole(unit, max_length=max_length, too_long=too_long)
    if len(unit.sides) == 1:
        return fit(unit.sides[0], max_length=max_length, too_long=too_long, opening=opening)
    decisive = _decisive(unit)
    if too_long == "keep-answer" and max(len(side.ids) for side in decisive) > max_length:
        return _keep_answer(unit, max_length, opening)
    if (
        too_long not in ("cut", "balanced", "keep-answer")
        and max(len(side.ids) for side in decisive) > max_length
    ):
        return Fitted([], "drop" if too_long == "drop" else "error")
    kept = [side.part(slice(max_length)) if len(side.ids) > max_length else side for side in unit.sides]
    cut = sum(len(side.ids) + side.cut for side in unit.sides) - sum(len(side.ids) for side in kept)
    is_usable = all(side.targets.any() for side in kept[: len(decisive)])
    return Fitted(kept if is_usable else [], "cut" if cut else "used", cut)


def _fit_whole(unit: EncodedUnit, *, max_length: int, too_long: TooLong) -> Fitted:
    """A unit whose sides count as a whole, each by its last token; the longest one decides."""
    if max(_lengths(unit)) <= max_length:
        return Fitted(list(unit.sides), "used")
    if too_long != "cut":
        return Fitted([], "drop" if too_long == "drop" else "error")
    kept = [side.part(slice(max_length)) for side in unit.sides]
    for side in kept:
        side.targets[-1:] = True
    lost = sum(len(side.ids) for side in unit.sides) - sum(len(side.ids) for side in kept)
    return Fitted(kept, "cut", lost)


def _decisive(unit: EncodedUnit) -> tuple[Encoded, ...]:
    """The sides that must fit: of a rated answer its own."""
    return unit.sides if unit.label is None else unit.sides[:1]


def _keep_answer(unit: EncodedUnit, max_length: int, opening: Sequence[int]) -> Fitted:
    """The unit with its last answer whole, after as much of the end of the prompt as fits; all
    sides keep the same prompt.

    The opening stays, as the model has seen no text without it. An earlier answer that is cut does
    not count in the loss. What follows a single answer is cut first. The mismatched side of a rated
    answer is cut at its end.

    Raises:
        RowError: if the answer leaves no token of the prompt.
    """
    begin = min(_begin_of_last_answer(side) for side in unit.sides)
    ends = [len(side.ids) for side in unit.sides]
    if len(ends) == 1:
        ends = [int(np.flatnonzero(unit.sides[0].targets)[-1]) + 1]
    kept = len(opening) if unit.sides[0].ids[: min(len(opening), begin)].tolist() == [*opening] else 0
    answers = [end - begin for end in ends[: len(_decisive(unit))]]
    room = max_length - max(answers) - kept
    if room < min(1, begin - kept):
        raise RowError(
            f"its answer alone is too long: {_counts(answers)}, max_length is {max_length}",
            "raise data.max_length, or remove the row",
        )
    first = max(kept, begin - room)
    fitted = [
        _without(side.part(slice(min(end, first - kept + max_length))), kept, first)
        for side, end in zip(unit.sides, ends, strict=True)
    ]
    cut = sum(len(side.ids) for side in unit.sides) - sum(len(side.ids) for side in fitted)
    return Fitted(fitted, "cut", cut)


def _begin_of_last_answer(row: Encoded) -> int:
    """The first token of the last stretch of loss tokens; there is one."""
    last = int(np.flatnonzero(row.targets)[-1])
    before = np.flatnonzero(~row.targets[:last])
    return int(before[-1]) + 1 if len(before) else 0


def _without(row: Encoded, first: int, end: int) -> Encoded:
    """The row without the tokens from `first` to `end`.

    An answer at the cut, which has lost tokens or its question, is context only.
    """
    kept = row.part([*range(first), *range(end, len(row.ids))])
    if end > first and kept.targets[first]:
        targets = kept.targets[first:]
        targets[: len(targets) if targets.all() else int(np.argmin(targets))] = False
    return kept


def _lengths(unit: EncodedUnit) -> list[int]:
    """The tokens of the row, or of both sides of a pair, before anything was cut; of texts that are
    compared those of the longest.
    """
    if unit.is_whole:
        return [max(len(side.ids) for side in unit.sides)]
    return [len(side.ids) + side.cut for side in _decisive(unit)]


def _counts(lengths: Sequence[int]) -> str:
    """The tokens of one row, or of both sides of a pair: "chosen 12, rejected 40 tokens"."""
    one, *others = lengths
    return f"chosen {one}, rejected {others[0]} tokens" if others else f"{one} tokens"


def refuse_equal_sides(unit: EncodedUnit, fitted: Fitted) -> None:
    """Refuses a pair of equal answers.

    Raises:
        RowError: if the answers are equal, or differ only in what was cut off.
    """
    if unit.label is not None or unit.is_whole or len(unit.sides) == 1 or not fitted.pieces:
        return
    chosen, rejected = fitted.pieces
    if not np.array_equal(chosen.ids, rejected.ids):
        return
    if fitted.what == "cut":
        raise RowError(
            "the chosen and the rejected answer are equal up to the cut at data.max_length",
            "raise data.max_length, or remove the row",
        )
    raise RowError(
        "the chosen and the rejected answer are equal", "write two different answers, or remove the row"
    )


def _balanced(row: Encoded, max_length: int) -> Encoded:
    """The row cut turn by turn: what is not in the loss is the source of the answer that
    follows.
    """
    starts = np.flatnonzero(row.targets[1:] & ~row.targets[:-1]) + 1
    ends = np.append(np.flatnonzero(~row.targets[1:] & row.targets[:-1]) + 1, len(row.ids))
    kept: list[int] = []
    first = 0
    for start, end in zip(np.append(starts, len(row.ids)).tolist(), ends.tolist(), strict=False):
        source, target = balance(start - first, end - start, max_length - len(kept))
        kept += [*range(first, first + source), *range(start, start + target)]
        first = end
        if len(kept) >= max_length:
            break
    return row.part(kept)


def balance(source: int, target: int, limit: int) -> tuple[int, int]:
    """How many tokens of a question and of its answer fit into `limit`.

    The answer stays whole if it takes less than half of the limit, the question if it does; else
    both are cut in proportion.
    """
    if 2 * target < limit:
        most = limit
    elif 2 * source < limit:
        most = limit - source
    else:
        most = int(limit * (target / (source + target)))
    kept = min(most, target)
    return min(max(limit - kept, 0), source), kept


def _split(row: Encoded, max_length: int) -> Fitted:
    pieces: list[Encoded] = []
    left_out = 0
    for first in range(0, len(row.ids) - 1, max_length - 1):
        piece = row.part(slice(first, first + max_length))
        piece.targets[0] = False
        if piece.targets.any():
            pieces.append(piece)
        else:
            left_out += len(piece.ids) - 1  # its last token is the next piece's first
    return Fitted(pieces, "split", left_out)


def explain_fit(
    what: str,
    *,
    lengths: Sequence[int],
    max_length: int,
    pieces: int,
    tokens_cut: int,
    too_long: TooLong,
    sides: int = 1,
) -> str:
    """Why a row was cut, split or dropped, for the ledger; `lengths` are the tokens of the row, or
    of both sides of a pair.
    """
    why = f"{_counts(lengths)}, max_length is {max_length}"
    if what == "cut":
        detail = " before the answer" if too_long == "keep-answer" else ""
        return f"{why}: {tokens_cut} cut off{detail}{', on both sides together' if sides > 1 else ''}"
    if what == "split":
        all_pieces = -(-(lengths[0] - 1) // (max_length - 1))
        lost = (
            f", {all_pieces - pieces} without loss tokens dropped ({tokens_cut} tokens)" if tokens_cut else ""
        )
        return f"{why}: split into {all_pieces} pieces{lost}"
    return why


_BATCH = 512  # rows that go through the tokenizer together
_RATED_BATCH = 1000  # rated answers get the answers of other rows of their batch, as LLaMA-Factory's
_SHOWN_PROBLEMS = 20
_REPORT_EVERY_S = 0.5
_INSERTS: tuple[FormatName, ...] = ("messages", "prompt-completion", "preference", "prompt")
"""Formats of rows whose pictures may have no place, as in TRL."""


def _numbers() -> "array[int]":
    return array("q")


@dataclass(frozen=True)
class UsableRows:
    """Columns with one number for every usable row, in the order of the sources.

    Attributes:
        source: index of the source.
        file: index of the file among all files.
        number: line or row in the file.
        first: its first piece in tokens.arrow.
        pieces: number of pieces; of a unit with two sides 1.
        length: its original number of tokens; of a pair that of the chosen side.
        other_length: of a pair that of the rejected side; else 0.
        tokens_cut: number of these that are not in any piece.
        is_cut: 1 if it was cut.
        is_split: 1 if it was split.
        label: 1 if it is a desirable answer; of a row to classify the number of its set of labels.
    """

    source: "array[int]" = field(default_factory=_numbers)
    file: "array[int]" = field(default_factory=_numbers)
    number: "array[int]" = field(default_factory=_numbers)
    first: "array[int]" = field(default_factory=_numbers)
    pieces: "array[int]" = field(default_factory=_numbers)
    length: "array[int]" = field(default_factory=_numbers)
    other_length: "array[int]" = field(default_factory=_numbers)
    tokens_cut: "array[int]" = field(default_factory=_numbers)
    is_cut: "array[int]" = field(default_factory=_numbers)
    is_split: "array[int]" = field(default_factory=_numbers)
    label: "array[int]" = field(default_factory=_numbers)


class IngestProgress:
    """Reports to the front how many rows are done, a few times a second."""

    def __init__(self, report: Reporter, expected: int | None) -> None:
        self._report = report
        self._expected = expected
        self._done = 0
        self._reported = 0.0

    def add(self, rows: int, name: str) -> None:
        """Counts rows that were read."""
        self._done += rows
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            total = None if self._expected is None else max(self._expected, self._done)
            self._report.phase("tokenize", f"tokenizing {name}", done=self._done, total=total)


class PicturesFound(Exception):  # noqa: N818 - ends a reading, and is no error
    """A row has a picture, and the encoder has no processor yet, which takes seconds to load."""


class Ingest:
    """Reads sources one after the other.

    Attributes:
        files: name of each file, and whether its rows are lines; rows refer to a file by its index
            here.
        usable: the usable rows.
        formats: one line per source: its format, and why.
        not_rendered: for usable rows, by their number in `usable`, the parts that are in no token,
            in words.
        labels: those of the usable rows; None unless rows are classified.
        sides: texts of a row of texts that are compared.
    """

    def __init__(
        self,
        data: DataSection,
        encoder: RowEncoder,
        ledger: Ledger,
        writer: TokenWriter,
        progress: IngestProgress,
        *,
        objective: str = "sft",
        limit_rows: int | None = None,
        answer_tokens: int = 0,
        has_environment: bool = False,
        refuses_pictures: str = "this model reads text only",
        classify: ClassifySection | None = None,
        embed: EmbedSection | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            data: of the config.
            encoder: of rows.
            ledger: of all rows.
            writer: of tokens.
            progress: for people.
            objective: of the config.
            limit_rows: of each source; None: all.
            answer_tokens: left free behind each row, for its answer.
            has_environment: whether an environment has the tools of all rows.
            refuses_pictures: why rows with pictures are refused; "": they are not.
            classify: of a config that classifies rows.
            embed: of a config that embeds texts.
        """
        self.sides, self._embed = Sides(), embed
        self.labels = None if classify is None else LabelSets(classify)
        self._has_environment, self._refuses_pictures = has_environment, refuses_pictures
        self._objective = objective
        self._answer_tokens = answer_tokens
        self.files: dict[str, bool] = {}
        self.usable = UsableRows()
        self.formats: list[str] = []
        self.not_rendered: dict[int, list[str]] = {}
        self._with_control_tokens = self._with_inserted = self._with_videos = 0
        self._picture_columns: PictureColumns | None = None
        self._folders: dict[str, Path] = {}
        self._data = data
        self._encoder = encoder
        self._ledger = ledger
        self._writer = writer
        self._progress = progress
        self._limit_rows = limit_rows
        self._file_number: dict[str, int] = {}
        self._problems: list[Problem] = []
        self._misnamed: list[Problem] = []
        self._refused = 0
        self._reasons: set[str] = set()  # a few suffice: the question is whether there is more than one
        self._longest = 0

    def read(self, source: RowSource) -> None:
        """Ingests all rows of a source.

        Raises:
            PicturesFound: if a row has a picture, and the encoder reads none.
            DataError: if a file cannot be read, the format is unknown, or there are no rows.
        """
        path = source.section.path
        self._ledger.sources.append(SourceCounts(path, source.section.weight))
        for file in source.files:
            self.files.setdefault(file.name, file.by_line)
            self._file_number.setdefault(file.name, len(self._file_number))
        rows = islice(chain.from_iterable(read_rows(file) for file in source.files), self._limit_of(source))
        leading = list(_up_to_first(rows))
        if not leading:
            raise DataError.of(f"{path} has no rows", where=path, fix="use a file with rows")
        source = replace(source, section=with_file_names(source, leading[-1]))
        settled = settle_format(source.section, leading[-1], objective=self._objective, key=source.key)
        source, name = replace(source, section=settled.section), settled.name
        self.formats += [settled.line] if settled.line else []
        names = self._names(source, name)
        self._picture_columns = self._columns_of_pictures(source, name)
        self._folders = {file.name: file.path.parent for file in source.files}
        readable = self._readable(source, name, chain(leading, rows), names)
        while batch := list(islice(readable, _RATED_BATCH if self._objective in RATINGS else _BATCH)):
            self._read_batch(path, batch, settled)
        self._misnamed += names.problems(all_rows=self._limit_rows is None)
        if names.has_flags and (self._data.loss_on == "all" or self._objective == "pretrain"):
            self._encoder.warnings.append(
                f"{path}: {', '.join(FLAGS)} in messages have no effect, since every token counts in the loss"
            )

    def _names(self, source: RowSource, name: FormatName) -> RowNames:
        def text_of_template() -> str:
            template = self._encoder.template
            return template.source() if template is not None else ""

        return RowNames(
            source.section,
            name,
            key=source.key,
            ignore=self._data.ignore,
            template=text_of_template,
            refuses_pictures="" if self._reads_pictures else self._refuses_pictures,
        )

    def _columns_of_pictures(self, source: RowSource, name: FormatName) -> PictureColumns | None:
        """Where the rows of a source have pictures; None if they are refused."""
        if not self._reads_pictures:
            return None
        section = source.section
        named = section.media_dir or self._data.media_dir
        folders = [expand(named) if named else Path()]
        tag = None if section.tags is None else section.tags.content_tag
        inserts = section.tags is None and (name in _INSERTS or names_pictures(source))
        return PictureColumns.of(
            section.columns,
            content_tag=tag,
            inserts=inserts,
            folders=[folder.absolute() for folder in folders],
            hosts=row_hosts(self._data),
            frames=None if self._encoder.pictures is None else self._encoder.pictures.videos,
        )

    def _limit_of(self, source: RowSource) -> int | None:
        """The rows to read.

        With `samples`, `rows` limits the pick instead, which is made among all.
        """
        source_limit = source.section.rows if source.section.samples is None else None
        return min((limit for limit in (source_limit, self._limit_rows) if limit is not None), default=None)

    def refuse(self) -> None:
        """Raises an error for the refused rows, if there are any.

        Raises:
            DataError: with the first refused rows, and the number of the others.
        """
        if not self._refused and not self._misnamed:
            return
        problems = list(self._problems)
        omitted = self._refused - len(problems)
        if omitted and len(self._reasons) == 1 and self._refused == sum(s.rows for s in self._ledger.sources):
            first = problems[
                0
            ]  # the template or the encoding is at fault, not the rows: one problem is enough
            problems = [
                Problem(f"none of the {self._refused} rows can be used", first.where, first.why, first.fix)
            ]
        elif omitted:
            problems.append(Problem(f"{omitted} more rows are refused"))
        if self._longest:
            fix = f"data.max_length={self._longest + self._answer_tokens} fits all of them"
            problems.append(
                Problem(f"the longest row has {self._longest} tokens", "data.max_length", fix=fix)
            )
        raise DataError(*self._misnamed, *problems)

    @property
    def pictures(self) -> Sequence[TablePicture]:
        """The pictures of the rows so far."""
        return () if self._encoder.pictures is None else self._encoder.pictures.pictures

    @property
    def warnings(self) -> list[str]:
        """What the rows are not as somebody may expect, one line each."""
        messages = []
        if self.not_rendered:
            rows, first = len(self.not_rendered), next(iter(self.not_rendered.values()))[0]
            messages.append(f"not rendered: parts of {rows} rows, e.g. {first}; data.json lists them")
        if self._with_inserted:
            messages.append(
                f"{self._with_inserted} rows have no place for their pictures (e.g. <image>); pictures are"
                " put at the beginning of the first message of the user, as in TRL"
            )
        if self._with_videos and self._encoder.pictures is not None:
            processor = self._encoder.pictures.processor
            name, most = named_class(processor.processor), self._data.frames.max
            messages.append(
                f"rows with videos: {self._with_videos}; {name} has no tokens for videos, so their frames are"
                f" pictures, one after the other, at most {most} of each (data.frames)"
                if processor.video_placeholder is None
                else f"rows with videos: {self._with_videos}; {name} reads at most {most} frames of each"
                " (data.frames)"
            )
        if self._with_control_tokens:
            rows = self._with_control_tokens
            messages.append(
                f"{rows} rows with control tokens in the text, which the model reads as such;"
                " data.control_tokens: escape makes them text"
            )
        return messages

    def _readable(
        self, source: RowSource, name: FormatName, rows: Iterator[Row], names: RowNames
    ) -> Iterator[tuple[Place, Example]]:
        """The examples of the rows that can be read; the others are counted as bad."""
        counts = self._ledger.sources[-1]
        for row in rows:
            counts.rows += 1
            self._progress.add(1, source.section.path)
            example = row if isinstance(row, BadRow) else self._example(name, row, source, names)
            if isinstance(example, BadRow):
                self._take_bad(example, counts)
            else:
                yield row.place, example

    def _read_batch(self, path: str, batch: list[tuple[Place, Example]], settled: SourceFormat) -> None:
        counts = self._ledger.sources[-1]
        encoded_rows = self._encoded_with_boxes([example for _, example in batch])
        if self._objective in RATINGS and len(batch) == 1:
            self._encoder.warnings.append(
                f"{path}: the answer of {batch[0][0]} is its own mismatched answer, as no other row is in its"
                f" group of {_RATED_BATCH}"
            )
        for (location, _), encoded in zip(batch, encoded_rows, strict=True):
            if isinstance(encoded, EmptyAnswerError) and settled.unread_answers:
                error = encoded.with_unread(settled.unread_answers, settled.answer)
                self._take_bad(error.at(location), counts)
            elif isinstance(encoded, RowError):
                if isinstance(encoded, PictureError):
                    counts.pictures["missing" if encoded.missing else "broken"] += 1
                self._take_bad(encoded.at(location), counts)
            else:
                self._take(location, encoded, counts)

    def _encoded_with_boxes(self, examples: list[Example]) -> list[EncodedUnit | RowError]:
        """The units of the examples, of which the boxes are written as the model's family does."""
        store = self._encoder.pictures
        seen = [part for one in examples for part in boxed(one)]
        if store is None or not seen:
            return self._encoded(examples)
        store.decode(picture for one in seen for picture in one.pictures)
        written: list[Example | RowError] = []
        for example in examples:
            try:
                written.append(with_boxes(example, store, self._data.boxes))
            except RowError as error:
                written.append(error)
        units = iter(self._encoded([one for one in written if not isinstance(one, RowError)]))
        return [one if isinstance(one, RowError) else next(units) for one in written]

    def _encoded(self, examples: list[Example]) -> list[EncodedUnit | RowError]:
        """The units of the examples, as the objective needs them."""
        if self._objective in PAIRS:
            return self._encoder.encode_pairs(examples)
        if self._objective in RATINGS:
            return self._encoder.encode_ratings(examples)
        if self._objective == GRPO:
            return self._encoder.encode_prompts([one for one in examples if isinstance(one, OpenPrompt)])
        if self._objective == CLASSIFY:
            return self._encoder.encode_labelled([one for one in examples if isinstance(one, Labelled)])
        if self._embed is not None:
            similar = [one for one in examples if isinstance(one, Similar)]
            return self._encoder.encode_similar([_with_prefixes(one, self._embed) for one in similar])
        rows = self._encoder.encode(examples)
        return [row if isinstance(row, RowError) else EncodedUnit((row,)) for row in rows]

    def _example(self, name: FormatName, row: RawRow, source: RowSource, names: RowNames) -> Example | BadRow:
        try:
            value = names.checked(row)
            example = self._read_example(name, replace(row, value=value), source)
            self._refuse_other_units(example)
            if self.labels is not None and isinstance(example, Labelled):
                self.labels.check(example, is_training=source.role == "train")
            if isinstance(example, Similar):
                self.sides.check(example)
        except RowError as error:
            return error.at(row.place)
        return example

    @property
    def _reads_pictures(self) -> bool:
        return self._encoder.pictures is not None or not self._refuses_pictures

    def _read_example(self, name: FormatName, row: RawRow, source: RowSource) -> Example:
        """The example of a row, with its pictures.

        Raises:
            PicturesFound: if it has some, and the encoder reads none.
            RowError: if it cannot be read.
        """
        columns = self._picture_columns
        if columns is not None and name == "prompt":  # its other columns are for rewards
            turns = prompt_turns(row.value, source.section.columns)
            tagged = any(tag in str(row.value.get(turn)) for tag in TAGS for turn in turns)
            objects = columns.objects if tagged else None  # else it is for rewards
            columns = replace(columns, turns=turns, sides=(), objects=objects)
        if columns is not None and self._encoder.pictures is None:
            if has_picture(row.value, columns):
                raise PicturesFound
            if has_objects(row.value, columns):
                take_pictures(row.value, columns)  # refuses boxes without a picture
        elif columns is not None:
            return self._with_pictures(name, row, source, columns)
        return self._encoder.read_row(name, row.value, source.section)

    def _with_pictures(
        self, name: FormatName, row: RawRow, source: RowSource, columns: PictureColumns
    ) -> Example:
        if (source.section.media_dir or self._data.media_dir) is None:
            beside = self._folders[row.place.file].absolute()
            columns = replace(columns, folders=[beside, *columns.folders])
        taken = take_pictures(row.value, columns)
        example = self._encoder.read_row(name, taken.value, source.section)
        self._with_inserted += taken.inserted and not names_pictures(source)
        self._with_videos += bool(taken.videos)
        return with_pictures(example, taken) if taken.pictures else example

    def _refuse_other_units(self, example: Example) -> None:
        """Refuses rated answers where pairs are needed, and pairs where rated answers are; and
        tools beside those of an environment.

        Raises:
            RowError: for such a row.
        """
        if self._has_environment and isinstance(example, OpenPrompt) and example.tools:
            raise RowError("the row has tools, and rollout.environment has others", "remove its tools")
        if self._objective not in PREFERENCE or not isinstance(example, Exchange | Preference):
            return
        if self._objective in PAIRS and len(example.answers) != 2:
            raise RowError(
                f"the row has {RATING}, and objective {self._objective} needs {PAIR}",
                ONLY_RATED,
            )
        if self._objective in RATINGS and example.desirable is None:
            raise RowError(
                f"the row has {PAIR}, and objective {self._objective} needs {RATING}",
                ONLY_PAIRS,
            )

    def _take(self, location: Place, unit: EncodedUnit, counts: SourceCounts) -> None:
        max_length = self._data.max_length - self._answer_tokens
        try:
            too_long = self._data.too_long
            _refuse_cut_pictures(unit, max_length=max_length, too_long=too_long)
            opening = self._encoder.opening if too_long == "keep-answer" else ()
            fitted = fit_unit(unit, max_length=max_length, too_long=too_long, opening=opening)
            refuse_equal_sides(unit, fitted)
        except RowError as error:
            self._take_bad(error.at(location), counts)
            return
        if unit.record is not None and fitted.what == "used":  # a prompt has no loss tokens
            fitted = Fitted(list(unit.sides), "used")
        if fitted.pieces:
            self._keep(location, unit, fitted)
            return
        why = explain_fit(
            fitted.what,
            lengths=_lengths(unit),
            max_length=max_length,
            pieces=0,
            tokens_cut=fitted.tokens_cut,
            too_long=self._data.too_long,
            sides=len(unit.sides),
        )
        if fitted.what == "drop":
            counts.dropped["too_long"] += 1
            self._ledger.note(location, "dropped", why)
        elif fitted.what == "error":
            self._longest = max(self._longest, *(len(side.ids) for side in _decisive(unit)))
            ways = "cut, drop or split" if len(unit.sides) == 1 else "keep-answer, cut or drop"
            ways = "drop" if unit.record is not None else "cut or drop" if unit.is_whole else ways
            fix = f"raise data.max_length, or set data.too_long to {ways}"
            self._refuse_row(Problem("a row is too long", str(location), why, fix))
        else:
            nothing = "none of its tokens counts in the loss" + (f" ({why})" if fitted.what != "used" else "")
            self._take_bad(BadRow(location, nothing, "raise data.max_length, or remove the row"), counts)

    def _keep(self, location: Place, unit: EncodedUnit, fitted: Fitted) -> None:
        """Keeps a usable row.

        Its changes are entered in the ledger once it is known whether the row is used.
        """
        lengths = _lengths(unit)
        entry = {
            "source": len(self._ledger.sources) - 1,
            "file": self._file_number[location.file],
            "number": location.number,
            "first": len(self._writer.lengths),
            "pieces": len(fitted.pieces) // len(unit.sides),
            "length": lengths[0],
            "other_length": lengths[1] if len(lengths) > 1 else 0,
            "tokens_cut": fitted.tokens_cut,
            "is_cut": fitted.what == "cut",
            "is_split": fitted.what == "split",
            "label": self._label_of(unit),
        }
        parts = dict.fromkeys(part for side in unit.sides for part in side.not_rendered)
        if parts:
            self.not_rendered[len(self.usable.source)] = list(parts)
        self._with_control_tokens += any(side.has_control_tokens for side in unit.sides)
        for name, value in entry.items():
            getattr(self.usable, name).append(value)
        for piece in fitted.pieces:
            self._writer.add(piece, unit.record)

    def _label_of(self, unit: EncodedUnit) -> int:
        if self.labels is not None and unit.labels is not None:
            return self.labels.number(unit.labels)
        return int(bool(unit.label))

    def _take_bad(self, row: BadRow, counts: SourceCounts) -> None:
        counts.bad += 1
        self._ledger.note(row.place, "bad", row.why)
        if self._data.on_bad_row == "error":
            fix = row.fix + ("; or " if row.fix else "") + "set data.on_bad_row: skip to skip such rows"
            self._refuse_row(Problem("a row cannot be used", row.where, row.why, fix))

    def _refuse_row(self, problem: Problem) -> None:
        self._refused += 1
        self._reasons.add(problem.why if len(self._reasons) < 2 else "")
        if len(self._problems) < _SHOWN_PROBLEMS:
            self._problems.append(problem)


def _with_prefixes(row: Similar, section: EmbedSection) -> Similar:
    anchor, *others = row.texts
    return Similar((section.query_prefix + anchor, *(section.document_prefix + one for one in others)))


def _refuse_cut_pictures(unit: EncodedUnit, *, max_length: int, too_long: TooLong) -> None:
    """Refuses a row of which a picture would be cut.

    Raises:
        RowError: then.
    """
    longest = max(len(side.ids) for side in _decisive(unit))
    if not unit.sides[0].pictures or longest <= max_length or too_long in ("error", "drop"):
        return
    if too_long == "cut" and unit.sides[0].pictures_end <= max_length:
        return
    raise RowError(
        f"it has {longest} tokens, max_length is {max_length}, and a picture is never cut",
        "raise data.max_length, lower data.pixels.max, or set data.too_long: drop",
    )


def _up_to_first(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the first readable one, with the bad rows before it."""
    for row in rows:
        yield row
        if isinstance(row, RawRow):
            return


def expected_rows(files: list[RowFile]) -> int | None:
    """The approximate number of rows, by counting line ends; None for files without lines."""
    total = 0
    for file in files:
        if not file.by_line:
            return None
        with file.path.open("rb") as stream:
            while block := stream.read(1 << 22):
                total += block.count(b"\n")
    return total

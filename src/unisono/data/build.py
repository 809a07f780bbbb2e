"""Builds a token table from sources: reads, encodes, fits, chooses, packs, writes; the ledger counts along."""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.config.schema import RunConfig
from unisono.data.encode import Encoded, Encoder
from unisono.data.fit import fit
from unisono.data.formats import COLUMNS, FormatName, detect, to_example
from unisono.data.ledger import Ledger, SourceCounts
from unisono.data.pack import pack
from unisono.data.readers import Row, read_rows
from unisono.data.rows import BadRow, Example, Place, RawRow, RowError
from unisono.data.select import eval_rows, times
from unisono.data.sources import Source
from unisono.data.store import TokenWriter, write_meta, write_split
from unisono.data.table import Split
from unisono.errors import DataError, Problem
from unisono.events import Reporter

Ints = npt.NDArray[np.int64]

_BATCH = 512  # rows that go through the tokenizer together
_SHOWN_PROBLEMS = 20
_LOOKED_AT = 50  # rows by which a format is detected
_REPORT_EVERY_S = 0.5


@dataclass
class _Kept:
    """One entry a usable row, in the order of the sources."""

    source: "array[int]" = field(default_factory=lambda: array("q"))
    file: "array[int]" = field(default_factory=lambda: array("q"))
    number: "array[int]" = field(default_factory=lambda: array("q"))
    first: "array[int]" = field(default_factory=lambda: array("q"))  # its first piece in tokens.arrow
    pieces: "array[int]" = field(default_factory=lambda: array("q"))


class TableBuilder:
    """Builds one table in an empty directory."""

    def __init__(self, config: RunConfig, encoder: Encoder, directory: Path, report: Reporter) -> None:
        self._config = config
        self._data = config.data
        self._encoder = encoder
        self._directory = directory
        self._report = report
        self._files: list[tuple[str, bool]] = []
        self._kept = _Kept()
        self._problems: list[Problem] = []
        self._refused = 0
        self._longest = 0
        self._formats: list[str] = []
        self._seen = 0
        self._expected: int | None = None
        self._said = 0.0

    def build(self, sources: list[Source]) -> dict[str, Any]:
        """Writes the table; gives meta.json's fields.

        Raises:
            DataError: if a file or a row is refused, or nothing is left to train on.
        """
        notes = self._directory / "notes.jsonl"
        self._expected = expected_rows(sources)
        with Ledger(notes) as ledger:
            with TokenWriter(self._directory / "tokens.arrow") as writer:
                for number, source in enumerate(sources):
                    ledger.sources.append(SourceCounts(source.section.path, source.section.weight))
                    self._read_source(number, source, ledger, writer)
            self._refuse()
            self._report.phase("pack", "choosing and packing rows")
            splits = self._write_splits(sources, ledger, writer)
            ledger.write(self._directory / "ledger.json")
            meta = {
                "splits": splits, "total": ledger.total(), "formats": self._formats, "highest_id": writer.highest,
                "digest": self._digest(writer), "warnings": self._encoder.warnings, "stop_ids": sorted(self._encoder.stop_ids),
                "template": self._encoder.template.origin if self._encoder.template else "none needed",
            }  # fmt: skip
        notes.unlink()
        if self._encoder.template is not None:
            (self._directory / "template.jinja").write_text(self._encoder.template.source(), encoding="utf-8")
        write_meta(self._directory, meta, files=self._files)
        return meta

    def _read_source(self, number: int, source: Source, ledger: Ledger, writer: TokenWriter) -> None:
        name: FormatName | None = None
        before = len(self._kept.source)
        for file in source.files:
            self._files.append((file.name, file.by_line))
            rows = read_rows(file)
            if name is None:
                first = list(islice(rows, _LOOKED_AT))
                rows = chain(first, rows)
                name = self._format(source, first)
            for batch in _batches(rows):
                self._read_batch(number, source, name, batch, ledger, writer)
        if len(self._kept.source) == before and not self._refused and not ledger.sources[number].rows:
            raise DataError.of(
                f"{source.section.path} has no rows", where=source.section.path, fix="give a file with rows"
            )

    def _format(self, source: Source, first: list[Row]) -> FormatName | None:
        """The format of a source; None while no row has been read that could tell."""
        path, asked = source.section.path, source.section.format
        if asked != "auto":
            self._formats.append(f"{path}: {asked} (set)")
            return asked
        values = [row.value for row in first if isinstance(row, RawRow)]
        if not values:
            return None
        found = detect(values, source.section.columns)
        if found is None:
            known = "; ".join(f"{name}: {', '.join(needed)}" for name, (needed, _) in COLUMNS.items())
            columns = ", ".join(map(str, list(values[0])[:12])) or "none"
            raise DataError.of(
                f"{path} has no format that is known by its columns", where=str(next(r for r in first if isinstance(r, RawRow)).place),
                why=f"its columns are {columns}; known are {known}",
                fix="set data.format, or name the columns: train: [{path: …, columns: {instruction: question, output: answer}}]",
            )  # fmt: skip
        self._formats.append(f"{path}: {found[0]} (auto: {found[1]})")
        return found[0]

    def _read_batch(
        self,
        number: int,
        source: Source,
        name: FormatName | None,
        batch: list[Row],
        ledger: Ledger,
        writer: TokenWriter,
    ) -> None:
        self._say_progress(source, len(batch))
        examples: list[Example] = []
        places: list[Place] = []
        counts = ledger.sources[number]
        counts.rows += len(batch)
        for row in batch:
            read = row if isinstance(row, BadRow) else _example(name, row, source)
            if isinstance(read, BadRow):
                self._bad(read, counts, ledger)
            else:
                places.append(row.place)
                examples.append(read)
        for place, encoded in zip(places, self._encoder.encode(examples), strict=True):
            if isinstance(encoded, RowError):
                self._bad(encoded.at(place), counts, ledger)
            else:
                self._take(number, place, encoded, ledger, writer)

    def _take(self, number: int, place: Place, row: Encoded, ledger: Ledger, writer: TokenWriter) -> None:
        counts = ledger.sources[number]
        fitted = fit(row, max_length=self._data.max_length, too_long=self._data.too_long)
        if fitted.what == "drop":
            counts.dropped["too_long"] += 1
            ledger.note(place, "dropped", fitted.why)
        elif fitted.what == "error":
            self._longest = max(self._longest, len(row.ids))
            self._refuse_row(
                Problem(
                    "a row is too long",
                    str(place),
                    fitted.why,
                    "set data.max_length, or data.too_long to cut, drop or split",
                )
            )
        elif not fitted.pieces:
            why = "no token of it counts in the loss" + (f" ({fitted.why})" if fitted.why else "")
            self._bad(BadRow(place, why, "raise data.max_length, or remove the row"), counts, ledger)
        else:
            self._keep(number, place, writer, fitted.pieces)
            counts.tokens_cut += fitted.tokens_cut
            if fitted.what in ("cut", "split"):
                counts.cut += fitted.what == "cut"
                counts.split += fitted.what == "split"
                ledger.note(place, fitted.what, fitted.why)

    def _keep(self, number: int, place: Place, writer: TokenWriter, pieces: list[Encoded]) -> None:
        kept = self._kept
        kept.source.append(number)
        kept.file.append(len(self._files) - 1)
        kept.number.append(place.number)
        kept.first.append(len(writer.lengths))
        kept.pieces.append(len(pieces))
        for piece in pieces:
            writer.add(piece)

    def _bad(self, row: BadRow, counts: SourceCounts, ledger: Ledger) -> None:
        counts.bad += 1
        ledger.note(row.place, "bad", row.why)
        if self._data.on_bad_row == "error":
            self._refuse_row(Problem("a row cannot be used", row.where, row.why, row.fix))

    def _refuse_row(self, problem: Problem) -> None:
        self._refused += 1
        if len(self._problems) < _SHOWN_PROBLEMS:
            self._problems.append(problem)

    def _refuse(self) -> None:
        """Ends with all rows that were refused, if any was."""
        if not self._refused:
            return
        problems = list(self._problems)
        rest = self._refused - len(problems)
        if rest:
            problems.append(
                Problem(
                    f"{rest} more rows are refused", fix="set data.on_bad_row: skip to leave bad rows out"
                )
            )
        if self._longest:
            problems.append(
                Problem(
                    f"the longest row has {self._longest} tokens",
                    "data.max_length",
                    fix=f"data.max_length={self._longest} takes all",
                )
            )
        raise DataError(*problems)

    def _write_splits(self, sources: list[Source], ledger: Ledger, writer: TokenWriter) -> dict[str, Any]:
        kept = {
            name: np.array(getattr(self._kept, name), dtype=np.int64) for name in _Kept.__dataclass_fields__
        }
        often, is_eval = self._choose(sources, kept["source"], ledger)
        lengths, loss = np.array(writer.lengths, dtype=np.int64), np.array(writer.loss, dtype=np.int64)
        splits: dict[str, Any] = {}
        for split, count in (("train", np.where(is_eval, 0, often)), ("eval", is_eval.astype(np.int64))):
            chosen = np.flatnonzero(count)
            if not len(chosen):
                continue
            stored = np.concatenate(
                [np.arange(kept["first"][i], kept["first"][i] + kept["pieces"][i]) for i in chosen]
            )
            row = np.repeat(chosen, kept["pieces"][chosen])
            columns = {
                "stored": stored,
                "length": lengths[stored],
                "loss": loss[stored],
                "file": kept["file"][row],
                "number": kept["number"][row],
            }
            splits[split] = self._write_split(split, columns, count[row], writer)  # type: ignore[arg-type]
            _count(ledger, kept["source"], columns, count, row, split=split)  # type: ignore[arg-type]
        if "train" not in splits:
            total = ledger.total()
            raise DataError.of(
                "no row is left to train on", where="data.train",
                why=f"of {total['rows']} rows {total['bad']} are bad, {sum(total['dropped'].values())} dropped, {int(is_eval.sum())} for evaluation",
                fix="see `unisono data preview`; raise data.max_length, mend the rows, or lower data.eval",
            )  # fmt: skip
        return splits

    def _choose(
        self, sources: list[Source], source_of: Ints, ledger: Ledger
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """How often each usable row is trained in an epoch, and which rows are for evaluation."""
        often = np.zeros(len(source_of), np.int64)
        is_eval = np.zeros(len(source_of), np.bool_)
        for number, source in enumerate(sources):
            rows = np.flatnonzero(source_of == number)
            if source.role == "eval":
                is_eval[rows] = True
                continue
            often[rows] = times(
                len(rows), weight=source.section.weight, seed=self._config.seed, source=number
            )
            left_out = rows[often[rows] == 0]
            ledger.sources[number].dropped.update({"weight": len(left_out)} if len(left_out) else {})
            for row in left_out:
                name, by_line = self._files[self._kept.file[row]]
                place = Place(name, self._kept.number[row], by_line)
                ledger.note(
                    place, "dropped", f"not in the half or share that weight {source.section.weight:g} takes"
                )
        if isinstance(self._data.eval, float):
            usable = np.flatnonzero(often)
            if len(usable) > 1:
                is_eval[usable[eval_rows(len(usable), share=self._data.eval, seed=self._config.seed)]] = True
        return often, is_eval

    def _write_split(
        self, split: Split, columns: dict[str, Ints], often: Ints, writer: TokenWriter
    ) -> dict[str, int]:
        occurrences = np.repeat(np.arange(len(often)), often)
        lengths = columns["length"]
        if self._data.packing:
            bins = pack(lengths[occurrences].tolist(), limit=self._data.max_length)
            sequences = [occurrences[rows].tolist() for rows in bins]
        else:
            sequences = [[row] for row in occurrences.tolist()]
        write_split(self._directory, split, columns, sequences)
        for rows in sequences:
            writer.digest.update(np.array(rows, dtype=np.int64).data)
        longest = max(int(lengths[rows].sum()) for rows in sequences)
        return {
            "rows": len(occurrences), "sequences": len(sequences), "tokens": int(lengths[occurrences].sum()),
            "loss_tokens": int(columns["loss"][occurrences].sum()), "longest_sequence": longest, "longest_row": int(lengths.max()),
        }  # fmt: skip

    def _digest(self, writer: TokenWriter) -> str:
        return writer.digest.hexdigest()

    def _say_progress(self, source: Source, rows: int) -> None:
        self._seen += rows
        if time.monotonic() - self._said >= _REPORT_EVERY_S:
            self._said = time.monotonic()
            self._report.phase(
                "tokenize", f"tokenizing {source.section.path}", done=self._seen, total=self._expected
            )


def _example(name: FormatName | None, row: RawRow, source: Source) -> Example | BadRow:
    try:
        return to_example(name or "text", row.value, source.section.columns)
    except RowError as error:
        return error.at(row.place)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch


def _count(
    ledger: Ledger, source_of: Ints, columns: dict[str, Ints], count: Ints, row: Ints, *, split: Split
) -> None:
    """Adds the rows of a split to the ledger: rows once, tokens as often as an epoch has them."""
    for number, counts in enumerate(ledger.sources):
        mine = source_of[row] == number
        used = int(np.count_nonzero(count[source_of == number]))
        counts.used += used
        counts.eval += used if split == "eval" else 0
        counts.tokens += int((columns["length"] * count[row])[mine].sum())
        counts.loss_tokens += int((columns["loss"] * count[row])[mine].sum())


def expected_rows(sources: list[Source]) -> int | None:
    """About how many rows will come, by counting line ends; None where files are not lines."""
    total = 0
    for file in (file for source in sources for file in source.files):
        if not file.by_line:
            return None
        with file.path.open("rb") as stream:
            while block := stream.read(1 << 22):
                total += block.count(b"\n")
    return total

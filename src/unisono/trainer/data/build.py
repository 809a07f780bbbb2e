"""Builds a token table: ingests rows, selects those for training and evaluation, packs them, and
writes the table.
"""

import hashlib
import json
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.config.data_sections import MixSection, SourceSection
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.named_templates import named_template
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import GRPO, PREFERENCE, RATINGS, lf_name, sides_of
from unisono.trainer.data import Ledger, Place
from unisono.trainer.data.encode import Encoder, RowEncoder
from unisono.trainer.data.ingest import Ingest, IngestProgress, UsableRows, expected_rows, explain_fit
from unisono.trainer.data.pictures.store import PictureStore, TablePicture
from unisono.trainer.data.sources import RowSource
from unisono.trainer.data.token_table import Split, TokenWriter, write_meta, write_split
from unisono.trainer.plan.run_plan import permutation

Ints = npt.NDArray[np.int64]


def make_encoder(
    config: RunConfig, tokenizer: Any, directory: Path, *, pictures: PictureStore | None = None
) -> RowEncoder:
    """The encoder of a config's rows.

    Args:
        config: of the run.
        tokenizer: of transformers; a template of LLaMA-Factory changes it.
        directory: of the tokenizer.
        pictures: of the rows; None if only text is read.

    Raises:
        DataError: if the template is missing, is not valid, or does not match the other settings.
    """
    data, whole = config.data, config.objective in ("pretrain", CLASSIFY, EMBED)
    name, named = lf_name(data.template), named_template(data.template, system=data.system)
    if named is not None:
        encoder: RowEncoder = named.encoder(config, tokenizer, pictures=pictures)
        return encoder
    unknown = f"there is no template lf:{name} here; rows are rendered with the tokenizer's own chat template"
    return Encoder(
        tokenizer,
        directory=directory,
        template_file=data.template if name is None else None,
        loss_on="all" if whole else "last-answer" if config.objective in PREFERENCE else data.loss_on,
        check_template=data.check_template and config.objective not in ("pretrain", GRPO, CLASSIFY, EMBED),
        end_at_stop=config.objective != "reward",
        show_first=None if name is None else unknown,
        thoughts=data.thoughts,
        control_tokens=data.control_tokens,
        pictures=pictures,
        plain_texts=data.plain_texts,
    )


def build_table(
    config: RunConfig,
    sources: list[RowSource],
    encoder: RowEncoder,
    *,
    directory: Path,
    report: Reporter,
    limit_rows: int | None = None,
    refuses_pictures: str = "this model reads text only",
) -> None:
    """Writes the token table of some sources, or of the first rows of each, into an empty
    directory.

    `refuses_pictures` is why rows with pictures are refused; "": they are not.

    Raises:
        PicturesFound: if they are not, and the encoder has no processor for them.
        DataError: if a file or a row is refused, or nothing is left to train on.
    """
    notes = directory / "notes.jsonl"
    progress = IngestProgress(report, expected_rows([file for source in sources for file in source.files]))
    with Ledger(notes) as ledger:
        with TokenWriter(directory / "tokens.arrow") as writer:
            intake = Ingest(
                config.data,
                encoder,
                ledger,
                writer,
                progress,
                objective=config.objective,
                limit_rows=limit_rows,
                answer_tokens=config.rollout.max_new_tokens if config.objective == GRPO else 0,
                has_environment=config.rollout.environment is not None,
                refuses_pictures=refuses_pictures,
                classify=config.classify if config.objective == CLASSIFY else None,
                embed=config.embed if config.objective == EMBED else None,
            )
            for source in sources:
                intake.read(source)
            intake.refuse()
            report.phase("pack", "selecting and packing rows")
        labels = intake.labels.finish() if intake.labels is not None else None
        if labels is not None:
            writer.digest.update(json.dumps(asdict(labels)).encode())
        splits, warnings = _write_splits(config, sources, intake, ledger, writer, directory)
        ledger.write(directory / "ledger.json")
    notes.unlink()
    template = encoder.template
    origin = "none: rows are plain text"
    if template is not None and (encoder.has_rendered or not config.data.plain_texts):
        origin = template.origin
    if template is not None:
        (directory / "template.jinja").write_text(template.source(), encoding="utf-8")
    pictures = encoder.pictures
    if pictures is not None and pictures.pictures:
        pictures.write(directory)
        writer.digest.update(pictures.digest().encode())
    meta = {
        "splits": splits,
        "labels": asdict(labels) if labels is not None else None,
        "sides": intake.sides.number or sides_of(config.objective),
        "has_shares": writer.has_shares,
        "total": ledger.total(),
        "formats": intake.formats,
        "highest_id": writer.highest,
        "digest": writer.digest.hexdigest(),
        "warnings": [*encoder.warnings, *intake.warnings, *warnings],
        "stop_ids": sorted(encoder.stop_ids),
        "absent_tokens": encoder.absent_tokens,
        "eos": encoder.tokenizer.eos_token_id,
        "template": origin,
    }
    write_meta(directory, meta, files=list(intake.files.items()))


def _one_sided(labels: Sequence[int]) -> list[str]:
    """A warning if all rated answers of the training have the same label."""
    if len(set(labels)) != 1:
        return []
    other = "undesirable" if labels[0] else "desirable"
    return [
        f"all {len(labels)} rows for training have label: {'true' if labels[0] else 'false'}; objective kto"
        f" compares desirable answers with undesirable ones, and there is no {other} one"
        f" (preference.{other}_weight has no effect)"
    ]


@dataclass(frozen=True, slots=True)
class _Selection:
    """The use of each usable row.

    Attributes:
        train: (rows,) int64, how often each row is trained on in an epoch.
        eval: (rows,) int64, how often each row occurs in an evaluation; it is not trained on then.
        is_picked: (rows,) bool, True unless the `weight` or `samples` of its source has left it
            out; `data.mix` may leave out more.
    """

    train: Ints
    eval: Ints
    is_picked: npt.NDArray[np.bool_]

    def count(self, split: Split) -> Ints:
        """How often each row occurs in one pass over a split."""
        return self.eval if split == "eval" else self.train


def _write_splits(
    config: RunConfig,
    sources: list[RowSource],
    intake: Ingest,
    ledger: Ledger,
    writer: TokenWriter,
    directory: Path,
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Writes both splits, and counts their rows in the ledger; gives the figures of each split, and
    warnings.
    """
    usable = {
        part.name: np.array(getattr(intake.usable, part.name), dtype=np.int64) for part in fields(UsableRows)
    }
    choice = _select_rows(config, sources, usable["source"])
    _note_rows(config, sources, intake, choice, ledger)
    lengths, loss = np.array(writer.lengths, dtype=np.int64), np.array(writer.loss, dtype=np.int64)
    figures: dict[str, dict[str, int]] = {}
    sides = intake.sides.number or sides_of(config.objective)
    warnings: list[str] = []
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        count = choice.count(split)
        chosen = np.flatnonzero(count)
        if not len(chosen):
            continue
        row = np.repeat(chosen, usable["pieces"][chosen])  # the usable row of each piece
        first_of_row = np.repeat(
            np.cumsum(usable["pieces"][chosen]) - usable["pieces"][chosen], usable["pieces"][chosen]
        )
        stored = usable["first"][row] + (np.arange(len(row)) - first_of_row) * sides
        of_side = [stored + side for side in range(sides)]
        columns = {
            "stored": stored,
            "length": sum((lengths[side] for side in of_side), np.zeros(len(row), np.int64)),
            "loss": sum((loss[side] for side in of_side), np.zeros(len(row), np.int64)),
            "file": usable["file"][row],
            "number": usable["number"][row],
        }
        if config.objective in RATINGS:
            columns["label"] = usable["label"][row]
            warnings += _one_sided(columns["label"].tolist()) if split == "train" else []
            writer.digest.update(columns["label"].data)
        if intake.labels is not None:
            columns["label"] = usable["label"][row]
            writer.digest.update(columns["label"].data)
        if sides > 1:
            writer.digest.update(f"{sides} sides".encode())
        sequences = _sequences(
            columns["length"],
            count[row],
            packing=config.data.packing and config.objective != GRPO,
            limit=config.data.max_length * sides,
        )
        write_split(directory, split, columns, sequences)
        for rows in sequences:
            writer.digest.update(stored[rows].data)
        longest = max(int(lengths[side].max()) for side in of_side)
        room = config.rollout.max_new_tokens if config.objective == GRPO else 0
        if config.rollout.environment is not None:  # it decides how long prompts are
            room = config.data.max_length - longest
        figures[split] = _figures(columns, count[row], sequences, longest_row=longest, answer_tokens=room)
        _count(ledger, usable["source"], columns, count, row, split=split)
        _count_pictures(ledger, usable["source"], columns, count, row, writer, intake.pictures)
    _refuse_nothing(config, ledger, figures)
    return figures, warnings


def _select_rows(config: RunConfig, sources: list[RowSource], source_of: Ints) -> _Selection:
    counts: dict[str, Ints] = {role: np.zeros(len(source_of), np.int64) for role in ("train", "eval")}
    picks = []
    for number, source in enumerate(sources):
        rows = np.flatnonzero(source_of == number)
        picks.append(rows[picked_rows(len(rows), source.section, seed=config.seed, source=number)])
    is_picked = np.zeros(len(source_of), np.bool_)
    is_picked[np.concatenate(picks)] = True
    sizes = [len(pick) for pick, source in zip(picks, sources, strict=True) if source.role == "train"]
    taken = mixed_counts(sizes, config.data.mix, seed=config.seed)
    for number, (pick, source) in enumerate(zip(picks, sources, strict=True)):
        count = taken[number] if source.role == "train" else len(pick)  # sources for training come first
        np.add.at(counts[source.role], np.resize(pick, count), 1)
    train, evaluated = counts["train"], counts["eval"]
    if isinstance(config.data.eval, float | int):
        trained = np.flatnonzero(train)
        evaluated[trained[eval_rows(len(trained), share=config.data.eval, seed=config.seed)]] = 1
    return _Selection(np.where(evaluated, 0, train), evaluated, is_picked)


def _note_rows(
    config: RunConfig, sources: list[RowSource], intake: Ingest, choice: _Selection, ledger: Ledger
) -> None:
    """Enters the rows that are left out, and the changes to rows that are used."""
    rows, names = intake.usable, list(intake.files.items())
    unused = (choice.train == 0) & (choice.eval == 0)
    changed = np.array(rows.is_cut, dtype=np.bool_) | np.array(rows.is_split, dtype=np.bool_)
    incomplete = np.zeros(len(unused), np.bool_)
    incomplete[list(intake.not_rendered)] = True
    for i in np.flatnonzero(unused | changed | incomplete):
        counts = ledger.sources[rows.source[i]]
        location = Place(names[rows.file[i]][0], rows.number[i], names[rows.file[i]][1])
        if unused[i]:
            by, why = _why_left_out(
                sources[rows.source[i]].section, config.data.mix, is_picked=bool(choice.is_picked[i])
            )
            counts.dropped[by] += 1
            ledger.note(location, "dropped", why)
            continue
        if incomplete[i]:
            counts.not_rendered += 1
            parts = intake.not_rendered[int(i)]
            ledger.note(location, "not rendered", "; ".join(parts), parts=parts)
        if not changed[i]:
            continue
        counts.cut += rows.is_cut[i]
        counts.split += rows.is_split[i]
        counts.tokens_cut += rows.tokens_cut[i]
        what = "cut" if rows.is_cut[i] else "split"
        why = explain_fit(
            what,
            lengths=[length for length in (rows.length[i], rows.other_length[i]) if length],
            max_length=config.data.max_length,
            pieces=rows.pieces[i],
            tokens_cut=rows.tokens_cut[i],
            too_long=config.data.too_long,
            sides=intake.sides.number or sides_of(config.objective),
        )
        ledger.note(location, what, why)


def _why_left_out(section: SourceSection, mix: MixSection, *, is_picked: bool) -> tuple[str, str]:
    """The key that left a row out, and the reason for the ledger."""
    if is_picked:
        return "mix", f"not reached: {mix.strategy} ends when the first source is exhausted"
    if section.samples is not None:
        return "samples", f"not among the {_samples(section)} rows picked by samples"
    return "weight", f"not in the share selected by weight {section.weight:g}"


def _sequences(lengths: Ints, often: Ints, *, packing: bool, limit: int) -> list[list[int]]:
    """The rows of each sequence; a row that occurs twice per epoch is in two sequences."""
    occurrences = np.repeat(np.arange(len(often)), often)
    if not packing:
        return [[row] for row in occurrences.tolist()]
    return [occurrences[rows].tolist() for rows in pack(lengths[occurrences].tolist(), limit=limit)]


def _figures(
    columns: dict[str, Ints],
    often: Ints,
    sequences: list[list[int]],
    *,
    longest_row: int,
    answer_tokens: int = 0,
) -> dict[str, int]:
    """The figures of a split; the longest row and sequence with room for an answer behind it."""
    lengths = columns["length"]
    return {
        "rows": int(often.sum()),
        "sequences": len(sequences),
        "tokens": int((lengths * often).sum()),
        "loss_tokens": int((columns["loss"] * often).sum()),
        "longest_row": longest_row + answer_tokens,
        "longest_sequence": max(int(lengths[rows].sum()) for rows in sequences) + answer_tokens,
    }


def _count(
    ledger: Ledger, source_of: Ints, columns: dict[str, Ints], count: Ints, row: Ints, *, split: Split
) -> None:
    """Adds the rows of a split to the ledger: rows once, tokens as often as they occur in an
    epoch.
    """
    for number, counts in enumerate(ledger.sources):
        is_own = source_of[row] == number
        used = int(np.count_nonzero(count[source_of == number]))
        counts.used += used
        counts.eval += used if split == "eval" else 0
        counts.tokens += int((columns["length"] * count[row])[is_own].sum())
        counts.loss_tokens += int((columns["loss"] * count[row])[is_own].sum())


def _count_pictures(
    ledger: Ledger,
    source_of: Ints,
    columns: dict[str, Ints],
    count: Ints,
    row: Ints,
    writer: TokenWriter,
    pictures: Sequence[TablePicture],
) -> None:
    """Adds the pictures of a split to the ledger, as often as they occur in an epoch."""
    if not pictures:
        return
    for stored, of_row in zip(columns["stored"].tolist(), row.tolist(), strict=True):
        counts, often = ledger.sources[source_of[of_row]].pictures, int(count[of_row])
        for picture in (pictures[number] for number in writer.pictures[stored]):
            counts["used"] += often
            counts["resized"] += often * picture.resized
            counts["tokens"] += often * picture.tokens


def _refuse_nothing(config: RunConfig, ledger: Ledger, figures: dict[str, dict[str, int]]) -> None:
    missing = [key for key, split in (("train", "train"), ("eval", "eval")) if split not in figures]
    if config.data.eval is None:
        missing = [key for key in missing if key != "eval"]
    if not missing:
        return
    total = ledger.total()
    dropped = ", ".join(f"{n} dropped ({why})" for why, n in ledger.dropped.items()) or "0 dropped"
    first_bad = f" (the first is {ledger.first_bad})" if ledger.first_bad else ""
    raise DataError.of(
        f"no rows are left to {'train on' if missing[0] == 'train' else 'evaluate on'}",
        where=f"data.{missing[0]}",
        why=(
            f"of {total['rows']} rows {total['bad']} are bad{first_bad}, {dropped}, {total['eval']} for"
            " evaluation"
        ),
        fix="raise data.max_length, fix the rows (data.on_bad_row: error lists them), or lower data.eval",
    )


# `permutation` is keyed by (seed, epoch); no epoch is negative, so these streams are independent of
# the order of training.
_EVAL, _WEIGHT = -1, -2


def eval_rows(n: int, *, share: float | int, seed: int) -> list[int]:
    """The rows split off for evaluation, in order: a share of `n`, rounded, at least one; or, as an
    int, that many.

    The seed alone decides.
    """
    count = share if isinstance(share, int) else max(1, round(share * n))
    return sorted(permutation(n, seed=seed, epoch=_EVAL)[:count])


def picked_rows(n: int, section: SourceSection, *, seed: int, source: int) -> Ints:
    """The rows of a source with `n` usable rows that are used, in order; a row that is used twice
    is listed twice.

    With `samples` they are in the order of the pick: all rows in a seeded order, and after these
    further draws with replacement.
    """
    if section.samples is None:
        counts = row_repeats(n, weight=section.weight, seed=seed, source=source)
        return np.repeat(np.arange(n), counts)
    samples = _samples(section)
    order = permutation(n, seed=seed, epoch=_WEIGHT - source)[:samples]
    draw = _generator("samples", seed, source) if n else None
    more = [int(draw() * n) for _ in range(samples - n)] if draw else []
    return np.array([*order, *more], dtype=np.int64)


def _samples(section: SourceSection) -> int:
    """The size of the pick: `rows` keeps its first rows."""
    assert section.samples is not None
    return section.samples if section.rows is None else min(section.samples, section.rows)


def _generator(purpose: str, seed: int, number: int) -> Callable[[], float]:
    """Draws from [0, 1): `random.Random.random`, the one generator whose sequence Python promises
    to keep.
    """
    material = hashlib.sha256(f"unisono {purpose} {seed} {number}".encode()).digest()
    return random.Random(int.from_bytes(material, "big")).random  # noqa: S311 - a selection, not a secret


def mixed_counts(sizes: Sequence[int], mix: MixSection, *, seed: int) -> list[int]:
    """How many rows are taken from each source, from its beginning; beyond its size it starts
    over.

    The strategies are those of `datasets.interleave_datasets`: first_exhausted (under),
    all_exhausted (over), and all_exhausted_without_replacement (once). Without probabilities the
    sources take turns.

    Args:
        sizes: rows of each source.
        mix: the strategy, and the probabilities of the sources.
        seed: of the draws.
    """
    if mix.strategy in ("concat", "interleave_once") or not sizes:
        return list(sizes)
    if mix.probabilities is None:
        count = min(sizes) if mix.strategy == "interleave_under" else max(sizes)
        return [count if size else 0 for size in sizes]
    counts, draw = [0] * len(sizes), _generator("mix", seed, 0)
    borders = list(accumulate(mix.probabilities))[:-1]
    exhausted = {number for number, size in enumerate(sizes) if not size}
    enough = 1 if mix.strategy == "interleave_under" else len(sizes)
    while len(exhausted) < enough:
        number = bisect_right(borders, draw())
        if sizes[number]:
            counts[number] += 1
        if counts[number] >= sizes[number]:
            exhausted.add(number)
    return counts


def row_repeats(n: int, *, weight: float, seed: int, source: int) -> list[int]:
    """How often each of a source's `n` rows occurs in an epoch.

    Every row occurs floor(weight) times, and a share of rows that is selected by the seed once
    more: weight 2 gives all rows twice, weight 0.5 gives half of them.
    """
    whole = math.floor(weight)
    counts = [whole] * n
    for row in permutation(n, seed=seed, epoch=_WEIGHT - source)[: round((weight - whole) * n)]:
        counts[row] += 1
    return counts


def pack(lengths: Sequence[int], *, limit: int) -> list[list[int]]:
    """Packs rows into bins of at most `limit` tokens, by best fit decreasing; each row is in one
    bin.

    Longer rows are placed first, each in the fullest bin with room for it. Rows of equal length
    keep their order, a bin lists its rows in order, and bins are ordered by their first row.

    Args:
        lengths: tokens of each row, each in 1..limit.
        limit: maximum tokens of a bin.

    Raises:
        ValueError: if a row is longer than the limit.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free tokens: the bins with exactly that many
    rooms: list[int] = []  # the keys of by_room, sorted
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[row]
        if length > limit:
            raise ValueError(f"row {row} has {length} tokens, more than the limit of {limit}")
        index = bisect_left(rooms, length)
        if index < len(rooms):
            room = rooms[index]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[index]
        else:
            room, chosen = limit, len(bins)
            bins.append([])
        bins[chosen].append(row)
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    for rows in bins:
        rows.sort()
    return sorted(bins)

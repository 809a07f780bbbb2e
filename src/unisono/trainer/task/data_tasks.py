"""Tasks on rows, without torch: `prepare` (model facts, token table), `preview`, `survey` (for a
new config), and `rows` (where rows come from).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.base.errors import DataError, ModelError
from unisono.base.events import Reporter
from unisono.base.text import one_line
from unisono.guard.supervise.task_requests import RowOrigins, RowsRequest
from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.config.named_templates import NO_TOKEN, named_template
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import PREFERENCE
from unisono.trainer.data import RawRow, first_notes, read_counts, unrendered_parts
from unisono.trainer.data.pictures.store import read_image_ids, read_pictures
from unisono.trainer.data.preference_rows import is_rated, sides_in
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.readers import read_rows
from unisono.trainer.data.sources import find_sources
from unisono.trainer.data.survey import survey
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers
from unisono.trainer.data.tokenizer import load_tokenizer
from unisono.trainer.families import rows_of
from unisono.trainer.model.directory import (
    locate_model,
    locate_tokenizer,
    picture_processor,
    read_model_config,
)
from unisono.trainer.plan.task_requests import (
    LengthClass,
    PreparedRun,
    PrepareRequest,
    Preview,
    PreviewRequest,
    ShownRow,
    Survey,
    SurveyRequest,
)


def prepare(request: PrepareRequest, report: Reporter) -> PreparedRun:
    """Prepares a run.

    Raises:
        IntegrityError: if the model is the result of a run, and is damaged.
    """
    report.phase("model", "reading the model's files")
    data, facts = rows_of(request.config).prepare(request, report)
    return {"data": data.model_dump(mode="json"), "model": facts.model_dump(mode="json")}


def survey_data(request: SurveyRequest, report: Reporter) -> Survey:
    """Looks at rows for which there is no config yet."""
    report.phase("survey", f"reading {request.path}")
    data = DataSection(train=request.path)
    try:
        (source,) = find_sources(data, cache_dir=request.cache_dir)
    except DataError as error:  # there is no config that could have the key
        raise DataError(*(replace(problem, where="--data") for problem in error.problems)) from error
    return survey(source, packed=request.packed)


_BINS = 10
_NOTES = 20


def preview(request: PreviewRequest, report: Reporter) -> Preview:
    """Shows rows as the model sees them."""
    rows_of(request.config).check_preview()
    config = _with_objective_of_rows(request.config, request.cache_dir)
    directory = locate_tokenizer(config)
    data = prepare_data(
        config,
        tokenizer=directory,
        vocab_size=None if config.model.resize_vocabulary else _vocab_size(config, directory),
        cache_dir=request.cache_dir,
        report=report,
        is_preview=True,
        processor=_processor(config),
    )
    report.phase("preview", "decoding tokens")
    tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    named = named_template(config.data.template)
    if named is not None:
        named.adapt(tokenizer)
    show = partial(shown_row, tokenizer=tokenizer, with_ids=request.ids)
    table = TokenTable.open(Path(data.cache_dir), "train")
    ledger = Path(data.cache_dir) / "ledger.json"
    rows = [shown_unit(table, i, show) for i in range(min(request.rows, table.rows))]
    add_pictures(rows, table, Path(data.cache_dir), tokenizer)
    lost = unrendered_parts(ledger, [row["row"] for row in rows])
    for row in rows:
        if row["row"] in lost:
            row["not_rendered"] = lost[row["row"]]
    return {
        "data": data.model_dump(mode="json"),
        "rows": rows,
        "lengths": histogram(table.row_lengths()),
        "ledger": read_counts(ledger),
        "notes": first_notes(ledger, limit=_NOTES),
    }


def add_pictures(rows: list[ShownRow], table: TokenTable, directory: Path, tokenizer: Any) -> None:
    """Adds the pictures of rows: their names, sizes and tokens; and joins the tokens of a picture
    in the text of the row, e.g. `<image> × 16`.
    """
    pictures, of_rows = read_pictures(directory), read_picture_numbers(directory)
    if not pictures:
        return
    features = [str(tokenizer.convert_ids_to_tokens(i)) for i in read_image_ids(directory)]
    repeated = re.compile("|".join(f"(?:{re.escape(token)}){{2,}}" for token in features))
    for i, row in enumerate(rows):
        numbers = of_rows[int(table.columns["stored"][i])]
        if numbers:
            row["pictures"] = [pictures[number].words for number in numbers]
        sides = (row, row.get("chosen"), row.get("rejected"), row.get("kl"))
        for run in (run for side in sides if side for run in side.get("runs", ())):
            run["text"] = repeated.sub(
                lambda match: (
                    f"{next(t for t in features if match[0].startswith(t))} × {_count(match[0], features)}"
                ),
                run["text"],
            )


def _count(text: str, tokens: list[str]) -> int:
    return sum(text.count(token) for token in tokens)


def _with_objective_of_rows(config: RunConfig, cache_dir: Path) -> RunConfig:
    """The config; with `format: preference` and no objective of preferences, as if for the units
    that its first readable row is.
    """
    data = config.data
    train = data.train if isinstance(data.train, list) else [data.train]
    formats = [data.format if isinstance(e, str) or e.format == "auto" else e.format for e in train]
    if config.objective in PREFERENCE or any(name != "preference" for name in formats):
        return config
    rows = (
        (source, row)
        for source in find_sources(data, cache_dir=cache_dir)
        for file in source.files
        for row in read_rows(file)
        if isinstance(row, RawRow)
    )
    source, row = next(rows, (None, None))
    if source is None or row is None:
        return config
    columns = source.section.columns
    is_rated_row = is_rated(row.value, columns) and not sides_in(row.value, columns)
    return config.model_copy(update={"objective": "kto" if is_rated_row else "dpo"})


def shown_unit(table: TokenTable, i: int, show: Callable[..., ShownRow]) -> ShownRow:
    """The parts of a row of a table for the preview, with those of both sides if it has two."""
    sides = [show(*table.row(i, side), table.weights(i, side)) for side in range(table.sides)]
    row = table.row_id(i)
    if table.records:
        columns: Any = table.record(i)["columns"]
        return {"row": row, **sides[0], "columns": columns}
    if table.sides == 1:
        return {"row": row, **sides[0]}
    if "label" in table.columns:
        return {"row": row, **sides[0], "kl": sides[1], "desirable": bool(table.columns["label"][i])}
    return {"row": row, "chosen": sides[0], "rejected": sides[1]}


def _processor(config: RunConfig) -> Path | None:
    """The directory of the model's processor of pictures; None without one, or without a model."""
    try:
        return picture_processor(locate_model(config.model.path, config.model.revision))
    except ModelError:  # a preview needs the tokenizer only
        return None


def _vocab_size(config: RunConfig, tokenizer: Path) -> int | None:
    """Rows of the embedding; None if the model's directory holds a tokenizer only."""
    if config.model.tokenizer is None and not (tokenizer / "config.json").is_file():
        return None
    settings = read_model_config(locate_model(config.model.path, config.model.revision))
    size = settings.get("text_config", settings).get("vocab_size")
    return size if isinstance(size, int) else None


def shown_row(
    ids: npt.NDArray[np.int32],
    targets: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.float32],
    tokenizer: Any,
    *,
    with_ids: bool,
) -> ShownRow:
    """The parts of a row for the preview; `weights` are those of its targets."""
    counts = np.zeros(len(ids), np.float32)
    counts[targets] = weights
    shown: ShownRow = {
        "tokens": len(ids),
        "loss_tokens": int(np.count_nonzero(targets)),
        "runs": [
            {
                "loss": bool(targets[first]),
                "weight": round(float(counts[first]), 3),
                "tokens": end - first,
                "text": _text(tokenizer, ids, first, end),
            }
            for first, end in runs(counts)
        ],
    }
    if with_ids:
        shown["ids"] = [None if i == NO_TOKEN else i for i in ids.tolist()]
        shown["loss"] = targets.tolist()
    return shown


def runs(weights: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    if not len(weights):
        return []
    changes = (np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist()
    return list(zip([0, *changes], [*changes, len(weights)], strict=True))


def _text(tokenizer: Any, ids: npt.NDArray[np.int32], first: int, end: int) -> str:
    """The text that tokens first..end add: decoded alone, some tokenizers would drop a leading
    space.
    """
    before, whole = (
        tokenizer.decode(
            ids[:stop][ids[:stop] >= 0].tolist(),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        for stop in (first, end)
    )
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(
        ids[first:end][ids[first:end] >= 0].tolist(),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )


def histogram(lengths: npt.NDArray[np.int64]) -> list[LengthClass]:
    """Up to ten bins of equal width from the shortest to the longest: {first, last, rows}."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // _BINS)
    counts = np.bincount((lengths - shortest) // width)
    firsts = [shortest + i * width for i in range(len(counts))]
    return [
        {"first": first, "last": min(first + width - 1, longest), "rows": int(n)}
        for first, n in zip(firsts, counts, strict=True)
    ]


def row_origins(request: RowsRequest, report: Reporter) -> RowOrigins:
    """Looks up the origins of rows.

    Raises:
        DataError: if the table is missing, or has no such sequence.
    """
    del report
    try:
        table = TokenTable.open(Path(request.table), "train")
        rows = [int(row) for sequence in request.sequences for row in table.rows_of(sequence)]
        return {"rows": [table.row_id(row) for row in rows]}
    except (OSError, IndexError) as error:
        raise DataError.of(
            "the rows cannot be looked up", where=request.table, why=one_line(str(error))
        ) from error

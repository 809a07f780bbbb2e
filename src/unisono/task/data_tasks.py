"""Tasks on a run's rows, without torch: `prepare` (model facts, token table), `preview`, and `rows` (where rows come from)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.checkpoint.model_manifest import check_model, read_digest
from unisono.config.lf_template import adapt_tokenizer, lf_template_of
from unisono.config.schema import RunConfig
from unisono.data.build import make_encoder
from unisono.data.lf_encoder import LfEncoder
from unisono.data.lf_pieces import NO_TOKEN
from unisono.data.prepare import load_tokenizer, prepare_data
from unisono.data.readers import read_rows
from unisono.data.rows import BadRow, Example, Exchange, Row, RowError, first_notes, read_counts
from unisono.data.sources import Source, find_sources
from unisono.data.token_table import EncodedUnit, TokenTable
from unisono.errors import DataError, ModelError
from unisono.events import Reporter
from unisono.files import make_private_dir
from unisono.model.directory import inspect_model, locate_model, locate_tokenizer, read_model_config
from unisono.rundir import RunDir
from unisono.text import one_line

_NOT_TOKENIZER = ("config.json", "generation_config.json", "adapter_config.json", "README.md")


def prepare(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Prepares a run: gives `data` (a DataSummary) and `model` (ModelFacts), both as JSON.

    Args:
        request: `config` (a RunConfig as JSON), `cache_dir`, and `output_dir`, where data.json is written, or null;
            `limit_rows`, the rows to read of each source, for a rehearsal.
        report: receives progress.

    Raises:
        IntegrityError: if the model is the result of a run, and is damaged.
    """
    config = RunConfig.model_validate(request["config"])
    report.phase("model", "reading the model's files")
    try:
        facts = inspect_model(config, verify_files=_refuse_damage)
    except ModelError:  # an unreadable file may have been damaged since it was written
        _refuse_damage(locate_model(config.model.path, config.model.revision), {})
        raise
    ledger = None
    if request.get("output_dir"):
        directory = RunDir(Path(request["output_dir"]))
        make_private_dir(directory.root)
        ledger = directory.data
    tokenizer = locate_tokenizer(config)
    if tokenizer != Path(facts.directory):
        _refuse_damage(
            tokenizer, {}, only=lambda name: not name.endswith(".safetensors") and name not in _NOT_TOKENIZER
        )
    data = prepare_data(
        config,
        tokenizer=tokenizer,
        vocab_size=None if config.model.resize_vocabulary else facts.vocab_size,
        cache_dir=Path(request["cache_dir"]),
        report=report,
        ledger=ledger,
        limit_rows=request.get("limit_rows"),
    )
    return {"data": data.model_dump(mode="json"), "model": facts.model_dump(mode="json")}


def _refuse_damage(
    directory: Path, digests: dict[str, tuple[int, str]], *, only: Callable[[str], bool] = lambda _name: True
) -> None:
    """Verifies a model that a run or an export has written against the list of its files; other models have no list.

    Raises:
        IntegrityError: with each damaged file, and its tensors.
    """
    checked = check_model(directory, read=lambda file: digests.get(file.name) or read_digest(file), only=only)
    if not checked.intact:
        raise checked.refusal(restore="copy the directory again, or export it again")


_BINS = 10
_NOTES = 20


def preview(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Shows rows as the model sees them: gives `data` (a DataSummary), `rows`, `lengths`, `ledger` and `notes`.

    A row is {row, tokens, loss_tokens, runs}; its runs, [{loss, tokens, text}], joined give its text. With `ids` it has `ids`, null for a
    token that the tokenizer does not have, and `loss`, parallel to them. `lengths` is a histogram of the training rows,
    [{first, last, rows}] in tokens. `notes` are the first rows that were dropped or changed.

    Of preference rows only `rows`, `warnings` and `notes` are given: a row has `chosen` and `rejected`, each with the parts of a row, or
    its own parts with `kl` (the same prompt with another row's answer) and `desirable`.

    Args:
        request: `config` (a RunConfig as JSON), `cache_dir`, `rows`, the number of rows to show, and `ids`, whether to add token ids.
            `stage` is sft, pt, rm, dpo or kto, as LLaMA-Factory names them; without it the objective decides, and the format of the rows.
        report: receives progress.
    """
    config = RunConfig.model_validate(request["config"])
    directory = locate_tokenizer(config)
    if request.get("stage") in ("rm", "dpo", "kto") or is_preference(config):
        return preview_preference(request, config, directory, report)
    data = prepare_data(
        config,
        tokenizer=directory,
        vocab_size=None if config.model.resize_vocabulary else _vocab_size(config, directory),
        cache_dir=Path(request["cache_dir"]),
        report=report,
        is_preview=True,
    )
    report.phase("preview", "decoding tokens")
    tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    layout = lf_template_of(config.data.template)
    if layout is not None:
        adapt_tokenizer(tokenizer, layout)
    with_ids = bool(request.get("ids"))
    table = TokenTable.open(Path(data.cache_dir), "train")
    ledger = Path(data.cache_dir) / "ledger.json"
    return {
        "data": data.model_dump(mode="json"),
        "rows": [
            {"row": table.row_id(i)} | shown_row(*table.row(i), tokenizer, with_ids=with_ids)
            for i in range(min(int(request["rows"]), table.rows))
        ],
        "lengths": histogram(table.row_lengths()),
        "ledger": read_counts(ledger),
        "notes": first_notes(ledger, limit=_NOTES),
    }


def is_preference(config: RunConfig) -> bool:
    """Whether the training rows of a config have several answers, or rated ones."""
    data = config.data
    train = data.train if isinstance(data.train, list) else [data.train]
    formats = [data.format if isinstance(e, str) or e.format == "auto" else e.format for e in train]
    return bool(formats) and all(name == "preference" for name in formats)


_GROUP = 1000  # rows; an answer of the same group is what a rated row is compared with


def preview_preference(
    request: dict[str, Any], config: RunConfig, directory: Path, report: Reporter
) -> dict[str, Any]:
    """The preview of preference rows; nothing is cached, as no run trains on them.

    Raises:
        DataError: if the template is not one of LLaMA-Factory, or a source cannot be read.
    """
    report.phase("preview", "encoding rows")
    tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    encoder = make_encoder(config, tokenizer, directory, objective="sft")
    if not isinstance(encoder, LfEncoder):
        raise DataError.of(
            "preference rows cannot be shown with this template",
            where="data.template",
            why="only templates of LLaMA-Factory encode them so far",
            fix="set data.template: lf:NAME",
        )
    wanted = int(request["rows"])
    rows = islice(_source_rows(config, Path(request["cache_dir"])), -(-wanted // _GROUP) * _GROUP)
    found = [(row.place, _read_preference(encoder, source, row)) for source, row in rows]
    readable = [(place, example) for place, example in found if not isinstance(example, RowError)]
    encoded = _encode_preference(encoder, [example for _, example in readable], request.get("stage"))
    results = [(place, row) for (place, _), row in zip(readable, encoded, strict=True)]
    bad = [(place, row) for place, row in [*found, *results] if isinstance(row, RowError)]
    show = partial(shown_row, tokenizer=tokenizer, with_ids=bool(request.get("ids")))
    good = [(place, row) for place, row in results if not isinstance(row, RowError)][:wanted]
    return {
        "rows": [{"row": str(place)} | _shown_preference(row, show) for place, row in good],
        "warnings": encoder.warnings,
        "notes": [
            {"file": place.file, "line": place.number, "what": "bad", "why": error.why}
            for place, error in bad[:_NOTES]
        ],
    }


def _read_preference(encoder: LfEncoder, source: Source, row: Row) -> Example | RowError:
    if isinstance(row, BadRow):
        return RowError(row.why, row.fix)
    try:
        return encoder.read_row("preference", row.value, source.section)
    except RowError as error:
        return error


def _shown_preference(row: EncodedUnit, show: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    first, second = (show(side.ids, side.targets) for side in row.sides)
    if row.label is not None:
        return first | {"kl": second, "desirable": row.label}
    chosen, rejected = first, second
    return {"chosen": chosen, "rejected": rejected}


def _encode_preference(
    encoder: LfEncoder, examples: list[Example], stage: str | None
) -> Sequence[EncodedUnit | RowError]:
    """Pairs or ratings; without a stage, what the first row is."""
    first = examples[0] if examples else None
    if stage == "kto" or (
        stage not in ("rm", "dpo") and isinstance(first, Exchange) and first.desirable is not None
    ):
        return encoder.encode_ratings(examples)
    return encoder.encode_pairs(examples)


def _source_rows(config: RunConfig, cache_dir: Path) -> Iterator[tuple[Source, Row]]:
    for source in find_sources(config.data, cache_dir=cache_dir):
        if source.role != "train":
            continue
        rows = (row for file in source.files for row in read_rows(file))
        for row in islice(rows, source.section.rows):
            yield source, row


def _vocab_size(config: RunConfig, tokenizer: Path) -> int | None:
    """Rows of the embedding; None if the model's directory holds a tokenizer only."""
    if config.model.tokenizer is None and not (tokenizer / "config.json").is_file():
        return None
    settings = read_model_config(locate_model(config.model.path, config.model.revision))
    size = settings.get("text_config", settings).get("vocab_size")
    return size if isinstance(size, int) else None


def shown_row(
    ids: npt.NDArray[np.int32], targets: npt.NDArray[np.bool_], tokenizer: Any, *, with_ids: bool
) -> dict[str, Any]:
    """The parts of a row for the preview."""
    found: dict[str, Any] = {
        "tokens": len(ids),
        "loss_tokens": int(np.count_nonzero(targets)),
        "runs": [
            {"loss": bool(targets[first]), "tokens": end - first, "text": _text(tokenizer, ids, first, end)}
            for first, end in runs(targets)
        ],
    }
    if with_ids:
        found["ids"] = [None if i == NO_TOKEN else i for i in ids.tolist()]
        found["loss"] = targets.tolist()
    return found


def runs(targets: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    if not len(targets):
        return []
    changes = (np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist()
    return list(zip([0, *changes], [*changes, len(targets)], strict=True))


def _text(tokenizer: Any, ids: npt.NDArray[np.int32], first: int, end: int) -> str:
    """The text that tokens first..end add: decoded alone, some tokenizers would drop a leading space."""
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


def histogram(lengths: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Up to ten bins of equal width from the shortest to the longest: {first, last, rows}."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // _BINS)
    counts = np.bincount((lengths - shortest) // width)
    firsts = [shortest + i * width for i in range(len(counts))]
    return [
        {"first": first, "last": min(first + width - 1, longest), "rows": int(n)}
        for first, n in zip(firsts, counts, strict=True)
    ]


def row_origins(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Looks up the origins of rows: gives `rows`, file and line of each row of the sequences, in their order.

    Args:
        request: `table`, the directory of a token table, and `sequences` of its training split.
        report: not used.

    Raises:
        DataError: if the table is missing, or has no such sequence.
    """
    del report
    try:
        table = TokenTable.open(Path(request["table"]), "train")
        rows = [int(row) for sequence in request["sequences"] for row in table.rows_of(int(sequence))]
        return {"rows": [table.row_id(row) for row in rows]}
    except (OSError, IndexError) as error:
        raise DataError.of(
            "the rows cannot be looked up", where=str(request["table"]), why=one_line(str(error))
        ) from error

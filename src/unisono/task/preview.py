"""Shows a config's rows as the model will see them: text, what counts in the loss, lengths, the ledger."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.config.schema import RunConfig
from unisono.data.ledger import first_notes, read_counts
from unisono.data.prepare import load_tokenizer, prepare_data
from unisono.data.table import TokenTable
from unisono.events import Reporter
from unisono.model.inspect import read_model_config
from unisono.model.locate import locate_model, locate_tokenizer

_BINS = 10
_NOTES = 20


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `data` (a DataSummary), `rows`, `lengths`, `ledger` and `notes`.

    A row is {row, tokens, loss_tokens, runs}; its runs, [{loss, tokens, text}], joined give its text. `lengths` is a
    histogram of the training rows, [{first, last, rows}] in tokens. `notes` are the first rows to which something was done.

    Args:
        request: `config` (a RunConfig as JSON), `cache_dir`, and `rows`, how many to show.
        report: told about progress.
    """
    config = RunConfig.model_validate(request["config"])
    directory = locate_tokenizer(config)
    data = prepare_data(
        config,
        tokenizer=directory,
        vocab_size=None if config.model.resize_vocabulary else _vocab_size(config),
        cache_dir=Path(request["cache_dir"]),
        report=report,
    )
    report.phase("preview", "turning tokens back into text")
    tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    table = TokenTable.open(Path(data.cache_dir), "train")
    ledger = Path(data.cache_dir) / "ledger.json"
    return {
        "data": data.model_dump(mode="json"),
        "rows": [_shown(table, i, tokenizer) for i in range(min(int(request["rows"]), table.rows))],
        "lengths": histogram(table.row_lengths()),
        "ledger": read_counts(ledger),
        "notes": first_notes(ledger, limit=_NOTES),
    }


def _vocab_size(config: RunConfig) -> int | None:
    settings = read_model_config(locate_model(config.model.path, config.model.revision))
    size = settings.get("text_config", settings).get("vocab_size")
    return size if isinstance(size, int) else None


def _shown(table: TokenTable, i: int, tokenizer: Any) -> dict[str, Any]:
    ids, targets = table.row(i)
    return {
        "row": table.row_id(i),
        "tokens": len(ids),
        "loss_tokens": int(np.count_nonzero(targets)),
        "runs": [
            {"loss": bool(targets[first]), "tokens": end - first, "text": _text(tokenizer, ids, first, end)}
            for first, end in runs(targets)
        ],
    }


def runs(targets: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and end of each stretch of equal values; there is at least one value."""
    changes = (np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist()
    return list(zip([0, *changes], [*changes, len(targets)], strict=True))


def _text(tokenizer: Any, ids: npt.NDArray[np.int32], first: int, end: int) -> str:
    """What tokens first..end add to the text: decoded alone, some tokenizers would drop a blank at the beginning."""
    before, whole = (
        tokenizer.decode(ids[:stop].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for stop in (first, end)
    )
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(
        ids[first:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def histogram(lengths: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Up to ten classes of equal width from the shortest to the longest: {first, last, rows}."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // _BINS)
    counts = np.bincount((lengths - shortest) // width)
    firsts = [shortest + i * width for i in range(len(counts))]
    return [
        {"first": first, "last": min(first + width - 1, longest), "rows": int(n)}
        for first, n in zip(firsts, counts, strict=True)
    ]

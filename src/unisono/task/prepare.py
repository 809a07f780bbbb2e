"""Prepares a run: reads the model's facts, and has its rows tokenized or finds them in the cache."""

from pathlib import Path
from typing import Any

from unisono.config.schema import RunConfig
from unisono.data.prepare import prepare_data
from unisono.events import Reporter
from unisono.files import make_private_dir
from unisono.model.inspect import inspect_model
from unisono.model.locate import locate_tokenizer
from unisono.rundir.layout import RunDir


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `data` (a DataSummary) and `model` (ModelFacts), both as JSON.

    Args:
        request: `config` (a RunConfig as JSON), `cache_dir`, and `output_dir`, into which data.json is written, or null;
            `limit_rows`, if only so many rows of each source are to be read, as in a rehearsal.
        report: told about progress.
    """
    config = RunConfig.model_validate(request["config"])
    report.phase("model", "reading the model's files")
    facts = inspect_model(config)
    ledger = None
    if request.get("output_dir"):
        directory = RunDir(Path(request["output_dir"]))
        make_private_dir(directory.root)
        ledger = directory.data
    data = prepare_data(
        config,
        tokenizer=locate_tokenizer(config),
        vocab_size=None if config.model.resize_vocabulary else facts.vocab_size,
        cache_dir=Path(request["cache_dir"]),
        report=report,
        ledger=ledger,
        limit_rows=request.get("limit_rows"),
    )
    return {"data": data.model_dump(mode="json"), "model": facts.model_dump(mode="json")}

"""Prepares a run: reads the model's facts, and has its rows tokenized or finds them in the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.checkpoint.model_manifest import check_model, read_digest
from unisono.config.schema import RunConfig
from unisono.data.prepare import prepare_data
from unisono.errors import ModelError
from unisono.events import Reporter
from unisono.files import make_private_dir
from unisono.model.inspect import inspect_model
from unisono.model.locate import locate_model, locate_tokenizer
from unisono.rundir import RunDir

_NOT_TOKENIZER = ("config.json", "generation_config.json", "adapter_config.json", "README.md")


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `data` (a DataSummary) and `model` (ModelFacts), both as JSON.

    Args:
        request: `config` (a RunConfig as JSON), `cache_dir`, and `output_dir`, into which data.json is written, or null;
            `limit_rows`, if only so many rows of each source are to be read, as in a rehearsal.
        report: told about progress.

    Raises:
        IntegrityError: if the model is the result of a run, and is damaged.
    """
    config = RunConfig.model_validate(request["config"])
    report.phase("model", "reading the model's files")
    try:
        facts = inspect_model(config, vouch=_refuse_damage)
    except ModelError:  # a file that cannot be read may be one that was damaged since it was written
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
    """Compares a model that a run or an export left with the list of its files; other models have none.

    Raises:
        IntegrityError: naming each file that is damaged, and its tensors.
    """
    checked = check_model(directory, read=lambda file: digests.get(file.name) or read_digest(file), only=only)
    if not checked.intact:
        raise checked.refusal(restore="copy the directory again, or export it again")

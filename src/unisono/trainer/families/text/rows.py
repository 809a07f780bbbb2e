"""Rows of text, prepared without torch, except that the modules of some models are counted."""

from collections.abc import Callable
from pathlib import Path

from unisono.base.errors import ModelError
from unisono.base.events import Reporter
from unisono.trainer.checkpoint.verify import check_model, read_digest
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.families.family import make_ledger
from unisono.trainer.model.directory import inspect_model, locate_model, locate_tokenizer
from unisono.trainer.model.part_figures import with_parts
from unisono.trainer.plan import DataSummary, ModelFacts
from unisono.trainer.plan.task_requests import PrepareRequest

_NOT_TOKENIZER = ("config.json", "generation_config.json", "adapter_config.json", "README.md")


def prepare(request: PrepareRequest, report: Reporter) -> tuple[DataSummary, ModelFacts]:
    """Writes the token table."""
    config = request.config
    try:
        facts = with_parts(config, inspect_model(config, verify_files=_refuse_damage))
    except ModelError:  # an unreadable file may have been damaged since it was written
        _refuse_damage(locate_model(config.model.path, config.model.revision), {})
        raise
    ledger = make_ledger(request)
    tokenizer = locate_tokenizer(config)
    if tokenizer != Path(facts.directory):
        _refuse_damage(
            tokenizer, {}, only=lambda name: not name.endswith(".safetensors") and name not in _NOT_TOKENIZER
        )
    data = prepare_data(
        config,
        tokenizer=tokenizer,
        vocab_size=None if config.model.resize_vocabulary else facts.vocab_size,
        cache_dir=request.cache_dir,
        report=report,
        ledger=ledger,
        limit_rows=request.limit_rows,
    )
    return data, facts


def check_preview() -> None:
    """Does nothing: rows are text."""


def _refuse_damage(
    directory: Path, digests: dict[str, tuple[int, str]], *, only: Callable[[str], bool] = lambda _name: True
) -> None:
    """Verifies a model that a run or an export has written against the list of its files; other
    models have no list.

    Raises:
        IntegrityError: with each damaged file, and its tensors.
    """
    checked = check_model(directory, read=lambda file: digests.get(file.name) or read_digest(file), only=only)
    if not checked.intact:
        raise checked.refusal(restore="copy the directory again, or export it again")

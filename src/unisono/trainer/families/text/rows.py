"""Rows of text, prepared without torch, except that the modules of some models are counted."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from unisono.base.errors import DataError, ModelError
from unisono.base.events import Reporter
from unisono.trainer.checkpoint.verify import check_model, read_digest
from unisono.trainer.config.heads import SequenceHead
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.families.family import make_ledger
from unisono.trainer.model.directory import (
    SCORE,
    inspect_model,
    locate_model,
    locate_tokenizer,
    picture_processor,
    read_model_config,
    refuse_other_head,
)
from unisono.trainer.model.files import read_safetensors_header, weight_files
from unisono.trainer.model.parts import (
    Weight,
    adaptable_weights,
    adapter_figures,
    count_parts,
    experts_of_layer,
    weights_in_files,
)
from unisono.trainer.plan import DataSummary, ModelFacts, VisionFacts
from unisono.trainer.plan.run_plan import head_of
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
        processor=picture_processor(Path(facts.directory)),
    )
    head = head_of(config, data.labels)
    if head is not None:
        directory = Path(facts.directory)
        refuse_other_head(directory, read_model_config(directory), head)
    if data.pictures is None:
        _refuse_parts(config)
        return data, facts
    vision = _vision_facts(config, Path(facts.directory))
    return data, facts.model_copy(update={"reads_pictures": True, "vision": vision})


def _refuse_parts(config: RunConfig) -> None:
    """Refuses to train parts that rows of text do not reach.

    Raises:
        DataError: with the part.
    """
    others = [part for part in config.train_parts if part != "language"]
    if others:
        raise DataError.of(
            f"{others[0]} is to be trained, and no row has a picture",
            where="train_parts",
            why="rows of text do not reach it",
            fix="set train_parts: [language], or add rows with pictures",
        )


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

    def read(file: Path) -> tuple[int, str]:
        known = digests.get(file.name) if file.parent == directory else None
        return known or read_digest(file)

    checked = check_model(directory, read=read, only=only)
    if not checked.intact:
        raise checked.refusal(restore="copy the directory again, or export it again")


def with_parts(config: RunConfig, facts: ModelFacts) -> ModelFacts:
    """The figures of a model with those of its parts, and of what the config's adapter changes.

    Only if the names of its files are not those of a plain decoder, torch is imported: the model is
    made on the meta device.

    Raises:
        ModelError: if transformers does not make a model of it, or the adapter does not match it.
    """
    random, head = config.model.weights == "random", SCORE if config.trains_head else None
    files = [] if random else weight_files(Path(facts.directory))
    headers = [header for file in files for header in read_safetensors_header(file)]
    headers = [header for header in headers if head is None or header.name != "lm_head.weight"]
    weights, parts = weights_in_files(headers)
    figures: dict[str, object] = {}
    if not facts.has_plain_mlps or sum(weight.in_out for weight in weights) != facts.linear_in_out:
        model = _outline(config, Path(facts.directory), head=head_of(config, None))
        weights, parts = adaptable_weights(model, head=head), count_parts(model, head=head)
        figures = {"experts_of_layer": experts_of_layer(weights)}
        if random:
            figures |= _sizes(weights, parts)
    elif head is None:  # the module is there even if it shares the embedding's matrix
        shape = (facts.vocab_size, facts.hidden_size)
        weights.append(Weight("lm_head", "lm_head.weight", "head", shape, False, ""))
    if config.adapter is not None:
        figures |= adapter_figures(weights, config.adapter, head=head)
    return facts.model_copy(update={"parts": parts, **figures})


def _outline(config: RunConfig, directory: Path, *, head: SequenceHead | None = None) -> Any:
    """The model of a config on the meta device; imports torch.

    Raises:
        ModelError: if transformers does not make a model of its config.json.
    """
    from unisono.trainer.model.load import outline_base

    return outline_base(directory, trust_remote_code=config.model.trust_remote_code, head=head)


def _vision_facts(config: RunConfig, directory: Path) -> VisionFacts:
    from unisono.trainer.model.multimodal import vision_facts

    return vision_facts(_outline(config, directory))


def _sizes(weights: list[Weight], parts: dict[str, int]) -> dict[str, object]:
    """What config.json alone shows of models like Llama only."""
    inside = [weight for weight in weights if weight.part != "head"]
    return {
        "parameters": sum(parts.values()),
        "linear_parameters": sum(prod(weight.shape) for weight in inside),
        "linear_in_out": sum(weight.in_out for weight in inside),
    }

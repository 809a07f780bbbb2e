"""Loads what a run has trained into this process.

The only module of the Python interface that imports torch.
"""

import logging
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unisono.base.errors import UnisonoError, UsageError
from unisono.base.events import Reporter
from unisono.base.requirements import refuse_without_trainer
from unisono.front.api import Result
from unisono.front.api.front import shown
from unisono.trainer.plan.families import family_at, need_decoder
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.readers import register_templates
from unisono.trainer.task.inference import dtype_of, load_target, stops_of, template_of
from unisono.trainer.task.target import Target, requested_target, verify_target

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger("unisono")


def load(
    result: Result | str | PathLike[str], *, step: int | None = None, device: str | None = None
) -> "tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]":
    """Loads the trained model in evaluation mode, and its tokenizer. Both are objects of
    transformers; a model with an adapter is an object of peft.

    The tokenizer has the chat template of the training, `generation_config` its stop tokens. With
    `do_sample=False`, the model's method `generate` gives the same answers as `unisono generate`.
    Files are checked against the digests that were recorded in the training.

    Args:
        result: a Result, the path of a run, a model or an adapter, or a hub id. For an unfinished
            run, the newest checkpoint is loaded.
        step: load the checkpoint of this step instead.
        device: e.g. `cuda:1`; default: the first visible accelerator, else the CPU.

    Raises:
        UsageError: if the model does not exist or has no weights yet, or if the extra `train` is
            not installed.
        ModelError: if files are missing or do not match each other.
        IntegrityError: if a file does not match its digest.
    """
    register_templates()
    name = str(result.output_dir) if isinstance(result, Result) else str(result)
    target = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        refuse_without_trainer("unisono.load")
        return _load(name, step, target)
    except UnisonoError as error:
        raise shown(error) from None


def _load(
    name: str, step: int | None, device: torch.device
) -> "tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]":
    if family_at(Path(name).expanduser()).draws:
        raise UsageError.of(
            f"{name} draws pictures",
            where="load()",
            fix=f'use `unisono generate {name} "a prompt" --out pictures`, or the file with diffusers',
        )
    need_decoder(name, where="load()")
    target = requested_target(RequestedModel(name, step))
    for note in target.notes:
        _log.warning("%s", note)
    verify_target(target, Reporter(None))
    loaded = load_target(target, dtype=dtype_of(target, device), device=device)
    if target.head is None and not target.embeds:
        _set_up_generation(target, loaded.base, loaded.tokenizer)
    return loaded.model, loaded.tokenizer


def _set_up_generation(target: Target, base: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Stop tokens of the training, and the answer of greatest probability, as `unisono generate`
    has by default.
    """
    template = template_of(target, tokenizer)
    stops = sorted(stops_of(target, tokenizer, template))
    settings = base.generation_config
    settings.eos_token_id = stops or None
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]

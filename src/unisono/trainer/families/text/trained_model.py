"""Training of language models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.text.written import WrittenModel
from unisono.trainer.model.directory import locate_tokenizer
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.forward import choose_forward as choose_text_forward
from unisono.trainer.model.load import LoadedModel, load_for_training, uses_dropout
from unisono.trainer.model.result_logits import ResultLogits
from unisono.trainer.plan import RunPlan


def load(plan: RunPlan, device: torch.device) -> LoadedModel:
    """The model with its tokenizer."""
    return load_for_training(
        plan.config,
        directory=Path(plan.model.directory),
        tokenizer_directory=locate_tokenizer(plan.config),
        dtype=plan.dtype,
        device=device,
    )


def choose_forward(plan: RunPlan, loaded: LoadedModel, root: torch.nn.Module | None) -> Forward:
    """The forward of flat or padded rows, as CUDA graphs where nothing prevents them."""
    adapter = plan.config.adapter
    forward = choose_text_forward(
        loaded,
        dtype=plan.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
        quick_adapter=adapter is not None and adapter.is_plain,
        root=root,
        router_loss=plan.config.optim.router_loss,
    )
    varies = plan.config.deterministic or plan.gradient_checkpointing or uses_dropout(loaded)
    if root is None and not varies:
        length = plan.config.data.max_length
        forward.use_graphs(most_tokens=plan.micro_batch * length, longest=length)
    return forward


def probe(plan: RunPlan, device: torch.device) -> None:
    """None: rows are tokens."""
    del plan, device


def open_contents(plan: RunPlan, forward: Forward, device: torch.device, *, draws: bool) -> tuple[None, None]:
    """None: rows are tokens."""
    del plan, forward, device, draws
    return None, None


def write_result(loaded: LoadedModel, plan: RunPlan, directory: Path | None, *, step: int) -> None:
    """None: the format is that of transformers and peft."""
    del loaded, plan, directory, step


def outputs(model: Any, plan: RunPlan, examples: Callable[[], list[list[int]]]) -> ResultLogits:
    """The logits of some rows."""
    return ResultLogits.of(model, examples(), dtype=plan.dtype)


def read_outputs(file: Path) -> ResultLogits:
    """The logits in a file."""
    return ResultLogits.read(file)


def written(directory: Path, base: Path, config: RunConfig) -> WrittenModel:
    """A model, or an adapter of `base`."""
    return WrittenModel(directory, base, config, reward=config.objective == "reward")

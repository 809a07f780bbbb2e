"""Training of image models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.pictures.drawing import open_contents
from unisono.trainer.families.pictures.lora_file import write_lora
from unisono.trainer.families.pictures.pipeline import (
    PictureForward,
    choose_picture_forward,
    load_denoiser,
    trains_text,
)
from unisono.trainer.families.pictures.pipeline_files import read_pipeline
from unisono.trainer.families.pictures.result_predictions import ResultPredictions
from unisono.trainer.families.pictures.written import WrittenLora
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan

__all__ = [
    "choose_forward",
    "load",
    "open_contents",
    "outputs",
    "probe",
    "read_outputs",
    "write_result",
    "written",
]


def load(plan: RunPlan, device: torch.device) -> LoadedModel:
    """The denoiser with its LoRA."""
    return load_denoiser(plan.config, directory=Path(plan.model.directory), dtype=plan.dtype, device=device)


def choose_forward(plan: RunPlan, loaded: LoadedModel, root: torch.nn.Module | None) -> PictureForward:
    """The forward of the denoiser; its weights are never sharded."""
    assert root is None
    return choose_picture_forward(
        loaded,
        plan.config,
        directory=Path(plan.model.directory),
        dtype=plan.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
    )


def probe(plan: RunPlan, device: torch.device) -> None:
    """None: rows are captions."""
    del plan, device


def write_result(
    loaded: LoadedModel, plan: RunPlan, directory: Path | None, *, step: int
) -> dict[str, FileEntry]:
    """Writes a LoRA file."""
    return write_lora(loaded.base, plan, directory, step=step) if directory is not None else {}


def outputs(model: Any, plan: RunPlan, examples: Callable[[], list[list[int]]]) -> ResultPredictions:
    """The predictions for fixed noise."""
    del examples
    trained = model.text_names if trains_text(plan.config) else ()
    return ResultPredictions.of(model, dtype=plan.dtype, text_encoders=trained)


def read_outputs(file: Path) -> ResultPredictions:
    """The predictions in a file."""
    return ResultPredictions.read(file)


def written(directory: Path, base: Path, config: RunConfig) -> WrittenLora:
    """A LoRA file for the pipeline `base`."""
    del config
    return WrittenLora(directory, read_pipeline(base))

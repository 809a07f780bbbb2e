"""LoRA files of image models, as the task `read_back` compares them: diffusers loads them on their
pipeline, also those of sd-scripts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.state import CheckpointReader
from unisono.trainer.families.pictures.drawing import open_pipeline
from unisono.trainer.families.pictures.lora_file import LORA_FILE
from unisono.trainer.families.pictures.pipeline import load_denoiser, trains_text
from unisono.trainer.families.pictures.pipeline_files import WEIGHTS, Pipeline
from unisono.trainer.families.pictures.result_predictions import ResultPredictions
from unisono.trainer.model.files import read_safetensors_header
from unisono.trainer.model.load import DTYPES
from unisono.trainer.model.result_outputs import TOLERANCE
from unisono.trainer.plan import RunPlan
from unisono.trainer.task.target import Target


@dataclass(frozen=True)
class WrittenLora:
    """A LoRA file.

    Attributes:
        directory: where it is.
        pipeline: what it was trained on.
        name: of the file.
        half: whether it was written in float16, though it was trained in float32.
    """

    directory: Path
    pipeline: Pipeline
    name: str = LORA_FILE
    half: bool = False

    @property
    def weights(self) -> Path:
        """The file."""
        return self.directory / self.name

    @property
    def rounding(self) -> float:
        """What float16 explains, if it was written so."""
        return TOLERANCE["float16"] if self.half else 0.0

    def bytes_in_memory(self, dtype: str) -> int:
        """Of the whole pipeline, which diffusers loads."""
        files = [
            file
            for name in WEIGHTS
            if (self.pipeline.root / name).is_dir()
            for file in self.pipeline.weights(name)
        ]
        shapes = [header.shape for file in files for header in read_safetensors_header(file)]
        return DTYPES[dtype].itemsize * sum(torch.Size(shape).numel() for shape in shapes)

    def load(self, *, dtype: str, device: torch.device) -> Any:
        """The pipeline with its LoRA, as `pipeline.load_lora_weights` loads it."""
        return open_pipeline(self.pipeline, dtype=DTYPES[dtype], device=device, lora=self.weights)


def trained_predictions(target: Target) -> ResultPredictions | None:
    """What the model of a run gives at the target's step; None where nobody knows: it is not the
    result of a run, nor a checkpoint.
    """
    plan = target.plan
    if plan is None:
        return None
    if target.source == "checkpoint":
        return _of_checkpoint(target, plan)
    kept = RunDir(target.weights.parent).result_logits
    known = kept.is_file() and target.base == Path(plan.model.directory)
    return ResultPredictions.read(kept) if known else None


def _of_checkpoint(target: Target, plan: RunPlan) -> ResultPredictions:
    """By the denoiser that trains, with the weights of the checkpoint."""
    cpu = torch.device("cpu")
    loaded = load_denoiser(plan.config, directory=target.base, dtype="float32", device=cpu)
    reader = CheckpointReader(target.weights)
    with torch.no_grad():
        for name, parameter in loaded.trainable.items():
            parameter.copy_(reader.tensor("trainable", name))
    trained = loaded.base.text_names if trains_text(plan.config) else ()
    return ResultPredictions.of(loaded.base.eval(), dtype="float32", text_encoders=trained)

"""Written LoRA files of image models: diffusers loads them on their pipeline, also those of
sd-scripts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.trainer.families.pictures.drawing import open_pipeline
from unisono.trainer.families.pictures.lora_file import LORA_FILE
from unisono.trainer.families.pictures.pipeline_files import WEIGHTS, Pipeline
from unisono.trainer.model.files import read_safetensors_header
from unisono.trainer.model.load import DTYPES
from unisono.trainer.model.result_outputs import TOLERANCE


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
        """The size of the whole pipeline, which diffusers loads."""
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

"""Image models: pictures with captions, Stable Diffusion pipelines, their LoRA files, and pictures
that they draw.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy compares the modules with what a family has to provide
    from unisono.trainer.families.family import Files, Preparation, Training
    from unisono.trainer.families.pictures import input_files, rows, trained_model

    FILES: Files = input_files
    PREPARATION: Preparation = rows
    TRAINING: Training = trained_model

"""Language models that read pictures, with rows that have some. Files and rows are those of
`families.text`, which finds pictures while it prepares rows.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy compares the module with what a family has to provide
    from unisono.trainer.families.family import Training
    from unisono.trainer.families.vision import vision_model

    TRAINING: Training = vision_model

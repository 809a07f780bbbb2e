"""Families of models: what a run does in another way with an image model than with a language
model.

A family is a folder with the modules of `family`, imported when they are needed: training of text
never loads those of image models. What plan and fronts know of a family is in `plan.families`.
"""

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.family import Files, Preparation, Training
from unisono.trainer.plan.families import PICTURES, family_for


def files_of(config: RunConfig) -> Files:
    """How the family of a config finds files; without torch."""
    if family_for(config.objective) is PICTURES:
        from unisono.trainer.families.pictures import input_files as pictures

        return pictures
    from unisono.trainer.families.text import input_files

    return input_files


def rows_of(config: RunConfig) -> Preparation:
    """How the family of a config prepares rows; that of text imports torch for some models only."""
    if family_for(config.objective) is PICTURES:
        from unisono.trainer.families.pictures import rows as pictures

        return pictures
    from unisono.trainer.families.text import rows

    return rows


def training_of(config: RunConfig) -> Training:
    """How the family of a config trains, and loads what was trained."""
    if family_for(config.objective) is PICTURES:
        from unisono.trainer.families.pictures import trained_model as pictures

        return pictures
    from unisono.trainer.families.text import trained_model

    return trained_model

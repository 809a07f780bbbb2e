"""Families of models: how a run with an image model differs from a run with a language model.

A family is a folder with the modules of `family`, imported when they are needed: training of text
never loads those of image models. What plan and fronts know of a family is in `plan.families`.
"""

from importlib import import_module
from typing import Any

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.family import Files, Preparation, Training
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import FamilyFacts, family_for, family_of


def files_of(config: RunConfig) -> Files:
    """How the family of a config finds files; without torch."""
    module: Files = _module(family_for(config.objective), "input_files")
    return module


def rows_of(config: RunConfig) -> Preparation:
    """How the family of a config prepares rows; that of text imports torch for some models only."""
    module: Preparation = _module(family_for(config.objective), "rows")
    return module


def training_of(plan: RunPlan) -> Training:
    """How the family of a run trains, and loads what was trained."""
    family = family_of(plan.model)
    module: Training = _module(family, family.training)
    return module


def _module(family: FamilyFacts, name: str) -> Any:
    """One of the three modules of a family; the `__init__` of its folder has mypy check them."""
    return import_module(f"{__name__}.{family.folder}.{name}")

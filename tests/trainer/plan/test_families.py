"""Families of models.

Run: pytest tests/trainer/plan/test_families.py
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import unisono
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.trainer.config.limits import OBJECTIVES
from unisono.trainer.objectives.objective import Objective
from unisono.trainer.plan import families
from unisono.trainer.plan.families import FamilyFacts, family_for
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.task.inference import open_requested

SOURCE = Path(unisono.__file__).parent
NAMES = re.compile(
    r"\bDIFFUSION\b|is_picture_model|is_image_model\(|[!=]= \"diffusion\"|\bPICTURES\b|\brun\.pictures\b"
)
STILL_BRANCH = {
    "trainer/config/sections.py": 1,
    "trainer/config/schema.py": 5,
}
"""Lines outside of the families that name one: may only become fewer. The name itself, and rules of
a config that compare two values.
"""
TABLES = ("trainer/config/limits.py",)
"""Rows of what objectives take: data, not branches (docs/decisions/0039-limits-of-objectives.md)."""


def test_no_line_outside_of_the_families_names_one() -> None:
    named = {}
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE)
        if "families" in (*path.parts, path.stem) or path.as_posix() in TABLES:
            continue
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if NAMES.search(line)]
        if lines:
            named[path.as_posix()] = len(lines)
    assert named == STILL_BRANCH


@pytest.mark.parametrize(
    "family", dict.fromkeys(family_for(name) for name in OBJECTIVES), ids=lambda family: family.folder
)
def test_the_modules_and_classes_that_a_family_names_are_there(family: FamilyFacts) -> None:
    for module in ("input_files", "rows", "trained_model"):
        assert find_spec(f"unisono.trainer.families.{family.folder}.{module}") is not None
    for name, place in family.objectives.items():
        assert name in OBJECTIVES
        module, _, kind = place.partition(":")
        assert issubclass(getattr(import_module(module), kind), Objective)


class _Waves(families._Pictures):
    draws = False
    described = "a model of waves"


def test_a_family_that_neither_decodes_nor_draws_is_not_taken_for_one_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").touch()
    monkeypatch.setattr(families, "_OTHERS", (_Waves(),))
    with pytest.raises(UsageError, match="is a model of waves"):
        open_requested(RequestedModel(str(tmp_path)), Reporter(None))

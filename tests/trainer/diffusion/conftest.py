"""A tiny pipeline, pictures in four sizes, and runs with them."""

from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.trainer.diffusion.making import write_pictures, write_pipeline
from tests.trainer.ranks.conftest import Done, Workshop
from unisono.base.files import write_json
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan

SIZES = ((32, 32), (48, 24), (24, 48), (40, 32))


class Studio(Workshop):
    """Makes runs on pictures."""

    kinds = {"diffusion": {}}  # noqa: RUF012 - as in the class above

    def alone(self, plan: RunPlan) -> Done:
        """One rank, in this process; the directory has what a front writes, so that it can be
        exported.
        """
        done = super().alone(plan)
        write_json(done.directory / "plan.json", plan.to_json())
        write_json(done.directory / "result.json", {"outcome": done.result["outcome"]})
        return done

    def _config(self, sections: dict[str, Any], out: Path, strategy: str) -> RunConfig:
        raw: dict[str, Any] = {
            "objective": "diffusion", "model": {"path": str(self.model_dir), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 2, "targets": "unet"},
            "data": {"train": str(self._files["sft"]), "resolution": 32},
            "diffusion": {"bucket_step": 8, "min_side": 16, "max_side": 64, "caption_dropout": 0.3, "noise_offset": 0.1},
            "optim": {"lr": 1e-2}, "device": "cpu", "output_dir": str(out), "parallel": {"strategy": strategy},
            "duration": "6 steps", "batch": {"global": 6, "micro": 2}, "checkpoint": {"every": "3 steps", "keep": 9},
        }  # fmt: skip
        for key, value in sections.items():
            both = isinstance(value, dict) and isinstance(raw.get(key), dict)
            raw[key] = {**raw[key], **value} if both else value
        return RunConfig.model_validate(raw)


@pytest.fixture(scope="session")
def pipeline_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion pipeline with random weights."""
    needs.package("diffusers")
    return write_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="session")
def pictures_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures of four sizes: those of one folder are used twice, those of the other
    once.
    """
    needs.package("PIL")
    root = tmp_path_factory.mktemp("pictures")
    write_pictures(root / "2_tile", ["red", "blue"], SIZES)
    write_pictures(root / "1_other", ["green"], SIZES)
    return root


@pytest.fixture(scope="session")
def studio(pipeline_dir: Path, pictures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Studio:
    """Where runs are made."""
    return Studio(pipeline_dir, {"sft": pictures_dir}, tmp_path_factory.mktemp("studio"))


@pytest.fixture(scope="session")
def done(studio: Studio) -> Done:
    """A run of six steps on one rank."""
    return studio.alone(studio.plan("diffusion"))

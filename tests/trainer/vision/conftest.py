"""Tiny vision-language models, rows with pictures, and runs with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.trainer.ranks.conftest import Done, Workshop
from tests.vision_models import COLORS, FAMILIES, NEED_TORCHVISION, SHAPES, draw
from unisono.base.files import write_json
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan

RATES = {"gemma4": 2e-4, "qwen3_5": 5e-4}
"""Learning rates where some gradients are nearly zero, since attention is saturated: Adam makes their
roundings as large as others.
"""
LARGE = ("llava_next", "llava_onevision", "gemma4")  # a picture has up to 88 tokens
SIZES = ((96, 64), (64, 64), (50, 120), (200, 150))


class Gallery(Workshop):
    """Makes runs on rows with pictures; a kind is a family."""

    kinds = {family: {"model": {"path": family}} for family in {**FAMILIES, **NEED_TORCHVISION}}  # noqa: RUF012 - as in the class above

    def model(self, family: str) -> Path:
        """The directory of a family's model."""
        directory = self.folder / family
        if not directory.exists():
            {**FAMILIES, **NEED_TORCHVISION}[family](directory)
        return directory

    def alone(self, plan: RunPlan) -> Done:
        """One rank, in this process; the directory has what a front writes, so that it can be
        exported.
        """
        done = super().alone(plan)
        write_json(done.directory / "plan.json", plan.to_json())
        write_json(done.directory / "result.json", {"outcome": done.result["outcome"]})
        return done

    def _config(self, sections: dict[str, Any], out: Path, strategy: str) -> RunConfig:
        family = sections["model"]["path"]
        targets = "attention" if family == "llama4" else "all-linear"  # of its experts peft adapts parameters
        longest = 512 if family in LARGE else 256
        raw: dict[str, Any] = {
            "model": {"path": "", "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8, "targets": targets},
            "data": {"train": str(self._files["sft"]), "max_length": longest},
            "optim": {"lr": RATES.get(family, 1e-2), "schedule": "constant", "warmup": "0 steps"}, "device": "cpu",
            "output_dir": str(out), "parallel": {"strategy": strategy}, "duration": "5 steps",
            "batch": {"global": 4, "micro": 2}, "checkpoint": {"every": "3 steps", "keep": 9},
        }  # fmt: skip
        for key, value in sections.items():
            both = isinstance(value, dict) and isinstance(raw.get(key), dict)
            raw[key] = {**raw[key], **value} if both else value
        raw["model"]["path"] = str(self.model(raw["model"]["path"]))
        return RunConfig.model_validate(raw)


def write_rows(folder: Path) -> Path:
    """Rows with one picture, with three in two turns, and without any."""
    (folder / "pictures").mkdir()
    rows = []
    for i in range(24):
        color, shape, size = COLORS[i % 4], SHAPES[i // 4 % 2], SIZES[i % 3]
        draw(color, shape, size=size).save(folder / "pictures" / f"{i}.png")
        names = [f"pictures/{i - back}.png" for back in range(3)]
        turns = ["<image>what is this?", f"a {color} {shape}"]
        images = names[:1]
        if i % 6 == 5:
            turns, images = ["what is red?", "a color"], []
        elif i % 6 == 4:
            turns = [
                "<image><image>what are these?",
                f"a {color} {shape} and another",
                "and this: <image>",
                "the same",
            ]
            images = names
        messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
        rows.append({"messages": messages, **({"images": images} if images else {})})
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def picture_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of rows, and its pictures beside it."""
    needs.package("PIL")
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="session")
def gallery(picture_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Where runs are made."""
    return Gallery(Path(), {"sft": picture_rows}, tmp_path_factory.mktemp("vision"))

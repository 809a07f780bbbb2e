"""What `train_parts` names is trained, resumed, written and read back; all else stays as it is.

Run: pytest tests/trainer/vision/test_trained_parts.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES
from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.families import training_of
from unisono.trainer.plan.task_requests import ExportRequest, ReadBackRequest, RequestedModel
from unisono.trainer.task import export, read_back
from unisono.trainer.training.optim import build_optimizers, rates_of

pytestmark = pytest.mark.processes  # pictures are decoded in them

PARTS = [["language"], ["projector"], ["vision"], ["language", "projector", "vision"]]
_OF_PROJECTOR = ("projector", "connector", "merger", "embed_vision", "image_newline")


def _part(name: str) -> str:
    if any(word in name for word in _OF_PROJECTOR):
        return "projector"
    return "vision" if any(word in name for word in ("vision", "visual")) else "language"


def _changed(before: Path, after: Path) -> set[str]:
    one, two = (
        {k: v for file in d.glob("*.safetensors") for k, v in load_file(file).items()}
        for d in (before, after)
    )
    assert one.keys() == two.keys()
    return {_part(name) for name in one if not torch.equal(one[name], two[name])}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_full_training_changes_these_parts_in_the_files_alone(
    gallery: Gallery, family: str, parts: list[str]
) -> None:
    plan = gallery.plan(family, adapter=None, train_parts=parts, optim={"lr": 1e-3})

    done = gallery.alone(plan)

    assert _changed(Path(plan.model.directory), done.directory / "model") == set(parts)
    result = read_back.run(ReadBackRequest(output_dir=done.directory), Reporter(None))
    assert result["compared"] == "logits"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [["vision"], ["language", "projector", "vision"]], ids="+".join)
def test_an_adapter_of_these_parts_is_read_back_and_merged(
    gallery: Gallery, family: str, parts: list[str], tmp_path: Path
) -> None:
    plan = gallery.plan(family, train_parts=parts)
    done = gallery.alone(plan)
    result = read_back.run(ReadBackRequest(output_dir=done.directory), Reporter(None))
    assert result["compared"] == "logits"

    request = ExportRequest(
        model=RequestedModel(str(done.directory)), out=str(tmp_path / "merged"), merge=True
    )
    export.run(request, Reporter(None))

    assert _changed(Path(plan.model.directory), tmp_path / "merged") == set(parts)
    counts = training_of(plan).load(plan, torch.device("cpu")).count_parts()
    assert {part for part, (trained, _) in counts.items() if trained} == set(parts)


def test_a_resumed_run_whose_vision_part_has_not_seen_a_picture_is_the_uninterrupted_one(
    gallery: Gallery, tmp_path: Path, picture_rows: Path
) -> None:
    rows = [json.loads(line) for line in picture_rows.read_text().splitlines()]
    text = [row for row in rows if not row.get("images")]
    seeing = next(row for row in rows if row.get("images"))
    seeing["images"] = [str(picture_rows.parent / name) for name in seeing["images"]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*text * 3, seeing]))
    more: dict[str, Any] = {
        "data": {"train": str(file), "packing": False},
        "train_parts": ["language", "projector", "vision"],
        "batch": {"global": 1, "micro": 1},
        "checkpoint": {"every": "1 steps", "keep": 99},
        "duration": "13 steps",
    }
    whole = gallery.alone(gallery.plan("llava", **more))
    plan = gallery.plan("llava", **more, resume=whole.directory / "checkpoints" / "step-00000001")

    resumed = gallery.alone(plan)

    assert resumed.losses == whole.losses[1:]
    for name, value in resumed.weights().items():
        assert torch.equal(value, whole.weights()[name]), name


def test_parts_have_learning_rates_of_their_own(gallery: Gallery) -> None:
    plan = gallery.plan(
        "llava",
        train_parts=["language", "projector", "vision"],
        optim={"lr": 1e-2, "part_lr": {"vision": 2e-6, "projector": 1e-4}},
    )
    loaded = training_of(plan).load(plan, torch.device("cpu"))

    (optimizer,) = build_optimizers(
        plan.config.optim, loaded.trainable, not_matrices=set(), rates=rates_of(plan.config, loaded)
    ).parts.values()

    names = {id(parameter): name for name, parameter in loaded.trainable.items()}
    rates = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    wanted = {"vision": 2e-6, "projector": 1e-4, "language": 1e-2}
    assert rates.keys() == loaded.trainable.keys()
    assert all(rate == wanted[_part(name)] for name, (rate, _) in rates.items())


def test_parts_without_pictures_are_refused(gallery: Gallery, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "what is red?"}, {"role": "assistant", "content": "a color"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")

    with pytest.raises(DataError, match="no row has a picture"):
        gallery.plan("llava", train_parts=["vision"], data={"train": str(tmp_path / "rows.jsonl")})


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"train_parts": ["projector"]}, "nothing is left for the adapter"),
        ({"train_parts": []}, "at least 1"),
        ({"train_parts": ["vision", "vision"]}, "named twice"),
        ({"optim": {"part_lr": {"vision": 1e-5}}}, "not trained"),
    ],
)
def test_contradictions_are_refused(gallery: Gallery, sections: dict[str, Any], why: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=why):
        gallery.plan("llava", **sections)

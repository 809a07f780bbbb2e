"""A run on rows with pictures: resumed, exported, read back and asked, with its processor and its
vision part.

Run: pytest tests/trainer/vision/test_runs.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.trainer.ranks.conftest import Done
from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES, draw, processor_of
from unisono.base.errors import UnisonoError
from unisono.base.events import Reporter
from unisono.trainer.families import training_of
from unisono.trainer.plan.task_requests import (
    ExportRequest,
    GenerateRequest,
    ReadBackRequest,
    RequestedModel,
)
from unisono.trainer.task import export, generation, read_back

pytestmark = pytest.mark.processes  # pictures are decoded in them

PROMPT = "what is this?"
_Runs = dict[str, Done]


@pytest.fixture(scope="module")
def runs(gallery: Gallery) -> _Runs:
    """A run of each family."""
    return {family: gallery.alone(gallery.plan(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def merged(runs: _Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The merged model of each family."""
    folder = tmp_path_factory.mktemp("merged")
    for family, done in runs.items():
        request = ExportRequest(
            model=RequestedModel(str(done.directory)), out=str(folder / family), merge=True
        )
        result = export.run(request, Reporter(None))
        assert result["read_back"] is not None
        assert result["read_back"]["compared"] == "logits"
    return {family: folder / family for family in runs}


def _inputs(directory: Path, picture: Any) -> Any:
    processor = processor_of(directory)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].float()  # Llama 4's are in bfloat16
    return inputs


def _logits(model: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model.eval()(**inputs).logits[0]
    return values


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(gallery: Gallery, runs: _Runs) -> None:
    stopped = runs["llava"].directory / "checkpoints" / "step-00000003"

    resumed = gallery.alone(gallery.plan("llava", resume=stopped))

    assert resumed.losses == runs["llava"].losses[3:]
    for name, value in resumed.weights().items():
        assert torch.equal(value, runs["llava"].weights()[name]), name


def test_other_pictures_give_other_losses(
    gallery: Gallery, runs: _Runs, picture_rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    for file in (picture_rows.parent / "pictures").iterdir():
        with Image.open(file) as image:
            Image.new("RGB", image.size, "gray").save(tmp_path / "pictures" / file.name)
    (tmp_path / "rows.jsonl").write_text(picture_rows.read_text())

    other = gallery.alone(gallery.plan("llava", data={"train": str(tmp_path / "rows.jsonl")}))

    assert all(abs(one - two) > 1e-4 for one, two in zip(other.losses, runs["llava"].losses, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_base_and_adapter_with_tower_and_processor(
    runs: _Runs, merged: dict[str, Path], family: str
) -> None:
    base = Path(runs[family].plan.model.directory)
    picture = draw("red", "circle")

    model, info = AutoModelForImageTextToText.from_pretrained(merged[family], output_loading_info=True)
    with_adapter = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(base), str(runs[family].directory / "adapter")
    )

    assert not any(info.values()), info
    inputs = _inputs(merged[family], picture)
    logits = _logits(model, inputs)
    torch.testing.assert_close(logits, _logits(with_adapter, _inputs(base, picture)), rtol=1e-4, atol=1e-5)
    plain = _logits(AutoModelForImageTextToText.from_pretrained(base), inputs)
    assert not torch.allclose(logits, plain, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_about_a_picture_is_that_of_transformers(
    runs: _Runs, merged: dict[str, Path], family: str, tmp_path: Path
) -> None:
    picture = draw("blue", "square", size=(70, 130))
    picture.save(tmp_path / "asked.png")
    model = AutoModelForImageTextToText.from_pretrained(merged[family]).eval()
    inputs = _inputs(merged[family], picture)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    wanted = processor_of(merged[family]).decode(ids, skip_special_tokens=True)

    for target in (merged[family], runs[family].directory):
        result = generation.run_generate(
            GenerateRequest(
                model=RequestedModel(str(target)),
                prompt=PROMPT,
                images=(str(tmp_path / "asked.png"),),
                max_tokens=12,
            ),
            Reporter(None),
        )
        assert result["answers"][0]["answer"] == wanted


def test_the_result_is_read_back_with_a_picture(runs: _Runs) -> None:
    done = runs["llava"]

    outputs = training_of(done.plan).read_outputs(done.directory / "result_logits.safetensors")
    result = read_back.run(ReadBackRequest(output_dir=done.directory), Reporter(None))

    assert outputs.pictures[2].tensors["pixel_values"].shape == (1, 3, 56, 56)  # type: ignore[attr-defined]
    assert result["compared"] == "logits"


def test_a_model_whose_processor_was_lost_is_not_read_back(runs: _Runs, tmp_path: Path) -> None:
    done = runs["llava"]
    out = tmp_path / "out"
    request = ExportRequest(model=RequestedModel(str(done.directory)), out=str(out), merge=True)
    export.run(request, Reporter(None))
    (out / "processor_config.json").unlink()
    written = training_of(done.plan).written(out, out, done.plan.config)

    with pytest.raises(UnisonoError, match="processor"):
        written.load(dtype="float32", device=torch.device("cpu"))

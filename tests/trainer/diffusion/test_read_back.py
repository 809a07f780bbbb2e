"""A LoRA of an image model is loaded again in diffusers and predicts what the trained model did.

Run: pytest tests/trainer/diffusion/test_read_back.py
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_pipeline
from tests.trainer.ranks.conftest import Done
from unisono.base.errors import IntegrityError
from unisono.base.events import Reporter
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.trainer.checkpoint.verify import write_model_manifest
from unisono.trainer.families.pictures.result_predictions import ResultPredictions
from unisono.trainer.plan.task_requests import (
    ExportRequest,
    ReadBackRequest,
    RequestedModel,
)
from unisono.trainer.task import export, read_back
from unisono.trainer.training.weights import entries_of

SILENT = Reporter(None)


def read(done: Done) -> dict[str, Any]:
    """As the task does after the ranks have ended."""
    return dict(read_back.run(ReadBackRequest(done.directory), SILENT))


def exported(target: Path, out: Path, *, step: int | None = None, **request: Any) -> dict[str, Any]:
    """The result of an export, with the reading back."""
    model = RequestedModel(str(target), step)
    return dict(export.run(ExportRequest(model=model, out=str(out), **request), SILENT))


@pytest.mark.parametrize(
    "sections",
    [{}, {"adapter": {"targets": "unet+text"}}, {"diffusion": {"shuffle_captions": True}}],
    ids=["unet", "text encoder", "captions encoded in each step"],
)
def test_the_result_predicts_what_the_trained_model_did(studio: Studio, sections: dict[str, Any]) -> None:
    found = read(studio.alone(studio.plan("diffusion", **sections)))
    assert found["compared"] == "predictions"
    assert found["differs_by"] < 2e-6
    assert found["tolerance"] == 1e-5


def test_a_text_encoder_of_few_positions_is_compared_up_to_them() -> None:
    from diffusers import UNet2DConditionModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = CLIPTextConfig(vocab_size=99, max_position_embeddings=16, **small)
    encoder = CLIPTextModel(settings).eval()
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8,), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
    )  # fmt: skip
    model = SimpleNamespace(unet=unet.eval(), text_encoder=encoder)
    found = ResultPredictions.of(model, dtype="float32", text_encoders=["text_encoder"])
    assert found.outputs[-1].shape == (1, 16, 32)
    assert found.difference(found.again(model, dtype="float32")) == 0


def test_sixteen_bits_are_compared_within_their_rounding(studio: Studio) -> None:
    found = read(studio.alone(studio.plan("diffusion", model={"dtype": "bfloat16"})))
    assert found["compared"] == "predictions"
    assert found["differs_by"] <= found["tolerance"] < 0.1


def test_both_text_encoders_of_sdxl_are_read_back(
    pictures_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pipeline = write_pipeline(tmp_path_factory.mktemp("xl"), xl=True)
    studio = Studio(pipeline, {"sft": pictures_dir}, tmp_path_factory.mktemp("studio-xl"))
    done = studio.alone(studio.plan("diffusion", adapter={"targets": "unet+text"}))
    assert read(done)["differs_by"] < 2e-6
    kohya = exported(done.directory, tmp_path_factory.mktemp("out") / "kohya", format="kohya")
    assert kohya["read_back"]["differs_by"] < 2e-6


@pytest.mark.parametrize("part", ["a matrix", "alpha"])
def test_a_file_of_other_weights_is_damage(done: Done, tmp_path: Path, part: str) -> None:
    run = Path(shutil.copytree(done.directory, tmp_path / "run"))
    file = run / "adapter" / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    if part == "alpha":
        settings = json.loads(metadata["lora_adapter_metadata"])
        settings["unet.lora_alpha"] *= 2
        metadata["lora_adapter_metadata"] = json.dumps(settings)
    else:
        name = next(name for name in tensors if name.endswith("lora_B.weight"))
        tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, metadata=metadata)
    (file.parent / MODEL_MANIFEST).unlink()
    write_model_manifest(file.parent, entries_of(file.parent))  # as if it had been written so
    with pytest.raises(IntegrityError) as caught:
        read_back.run(ReadBackRequest(run), SILENT)
    assert str(file) in str(caught.value)
    assert "predictions differ by" in str(caught.value.problems[0].why)
    assert file.is_file()


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 3], ids=["result", "checkpoint"])
@pytest.mark.parametrize(
    "request_",
    [{}, {"format": "kohya"}, {"format": "kohya", "half": True}],
    ids=["diffusers", "kohya", "half"],
)
def test_an_export_is_read_back(
    done: Done, tmp_path: Path, request_: dict[str, Any], step: int | None
) -> None:
    found = exported(done.directory, tmp_path / "out", step=step, **request_)["read_back"]
    assert found["compared"] == "predictions"
    assert found["differs_by"] < (1e-3 if request_.get("half") else 2e-6)


def test_the_weights_of_another_step_would_be_noticed(done: Done, tmp_path: Path) -> None:
    from unisono.trainer.task.picture_read_back import trained_predictions
    from unisono.trainer.task.target import find_target

    found = [trained_predictions(find_target(str(done.directory), step=step)) for step in (3, 6)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].difference(found[1]) > 1e-4


def test_a_file_without_its_run_is_compared_by_digests(done: Done, tmp_path: Path) -> None:
    file = done.directory / "adapter" / "pytorch_lora_weights.safetensors"
    found = exported(file, tmp_path / "out", format="kohya")["read_back"]
    assert found["compared"] == "digests"

"""LoRA files: diffusers and sd-scripts, there and back without loss, each read in a fresh process.

Run: pytest tests/trainer/diffusion/test_lora_files.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_pipeline
from tests.trainer.ranks.conftest import Done
from unisono.base.errors import ModelError
from unisono.base.events import Reporter
from unisono.trainer.families.pictures.lora_file import (
    dotted,
    from_sgm,
    read_lora,
    to_sgm,
    write_diffusers,
    write_kohya,
)
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel
from unisono.trainer.task import export

needs.package("diffusers")


def _export(target: Path, out: Path, format_: str, step: int | None = None) -> Path:
    model = RequestedModel(str(target), step)
    export.run(ExportRequest(model=model, out=str(out), format=format_), Reporter(None))
    (file,) = out.glob("*.safetensors")
    return file


def _in_a_fresh_process(file: Path) -> dict[str, Any]:
    """The bytes of each tensor in hex, and the metadata, as another program reads them."""
    code = (
        "import json, sys; from safetensors import safe_open; f = safe_open(sys.argv[1], 'pt')\nt = {k:"
        " f.get_tensor(k) for k in f.keys()}\nprint(json.dumps({'metadata': f.metadata(), 'tensors': {k:"
        " [str(v.dtype), list(v.shape), v.contiguous().numpy().tobytes().hex()] for k, v in t.items()}}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    read: dict[str, Any] = json.loads(found.stdout)
    return read


@pytest.fixture(scope="module")
def kohya(done: Done, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(done.directory, tmp_path_factory.mktemp("kohya") / "tile", "kohya")


def test_the_file_has_names_alphas_and_metadata_of_sd_scripts(kohya: Path, done: Done) -> None:
    tensors = load_file(kohya)
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_out_0"
    wanted = done.weights()[
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0.lora_A.weight"
    ]
    assert torch.equal(tensors[f"{name}.lora_down.weight"], wanted)
    assert float(tensors[f"{name}.alpha"]) == 2.0
    assert {key.split(".", 1)[1] for key in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    with safe_open(str(kohya), "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_network_module"] == "networks.lora"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "2")
    assert len(metadata["sshash_model_hash"]) == 64


def _steps_of(file: Path) -> tuple[str, str]:
    with safe_open(str(file), "pt") as opened:
        return opened.metadata()["ss_steps"], opened.metadata()["ss_max_train_steps"]


def test_the_file_has_the_step_of_its_weights(
    kohya: Path, done: Done, studio: Studio, tmp_path: Path
) -> None:
    assert _steps_of(kohya) == ("6", "6")
    assert _steps_of(_export(done.directory, tmp_path / "third", "kohya", step=3)) == ("3", "6")
    best = {"every": "3 steps", "keep": 9, "best": "eval_loss"}
    plan = studio.plan(
        "diffusion", data={"eval": 0.3}, eval={"every": "3 steps"}, checkpoint=best, optim={"lr": 100.0}
    )
    run = studio.alone(plan)
    losses = {line["step"]: line["eval_loss"] for line in run.metrics if "eval_loss" in line}
    assert min(losses, key=losses.__getitem__) == 3, "the weights that run away are not the best"
    assert _steps_of(_export(run.directory, tmp_path / "best", "kohya")) == ("3", "6")


def test_there_and_back_again_without_loss(kohya: Path, tmp_path: Path) -> None:
    back = _export(kohya, tmp_path / "back", "diffusers")
    again = _export(back.parent, tmp_path / "tile", "kohya")
    assert _in_a_fresh_process(again) == _in_a_fresh_process(kohya)


def test_half_precision_file_of_many_ranks_and_alphas_round_trips(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {}
    for number, layer in enumerate(("attn1_to_q", "attn1_to_k", "ff_net_0_proj", "attn2_to_v")):
        stem, rank = f"lora_unet_mid_block_attentions_0_transformer_blocks_0_{layer}", 2 + number % 2
        tensors[f"{stem}.lora_down.weight"] = torch.randn(rank, 8).half()
        tensors[f"{stem}.lora_up.weight"] = torch.randn(8, rank).half()
        tensors[f"{stem}.alpha"] = torch.tensor(0.3 + number).half()
    stem = "lora_te_text_model_encoder_layers_1_self_attn_q_proj"
    tensors[f"{stem}.lora_down.weight"] = torch.randn(2, 8).half()
    tensors[f"{stem}.lora_up.weight"] = torch.randn(8, 2).half()
    tensors[f"{stem}.alpha"] = torch.tensor(1.0).half()
    save_file(
        tensors, tmp_path / "other.safetensors", metadata={"ss_network_dim": "2", "ss_tag_frequency": "{}"}
    )
    file = read_lora(tmp_path / "other.safetensors")
    write_diffusers(file, tmp_path / "pytorch_lora_weights.safetensors")
    write_kohya(
        read_lora(tmp_path / "pytorch_lora_weights.safetensors"),
        tmp_path / "again.safetensors",
        dtype=None,
        more={},
    )
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name


def test_diffusers_reads_both_files_as_the_same_lora(kohya: Path, done: Done, pipeline_dir: Path) -> None:
    from diffusers import StableDiffusionPipeline

    from unisono.trainer.families.pictures.pipeline import quiet

    found = []
    for place in (kohya, done.directory / "adapter"):
        with quiet():
            pipeline = StableDiffusionPipeline.from_pretrained(pipeline_dir, safety_checker=None)
            pipeline.load_lora_weights(place)
        layers = {
            name: module for name, module in pipeline.unet.named_modules() if hasattr(module, "scaling")
        }
        found.append(
            {
                name: (
                    next(iter(m.scaling.values()))
                    * next(iter(m.lora_B.values())).weight.flatten(1)
                    @ next(iter(m.lora_A.values())).weight.flatten(1)
                )
                for name, m in layers.items()
            }
        )
    assert found[0].keys() == found[1].keys()
    for name, change in found[0].items():
        assert torch.equal(change, found[1][name]), name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("down_blocks.1.attentions.0.proj_in", "input_blocks.4.1.proj_in"),
        (
            "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.2",
            "input_blocks.8.1.transformer_blocks.9.ff.net.2",
        ),
        ("mid_block.attentions.0.proj_out", "middle_block.1.proj_out"),
        (
            "up_blocks.1.attentions.2.transformer_blocks.0.attn1.to_q",
            "output_blocks.5.1.transformer_blocks.0.attn1.to_q",
        ),
    ],
)
def test_layers_of_sdxl_have_the_names_of_its_original_unet(ours: str, theirs: str) -> None:
    assert to_sgm(ours, 2) == theirs
    assert from_sgm(theirs, 2) == ours
    assert dotted(theirs.replace(".", "_")) == theirs


def test_a_file_of_lycoris_is_refused(tmp_path: Path) -> None:
    save_file({"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": torch.zeros(2, 2), "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": torch.zeros(2, 2)}, tmp_path / "l.safetensors")  # fmt: skip
    with pytest.raises(ModelError, match="do not belong to a LoRA"):
        read_lora(tmp_path / "l.safetensors")


@pytest.mark.slow
def test_sdxl_trains_both_text_encoders_and_diffusers_loads_the_file(
    tmp_path_factory: pytest.TempPathFactory, pictures_dir: Path
) -> None:
    from diffusers import StableDiffusionXLPipeline

    from unisono.trainer.families.pictures.pipeline import quiet

    folder = tmp_path_factory.mktemp("xl")
    model = write_pipeline(folder / "pipeline", xl=True, prediction="v_prediction")
    studio = Studio(model, {"sft": pictures_dir}, folder)
    run = studio.alone(studio.plan("diffusion", adapter={"targets": "unet+text"}, duration="2 steps", diffusion={"bucket_step": 8, "min_side": 16, "min_snr_gamma": 5.0, "text_lr": 1e-3}))  # fmt: skip
    assert run.result["outcome"] == "completed"
    weights = run.weights()
    assert {name.partition(".")[0] for name in weights} == {"unet", "text_encoder", "text_encoder_2"}
    for part in ("text_encoder.", "text_encoder_2."):
        ups = [t for name, t in weights.items() if name.startswith(part) and "lora_B" in name]
        assert any(bool(tensor.any()) for tensor in ups), part
    with quiet():
        pipeline = StableDiffusionXLPipeline.from_pretrained(model)
        pipeline.load_lora_weights(run.directory / "adapter")
    for module in (pipeline.unet, pipeline.text_encoder, pipeline.text_encoder_2):
        scales = [m.scaling for m in module.modules() if hasattr(m, "scaling")]
        assert scales
        assert {value for scale in scales for value in scale.values()} == {0.5}
    again = _export(run.directory, folder / "kohya", "kohya")
    assert any(name.startswith("lora_te2_") for name in load_file(again))

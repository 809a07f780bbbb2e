"""Runs on pictures: the same losses for any micro batch and number of ranks, with caches or without, and after a resume.

Run: pytest tests/diffusion/test_training.py
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import needs
from tests.diffusion.conftest import Studio
from tests.ranks.conftest import Done

needs.package("diffusers")


def test_a_run_trains_and_leaves_the_file_of_diffusers(done: Done) -> None:
    assert done.result["outcome"] == "completed"
    assert len(done.losses) == 6
    tensors = load_file(done.directory / "adapter" / "pytorch_lora_weights.safetensors")
    assert any(name.endswith("attn2.to_k.lora_B.weight") and tensor.any() for name, tensor in tensors.items())


def test_plain_diffusers_loads_the_file_with_its_scale(done: Done, pipeline_dir: Path) -> None:
    from diffusers import StableDiffusionPipeline

    from unisono.diffusion.pipeline import quiet

    with quiet():
        pipeline = StableDiffusionPipeline.from_pretrained(pipeline_dir, safety_checker=None)
        pipeline.load_lora_weights(done.directory / "adapter")
    layers = [module for module in pipeline.unet.modules() if hasattr(module, "scaling")]
    assert {value for module in layers for value in module.scaling.values()} == {0.5}  # alpha 2, rank 4
    wanted = {name for name in done.weights() if name.endswith("lora_A.weight")}
    assert len(layers) == len(wanted)


@pytest.mark.parametrize("change", [{"batch": {"global": 6, "micro": 6}}, {"diffusion": {"cache": False}}])
def test_neither_micro_batch_nor_cache_changes_losses(
    studio: Studio, done: Done, change: dict[str, Any]
) -> None:
    common = {"bucket_step": 8, "min_side": 16, "max_side": 64}
    more = {"diffusion": common | change["diffusion"]} if "diffusion" in change else change
    other = studio.alone(studio.plan("diffusion", **more))
    assert other.losses == pytest.approx(done.losses, rel=1e-5)


def test_a_resumed_run_is_bit_equal(studio: Studio, done: Done) -> None:
    resumed = studio.alone(studio.plan("diffusion", resume=done.directory / "checkpoints" / "step-00000003"))
    assert resumed.losses == done.losses[3:]
    for name, tensor in done.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks_have_the_same_losses(studio: Studio, done: Done, world: int) -> None:
    (other,) = studio.together([studio.plan("diffusion", world=world)])
    assert other.losses == pytest.approx(done.losses, rel=1e-5)


def test_text_is_trained_without_the_code_of_image_models() -> None:
    code = (
        "import sys, unisono.worker.__main__, unisono.train.rank_run, unisono.task.data_tasks, unisono.task.export\n"
        "print([n for n in sys.modules if n.startswith(('diffusers', 'unisono.diffusion'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

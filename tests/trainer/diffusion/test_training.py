"""Runs on pictures: the same losses for any micro batch and number of ranks, with caches or
without, and after a resume.

Run: pytest tests/trainer/diffusion/test_training.py
"""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import front_server, needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.ranks.conftest import Done
from unisono.guard.supervise.child_process import child_environment

needs.package("diffusers")


def test_a_run_trains_and_leaves_the_file_of_diffusers(done: Done) -> None:
    assert done.result["outcome"] == "completed"
    assert len(done.losses) == 6
    tensors = load_file(done.directory / "adapter" / "pytorch_lora_weights.safetensors")
    assert any(name.endswith("attn2.to_k.lora_B.weight") and tensor.any() for name, tensor in tensors.items())


def test_plain_diffusers_loads_the_file_with_its_scale(done: Done, pipeline_dir: Path) -> None:
    from diffusers import StableDiffusionPipeline

    from unisono.trainer.families.pictures.pipeline import quiet

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


def test_the_pictures_of_a_step_have_one_size(studio: Studio, tmp_path: Path) -> None:
    plan = studio.plan("diffusion", batch={"global": 4, "micro": 2}, duration="2 epochs")
    studio.alone(plan.model_copy(update={"faults": {"write_rows": str(tmp_path)}}))
    entries = json.loads((Path(plan.data.cache_dir) / "pictures.json").read_text())["pictures"]
    size_of = {entry["name"]: tuple(entry["size"]) for entry in entries}
    steps: dict[int, list[str]] = defaultdict(list)
    for line in map(json.loads, (tmp_path / "rank-00000.jsonl").read_text().splitlines()):
        steps[line["step"]] += [name for name, _ in line["rows"]]
    names = [name for _, all_ in sorted(steps.items()) for name in all_]
    assert Counter(names[:20]) == Counter(names[20:])  # of the two epochs, each with every use once
    assert {len(all_) for all_ in steps.values()} == {4}
    uses = Counter(size_of[name] for name in names[:20])
    assert len(uses) >= 3
    pure = [step for step, all_ in steps.items() if len({size_of[name] for name in all_}) == 1]
    assert len(pure) >= 2 * sum(number // 4 for number in uses.values())


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


def test_text_is_trained_without_the_code_of_image_models(tmp_path: Path) -> None:
    assert _printed(
        tmp_path / "loaded.py",
        "import sys, unisono.trainer.worker.entry, unisono.trainer.training.rank_run, unisono.trainer.task.data_tasks, unisono.trainer.task.export\n"
        "print([n for n in sys.modules if n.startswith(('diffusers', 'unisono.trainer.families.pictures'))])",
    ) == (0, "[]")


def _printed(file: Path, program: str) -> tuple[int, str]:
    """Exit code and output of a process that is forked, as ranks are, from one import of all that
    they need.
    """
    file.write_text(program)
    command = [sys.executable, "-m", "tests.guard.integrations.launched_programs", str(file)]
    environment = child_environment(threads=1)
    with front_server.start_rank(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        found, _ = process.communicate()
    return process.returncode, found.strip()

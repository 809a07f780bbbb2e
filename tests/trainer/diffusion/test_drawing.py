"""Pictures that a run draws: equal to those of plain diffusers, with their settings; samples of
evaluations, and their strip.

Run: pytest tests/trainer/diffusion/test_drawing.py
"""

import json
from pathlib import Path

import numpy as np
import torch

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.ranks.conftest import Done
from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import DrawRequest
from unisono.trainer.task.picture_tasks import run_generate

needs.package("diffusers")
Image = needs.package("PIL.Image")


def test_a_picture_equals_that_of_plain_diffusers(done: Done, pipeline_dir: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    from unisono.trainer.families.pictures.pipeline import quiet

    request = DrawRequest(
        target=str(done.directory), prompt="a red tile", out=tmp_path, number=2, seed=0, steps=3
    )
    files = run_generate(request, Reporter(None))["files"]
    with quiet():
        pipeline = StableDiffusionPipeline.from_pretrained(pipeline_dir, safety_checker=None)
        pipeline.load_lora_weights(done.directory / "adapter")
        pipeline.set_progress_bar_config(disable=True)
        wanted = pipeline(
            "a red tile",
            num_inference_steps=3,
            width=32,
            height=32,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
    pictures = [np.asarray(Image.open(file)) for file in files]
    assert np.array_equal(pictures[0], np.asarray(wanted))
    assert not np.array_equal(pictures[0], pictures[1])  # of the next seed
    with Image.open(files[1]) as picture:
        settings = json.loads(picture.info["unisono"])
        assert "Seed: 1" in picture.info["parameters"]
    assert (settings["prompt"], settings["seed"], settings["steps"]) == ("a red tile", 1, 3)


def test_samples_are_drawn_at_each_evaluation_and_joined_in_a_strip(studio: Studio) -> None:
    plan = studio.plan(
        "diffusion",
        data={"eval": 2},
        eval={"every": "2 steps", "samples": 1},
        diffusion={"bucket_step": 8, "min_side": 16, "sample_steps": 2, "prompts": ["a blue tile"]},
        duration="4 steps",
    )
    run = studio.alone(plan)
    samples = run.directory / "samples"
    wanted = {f"step-{step:08d}-{prompt:03d}.png" for step in (0, 2, 4) for prompt in (0, 1)}
    assert {file.name for file in samples.iterdir()} == wanted | {"strip.png", "thumbnails"}
    drawn = {message["drawn"] for message in run.ended.of_kind(0, "sample")}
    assert {file.name for file in (samples / "thumbnails").iterdir()} == drawn
    with Image.open(samples / "strip.png") as strip:
        assert strip.width >= 3 * 32
    evaluations = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
    assert len(evaluations) == 2
    assert run.result["eval"]["loss_before"] != evaluations[-1]

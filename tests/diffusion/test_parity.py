"""The losses of the first five steps equal those of diffusers' recipe for LoRA written by hand with peft: same latents, noise and timesteps.

Run: pytest tests/diffusion/test_parity.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diffusion.conftest import Studio
from unisono.data.token_table import TokenTable
from unisono.diffusion.batches import PictureLoader, PictureUse
from unisono.plan import RunPlan, Stream
from unisono.train.run import stream_seed


def _uses(plan: RunPlan) -> list[list[PictureUse]]:
    """The uses of pictures in each step, by the loader of the run."""
    loader = PictureLoader(plan.config, Path(plan.data.cache_dir), directory=Path(plan.model.directory), device=torch.device("cpu"), timesteps=100)  # fmt: skip
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    stream, size = Stream(plan.data.train.sequences, plan.config.seed), plan.global_batch
    found = []
    for step in range(plan.total_steps):
        places = list(range(step * size, (step + 1) * size))
        pictures = [int(table.columns["picture"][table.rows_of(stream.at(place))[0]]) for place in places]
        found.append(
            loader.load(pictures, [stream_seed(plan.config.seed, "pictures", place) for place in places]).uses
        )
    return found


def _by_hand(plan: RunPlan, steps: list[list[PictureUse]]) -> list[float]:
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from peft import LoraConfig

    from unisono.diffusion.pipeline import quiet

    root = Path(plan.model.directory)
    with quiet():
        pipeline: Any = StableDiffusionPipeline.from_pretrained(root, safety_checker=None)
        torch.manual_seed(stream_seed(plan.config.seed, "weights"))
        unet = UNet2DConditionModel.from_pretrained(root / "unet")
    unet.requires_grad_(requires_grad=False)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=2, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    unet.train()
    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    optimizer = torch.optim.AdamW(
        [p for p in unet.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    losses = []
    for uses in steps:
        captions = [use.caption for use in uses]
        ids = pipeline.tokenizer(
            captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            states = pipeline.text_encoder(ids)[0]
        latents, noise = torch.stack([use.latents for use in uses]), torch.stack([use.noise for use in uses])
        timesteps = torch.tensor([use.timestep for use in uses])
        noisy = scheduler.add_noise(latents, noise, timesteps)
        predicted = unet(noisy, timesteps, states, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in unet.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_first_five_losses_equal_the_recipe_by_hand(
    pipeline_dir: Path, pictures_dir: Path, studio: Studio
) -> None:
    plan = studio.plan(
        "diffusion",
        data={"resolution": 32},
        diffusion={"buckets": False},
        adapter={"targets": [r"to_(q|k|v|out\.0)$"]},
        optim={"lr": 1e-2, "schedule": "constant", "warmup": "0 steps"},
        batch={"global": 4, "micro": 4},
        duration="5 steps",
    )
    run = studio.alone(plan)
    assert run.losses == pytest.approx(_by_hand(plan, _uses(plan)), rel=1e-5)
    assert len(set(run.losses)) == 5

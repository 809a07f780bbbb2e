"""What a run on pictures does in place of one on text: its model, its batches, its samples.

The room `diffusion` is imported inside these functions, so that training of text never loads it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unisono.data.token_table import TokenTable
from unisono.model.forward import Forward
from unisono.model.load import DTYPES, LoadedModel
from unisono.objectives.objective import Micro
from unisono.plan import RankPlace, RunPlan
from unisono.text import plain
from unisono.train import faults
from unisono.train.run import Run, stream_seed

if TYPE_CHECKING:
    from unisono.diffusion.drawing import Sampler
    from unisono.diffusion.latents import PictureLoader


def load_pictures_model(plan: RunPlan, place: RankPlace, device: torch.device) -> LoadedModel:
    """The denoiser with its LoRA."""
    from unisono.diffusion.pipeline import load_denoiser

    loaded = load_denoiser(plan.config, directory=Path(plan.model.directory), dtype=plan.dtype, device=device)
    faults.change_loaded(plan, place.rank, loaded)
    return loaded


def choose_pictures_forward(plan: RunPlan, loaded: LoadedModel) -> Forward:
    """The forward of a loaded denoiser."""
    from unisono.diffusion.pipeline import choose_picture_forward

    return choose_picture_forward(
        loaded,
        plan.config,
        directory=Path(plan.model.directory),
        dtype=plan.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
    )


def open_pictures(
    plan: RunPlan, forward: Forward, device: torch.device, *, draws: bool
) -> tuple["PictureLoader", "Sampler | None"]:
    """Loads the pictures of the run's table, and with `draws` draws samples."""
    from unisono.diffusion.drawing import Sampler
    from unisono.diffusion.latents import PictureLoader
    from unisono.diffusion.pipeline import PictureForward
    from unisono.diffusion.pipeline_files import read_pipeline

    assert isinstance(forward, PictureForward)
    directory = Path(plan.model.directory)
    loader = PictureLoader(
        plan.config,
        Path(plan.data.cache_dir),
        directory=directory,
        device=device,
        timesteps=len(forward.alphas),
    )
    if not draws:
        return loader, None
    return loader, Sampler(
        read_pipeline(directory), forward.denoiser, dtype=DTYPES[plan.dtype], device=device
    )


def with_pictures(
    run: Run, table: TokenTable, micro: Micro, units: Sequence[int], places: Sequence[int]
) -> Micro:
    """The micro batch with its pictures, of an image model.

    Args:
        run: the run.
        table: of the split.
        micro: of these units.
        units: rows of the table.
        places: where in the order of the run each of them is used; for evaluation the units themselves.
    """
    if run.pictures is None:
        return micro
    is_training = table.split == "train"
    name = "pictures" if is_training else "evaluation pictures"
    seeds = [stream_seed(run.plan.config.seed, name, place) for place in places]
    numbers = table.columns["picture"][list(units)].tolist()
    load = run.pictures.load if is_training else run.pictures.load_evaluation
    return replace(micro, pictures=load(numbers, seeds))


def draw_samples(run: Run, *, step: int) -> None:
    """Draws the sample pictures of an image model into the run's directory, and the strip of all of them. Only rank 0 does it."""
    from unisono.diffusion.drawing import save_strip

    prompts = sample_prompts(run)
    if not prompts or not run.group.is_main or run.sampler is None:
        return
    run.beats.enter("sample")
    folder, section, stopped = run.files.samples, run.plan.config.diffusion, False

    def is_over(number: int) -> bool:
        run.beats.enter("sample", done=number)
        return run.stop.outcome is not None

    for i, (prompt, size) in enumerate(prompts):
        file = folder / f"step-{step:08d}-{i:03d}.png"
        stopped = run.sampler.sample(
            prompt,
            size,
            section,
            file,
            seed=run.plan.config.seed + i,
            name=run.files.root.name,
            is_over=is_over,
        )
        if stopped:
            return
        run.report.send("sample", step=step, prompt=plain(prompt), text=str(file), reference="")
    save_strip(folder)


def sample_prompts(run: Run) -> list[tuple[str, tuple[int, int]]]:
    """The prompts of sample pictures with their sizes: those of the config, and captions of evaluation pictures."""
    config = run.plan.config
    assert run.pictures is not None
    found = [(prompt, run.pictures.usual_size) for prompt in config.diffusion.prompts]
    if run.eval_table is not None and config.eval.samples:
        numbers = run.eval_table.columns["picture"][: config.eval.samples].tolist()
        found += [run.pictures.sample(number) for number in numbers]
    return found

"""Pictures that a pipeline draws, as PNG files with their settings, and strips of them over the
steps of a run.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.base.errors import ModelError
from unisono.base.files import whole_file
from unisono.base.text import library_words
from unisono.trainer.config.sections import DiffusionSection
from unisono.trainer.families.family import Prompt
from unisono.trainer.families.pictures.latents import PictureLoader, Tensors
from unisono.trainer.families.pictures.picture_folders import need_pillow
from unisono.trainer.families.pictures.pipeline import (
    Denoiser,
    PictureForward,
    import_diffusers,
    load_component,
    quiet,
)
from unisono.trainer.families.pictures.pipeline_files import Pipeline, read_pipeline
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.load import DTYPES
from unisono.trainer.plan import RunPlan

_BORDER = 2  # pixels between the pictures of a strip


@dataclass(frozen=True)
class Drawing:
    """What to draw.

    Attributes:
        prompt: the text.
        seed: of the noise; the n-th picture of a prompt has the seed plus n.
        steps: denoising steps.
        guidance: scale of the classifier-free guidance.
        width: pixels.
        height: pixels.
        negative: what the picture should not show.
    """

    prompt: str
    seed: int
    steps: int
    guidance: float
    width: int
    height: int
    negative: str = ""


def open_pipeline(
    pipeline: Pipeline, *, dtype: torch.dtype, device: torch.device, lora: Path | None = None, **parts: Any
) -> Any:
    """diffusers' own pipeline, with the LoRA of a directory.

    Args:
        pipeline: its files.
        dtype: of the weights.
        device: where it draws.
        lora: the directory of a LoRA, which diffusers loads.
        parts: components that are in memory already.

    Raises:
        ModelError: if diffusers cannot load it.
    """
    diffusers = import_diffusers()
    kind = diffusers.StableDiffusionXLPipeline if pipeline.is_xl else diffusers.StableDiffusionPipeline
    more = {} if pipeline.is_xl else {"safety_checker": None, "requires_safety_checker": False}
    try:
        with quiet():
            loaded = kind.from_pretrained(
                str(pipeline.root),
                torch_dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                **more,
                **parts,
            )
            if lora is not None:
                loaded.load_lora_weights(str(lora))
            loaded.to(device)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError.of(
            "the pipeline cannot be loaded"
            if lora is None
            else "the pipeline cannot be loaded with this LoRA",
            where=str(lora or pipeline.root),
            why=library_words(error, library="diffusers"),
            fix="check that the LoRA belongs to this model"
            if lora
            else "copy the directory of the pipeline again",
        ) from error
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(opened: Any, drawing: Drawing, *, on_step: Callable[[int], None] = lambda _step: None) -> Any:
    """One picture, as `pipeline(prompt, generator=torch.Generator().manual_seed(seed), …)` of
    diffusers draws it.

    Args:
        opened: a pipeline of diffusers.
        drawing: what to draw.
        on_step: called after each denoising step with its number; what it raises ends the drawing.
    """

    def watch(_pipe: Any, step: int, _timestep: Any, values: Tensors) -> Tensors:
        on_step(step + 1)
        return values

    with quiet(), torch.no_grad():
        return opened(
            drawing.prompt,
            negative_prompt=drawing.negative or None,
            num_inference_steps=drawing.steps,
            guidance_scale=drawing.guidance,
            width=drawing.width,
            height=drawing.height,
            generator=torch.Generator().manual_seed(drawing.seed),
            callback_on_step_end=watch,
        ).images[0]


def save_picture(image: Any, path: Path, drawing: Drawing, *, model: str, scheduler: str) -> None:
    """Writes a PNG with its settings: `parameters` as A1111 reads them, and `unisono` as JSON."""
    from PIL.PngImagePlugin import PngInfo

    need_pillow()
    settings = {"model": model, "sampler": scheduler, **asdict(drawing)}
    info = PngInfo()
    negative = f"\nNegative prompt: {drawing.negative}" if drawing.negative else ""
    info.add_itxt(
        "parameters",
        f"{drawing.prompt}{negative}\nSteps: {drawing.steps}, Sampler: {scheduler}, CFG scale: {drawing.guidance:g},"
        f" Seed: {drawing.seed}, Size: {drawing.width}x{drawing.height}, Model: {model}",
    )
    info.add_itxt("unisono", json.dumps(settings, ensure_ascii=False, sort_keys=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        image.save(stream, format="PNG", pnginfo=info)


def save_strip(folder: Path) -> None:
    """One picture of all samples of a run: a row for each prompt, a column for each step; nothing
    if there are no samples.
    """
    image_module = need_pillow()
    files = sorted(folder.glob("step-*-*.png"))
    steps = sorted({file.name.split("-")[1] for file in files})
    prompts = sorted({file.stem.split("-")[2] for file in files})
    if not files:
        return
    pixels = {}
    for file in files:
        with image_module.open(file) as opened:
            pixels[file.stem] = np.asarray(opened.convert("RGB"))
    width = max(cell.shape[1] for cell in pixels.values()) + _BORDER
    height = max(cell.shape[0] for cell in pixels.values()) + _BORDER
    whole = np.zeros((height * len(prompts), width * len(steps), 3), dtype=np.uint8)
    for row, prompt in enumerate(prompts):
        for column, step in enumerate(steps):
            cell = pixels.get(f"step-{step}-{prompt}")
            if cell is not None:
                top, left = row * height, column * width
                whole[top : top + cell.shape[0], left : left + cell.shape[1]] = cell
    with whole_file(folder / "strip.png") as temporary, temporary.open("wb") as stream:
        image_module.fromarray(whole).save(stream, format="PNG")


class _DrawingEnded(Exception):  # noqa: N818 - no error
    """Raised in a step of a drawing that is not wanted any more."""


class PictureSampler:
    """Draws with the model that is being trained; the other parts of its pipeline are loaded when
    they are first needed, and kept.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        denoiser: Denoiser,
        pictures: PictureLoader,
        section: DiffusionSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pipeline, self._denoiser = pipeline, denoiser
        self._pictures, self._section = pictures, section
        self._dtype, self._device = dtype, device
        self._opened: Any = None

    def open(self) -> Any:
        """The pipeline."""
        if self._opened is None:
            parts = dict(zip(self._denoiser.text_names, self._denoiser.text_encoders, strict=True))
            vae = load_component(self._pipeline, "vae").to(self._device)
            self._opened = open_pipeline(
                self._pipeline,
                dtype=self._dtype,
                device=self._device,
                unet=self._denoiser.unet,
                vae=vae,
                **parts,
            )
        return self._opened

    def prompts(self, numbers: Sequence[int]) -> list[Prompt]:
        """What to draw, with its size: the prompts of the config, and captions of pictures."""
        captions = [self._pictures.sample(number) for number in numbers]
        return [*((prompt, self._pictures.usual_size) for prompt in self._section.prompts), *captions]

    def draw_all(
        self,
        prompts: list[Prompt],
        folder: Path,
        *,
        step: int,
        seed: int,
        name: str,
        is_over: Callable[[int], bool],
    ) -> Iterator[tuple[str, Path]]:
        """Draws a sample of each prompt into a file, and at the end the strip of all; gives prompts
        and files. Where `is_over`, called after each denoising step, is true, nothing more is
        written.
        """
        for i, (prompt, size) in enumerate(prompts):
            file = folder / f"step-{step:08d}-{i:03d}.png"
            if self._sample(prompt, size, file, seed=seed + i, name=name, is_over=is_over):
                return
            yield prompt, file
        save_strip(folder)

    def _sample(
        self,
        prompt: str,
        size: tuple[int, int],
        file: Path,
        *,
        seed: int,
        name: str,
        is_over: Callable[[int], bool],
    ) -> bool:
        """Draws one sample into a file; gives whether it was ended early, and then writes none."""
        opened, section = self.open(), self._section
        drawing = Drawing(prompt, seed, section.sample_steps, section.guidance, *size)

        def watch(step: int) -> None:
            if is_over(step):
                raise _DrawingEnded

        try:
            with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
                image = draw(opened, drawing, on_step=watch)
        except _DrawingEnded:
            return True
        save_picture(image, file, drawing, model=name, scheduler=type(opened.scheduler).__name__)
        return False


def open_contents(
    plan: RunPlan, forward: Forward, device: torch.device, *, draws: bool
) -> tuple[PictureLoader, PictureSampler | None]:
    """Loads the pictures of the run's table, and with `draws` draws samples."""
    assert isinstance(forward, PictureForward)
    directory = Path(plan.model.directory)
    loader = PictureLoader(
        plan.config,
        Path(plan.data.cache_dir),
        directory=directory,
        device=device,
        timesteps=len(forward.alphas),
        total_steps=plan.total_steps,
    )
    if not draws:
        return loader, None
    return loader, PictureSampler(
        read_pipeline(directory),
        forward.denoiser,
        loader,
        plan.config.diffusion,
        dtype=DTYPES[plan.dtype],
        device=device,
    )

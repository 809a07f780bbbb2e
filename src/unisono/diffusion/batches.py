"""The pictures of a micro batch: latents, noise and timestep of each, by the place of its use in the order of the run.

What is drawn for a use depends on the seed of its place alone, so it is the same for any micro batch and number of ranks, with caches or without.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.config.schema import RunConfig
from unisono.diffusion.caches import Kept, Places, encode_pixels, read_verified, text_states
from unisono.diffusion.picture_folders import read_pixels
from unisono.diffusion.pipeline import TextStates, load_component, needs_text_encoders
from unisono.diffusion.pipeline_files import read_pipeline
from unisono.diffusion.prepare import EVAL_NOISES, PICTURES
from unisono.files import read_json


@dataclass(frozen=True)
class PictureUse:
    """One use of a picture.

    Attributes:
        latents: (C, H, W) float32.
        noise: (C, H, W), that is added to them.
        timestep: from 0.
        caption: after dropout and shuffling.
        weight: of its loss.
        time_ids: original height and width, top and left of the cut, height and width: what SDXL is told of the picture.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    timestep: int
    caption: str
    weight: float
    time_ids: tuple[int, ...]


@dataclass(frozen=True)
class PictureBatch:
    """The uses of a micro batch, and the embeddings of captions that are in the cache."""

    uses: list[PictureUse]
    states: dict[str, dict[str, torch.Tensor]]

    def text(self, captions: Sequence[str], device: torch.device) -> TextStates:
        """The cached embeddings of captions."""
        return text_states([self.states[caption] for caption in captions], device)


class PictureLoader:
    """Loads the pictures of a run's table.

    Attributes:
        timesteps: number of timesteps of the noise schedule.
    """

    def __init__(
        self, config: RunConfig, table: Path, *, directory: Path, device: torch.device, timesteps: int
    ) -> None:
        body = read_json(table / PICTURES)
        self._config = config
        self._entries: list[dict[str, Any]] = body["pictures"]
        self._factor, self._is_xl = int(body["factor"]), bool(body["is_xl"])
        self._places = Places(table.parent.parent / "pictures", body["encoder"], body["text"])
        self._captions_are_cached = not needs_text_encoders(config)
        self._vae = None
        if not config.diffusion.cache:
            self._vae = load_component(read_pipeline(directory), "vae").to(device)
        self._kept = Kept()
        self.timesteps = timesteps

    def load(self, pictures: Sequence[int], seeds: Sequence[int]) -> PictureBatch:
        """The uses of some pictures of the table in training, one for each seed."""
        return self._batch(
            [self._use(self._entries[i], seed) for i, seed in zip(pictures, seeds, strict=True)]
        )

    def load_evaluation(self, pictures: Sequence[int], seeds: Sequence[int]) -> PictureBatch:
        """The uses of evaluation pictures: each with several noises at timesteps that are spread evenly, and its caption as it is."""
        uses = []
        for i, seed in zip(pictures, seeds, strict=True):
            for number in range(EVAL_NOISES):
                timestep = int((number + 0.5) * self.timesteps / EVAL_NOISES)
                uses.append(
                    self._use(self._entries[i], seed + number, timestep=timestep, share=1 / EVAL_NOISES)
                )
        return self._batch(uses)

    def sample(self, picture: int) -> tuple[str, tuple[int, int]]:
        """The caption and the size of a picture."""
        entry = self._entries[picture]
        return str(entry["caption"]), (int(entry["size"][0]), int(entry["size"][1]))

    @property
    def usual_size(self) -> tuple[int, int]:
        """The most frequent size of pictures."""
        sizes = [self.sample(i)[1] for i in range(len(self._entries))]
        return max(sizes, key=sizes.count)

    def _batch(self, uses: list[PictureUse]) -> PictureBatch:
        captions = {use.caption for use in uses} if self._captions_are_cached else ()
        return PictureBatch(uses, {caption: self._states(caption) for caption in captions})

    def _use(
        self, entry: dict[str, Any], seed: int, *, timestep: int | None = None, share: float = 1.0
    ) -> PictureUse:
        generator = torch.Generator().manual_seed(seed & ((1 << 63) - 1))
        moments = self._moments(entry)
        shape = moments["mean"].shape
        # All of these are drawn, also those that the config does not use: a use then draws the same for any of its settings.
        latents = moments["mean"] + moments["std"] * torch.randn(shape, generator=generator)
        drop, order = torch.rand(2, generator=generator).tolist()
        drawn = int(torch.randint(self.timesteps, (1,), generator=generator))
        noise = torch.randn(shape, generator=generator)
        offset = torch.randn((shape[0], 1, 1), generator=generator)
        section = self._config.diffusion
        caption = str(entry["caption"])
        if timestep is None:
            noise = noise + section.noise_offset * offset if section.noise_offset else noise
            caption = self._varied(caption, drop, order)
        width, height = entry["size"]
        scale = max(width / entry["original"][0], height / entry["original"][1])
        cut = [
            max(0, round(side * scale) - own) // 2
            for side, own in zip(entry["original"], (width, height), strict=True)
        ]
        return PictureUse(
            latents,
            noise,
            drawn if timestep is None else timestep,
            caption,
            share * (section.prior_weight if entry["prior"] else 1.0),
            (entry["original"][1], entry["original"][0], cut[1], cut[0], height, width),
        )

    def _varied(self, caption: str, drop: float, order: float) -> str:
        section = self._config.diffusion
        if drop < section.caption_dropout:
            return ""
        if not section.shuffle_captions:
            return caption
        parts = [part.strip() for part in caption.split(",")]
        kept, rest = parts[: section.keep_tokens], parts[section.keep_tokens :]
        generator = torch.Generator().manual_seed(math.floor(order * (1 << 24)))
        return ", ".join(kept + [rest[i] for i in torch.randperm(len(rest), generator=generator).tolist()])

    def _moments(self, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        size = int(entry["size"][0]), int(entry["size"][1])
        vae = self._vae
        if vae is not None:
            return encode_pixels(vae, read_pixels(Path(entry["path"]), entry["digest"], size))
        path = self._places.latents(entry["digest"], size)
        return self._kept.get(str(path), lambda: read_verified(path, entry["latent"]))

    def _states(self, caption: str) -> dict[str, torch.Tensor]:
        path = self._places.caption(caption)
        return self._kept.get(str(path), lambda: read_verified(path, None))

"""Denoising of latents: the mean squared error between the noise (or v) and what the UNet predicts
of it (arXiv:2006.11239).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import torch

from unisono.trainer.batches.contents import ContentsMicro
from unisono.trainer.batches.source import Counts, Micro
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DiffusionSection
from unisono.trainer.families.pictures.latents import PictureBatch, PictureUse
from unisono.trainer.families.pictures.pipeline import PictureForward, TextStates, trains_text
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.objective import Objective, Part


@dataclass(frozen=True)
class Diffusion(Objective):
    """The mean over pictures of their mean squared error. Pictures of one size share a forward.

    Attributes:
        settings: the weights of the loss.
        trains_text: whether captions are encoded with a gradient.
    """

    settings: DiffusionSection
    trains_text: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The objective with the settings of a run."""
        return cls(config.diffusion, trains_text=trains_text(config))

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; in evaluation mode without the weights of min-SNR."""
        del known
        assert isinstance(forward, PictureForward)
        assert isinstance(micro, ContentsMicro)
        pictures: PictureBatch = micro.contents
        groups: dict[torch.Size, list[PictureUse]] = defaultdict(list)
        for use in pictures.uses:
            groups[use.latents.shape].append(use)
        total = sum(self._errors(forward, pictures, uses).sum() for uses in groups.values())
        assert isinstance(total, torch.Tensor)
        return Part(total / counts.units, total.new_zeros(0))

    def _errors(self, forward: PictureForward, batch: PictureBatch, uses: list[PictureUse]) -> torch.Tensor:
        """(U,) float32: the weighted error of each use; all have the same size."""
        device = forward.alphas.device
        latents = torch.stack([use.latents for use in uses]).to(device)  # (U, C, H, W)
        noise = torch.stack([use.noise for use in uses]).to(device)
        timesteps = torch.tensor([use.timestep for use in uses], device=device)
        signal = forward.alphas[timesteps].sqrt()[:, None, None, None]
        spread = (1 - forward.alphas[timesteps]).sqrt()[:, None, None, None]
        time_ids = torch.tensor([use.time_ids for use in uses], device=device, dtype=torch.float32)
        text = self._text(forward, batch, [use.caption for use in uses])
        predicted = forward.predict(signal * latents + spread * noise, timesteps, text, time_ids)
        target = noise if forward.prediction == "epsilon" else signal * noise - spread * latents
        errors = (predicted - target).square().flatten(1).mean(1)
        weights = torch.tensor([use.weight for use in uses], device=device)
        return errors * weights * self._snr_weights(forward, timesteps)

    def _text(self, forward: PictureForward, batch: PictureBatch, captions: list[str]) -> TextStates:
        if forward.text is None:
            return batch.text(captions, forward.alphas.device)
        if not self.trains_text:
            with torch.no_grad(), forward._precision():  # noqa: SLF001 - the same precision as the UNet
                return forward.text.encode(captions)
        with forward._precision():  # noqa: SLF001
            return forward.text.encode(captions)

    def _snr_weights(self, forward: PictureForward, timesteps: torch.Tensor) -> torch.Tensor:
        """(U,): min(SNR, γ) / SNR for epsilon, min(SNR, γ) / (SNR + 1) for v (arXiv:2303.09556)."""
        gamma = self.settings.min_snr_gamma
        if gamma is None or not forward.loaded.model.training:
            return torch.ones_like(timesteps, dtype=torch.float32)
        alphas = forward.alphas[timesteps]
        snr = alphas / (1 - alphas)
        return snr.clamp(max=gamma) / (snr if forward.prediction == "epsilon" else snr + 1)

"""What an image model predicts for fixed inputs, by which its LoRA files are compared with the
model that was trained when they are loaded again.

Letters: C latent channels, S tokens of a caption, E width of its embeddings, P width of SDXL's
pooled state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unisono.base.files import whole_file
from unisono.trainer.model.result_outputs import ResultOutputs

_TIMESTEPS = (10, 40, 90)  # test pipelines have a hundred; UNets take any number
_SIDE = 16  # of latents: divisible by what the levels of any UNet halve
_TOKENS = 77
_TIME_IDS = 6


@dataclass(frozen=True)
class ResultPredictions(ResultOutputs):
    """The noise that a UNet predicts at a few timesteps, and the states of text encoders, each for
    inputs that its config determines.

    Attributes:
        outputs: of the UNet, (1, C, 16, 16) for each timestep; then of each text encoder, (1, S,
            E).
        text_encoders: their names.
    """

    name: ClassVar[str] = "predictions"

    text_encoders: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, *, dtype: str, text_encoders: Sequence[str] = ()) -> Self:
        """Computes them.

        Args:
            model: has the attribute `unet`, and those that `text_encoders` names: our denoiser, or
                a pipeline of diffusers.
            dtype: of the computation.
            text_encoders: e.g. `text_encoder_2`; the UNet does not depend on them, as its inputs
                are fixed.
        """
        with torch.no_grad():
            outputs = [_predict(model.unet, timestep) for timestep in _TIMESTEPS]
            outputs += [_encode(getattr(model, name)) for name in text_encoders]
        return cls([one.float().cpu() for one in outputs], dtype, tuple(text_encoders))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            OSError, SafetensorError: if it cannot be read.
        """
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            encoders = tuple(filter(None, metadata["text_encoders"].split(",")))
            count = len(_TIMESTEPS) + len(encoders)
            outputs = [file.get_tensor(f"output-{i}") for i in range(count)]
            return cls(outputs, metadata["dtype"], encoders)

    def write(self, path: Path) -> None:
        """Writes them to a file, which replaces an earlier one.

        Raises:
            OSError: if the storage fails.
        """
        tensors = {f"output-{i}": one.contiguous() for i, one in enumerate(self.outputs)}
        with whole_file(path, mode=0o600) as temporary:
            save_file(
                tensors,
                temporary,
                metadata={"dtype": self.dtype, "text_encoders": ",".join(self.text_encoders)},
            )

    def again(self, model: Any, *, dtype: str) -> Self:
        """Those of a model for the same inputs."""
        return type(self).of(model, dtype=dtype, text_encoders=self.text_encoders)


def _predict(unet: Any, timestep: int) -> torch.Tensor:
    config, device, dtype = unet.config, unet.device, unet.dtype
    random = torch.Generator().manual_seed(timestep)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    more: dict[str, dict[str, torch.Tensor]] = {}
    latents = noise(1, config.in_channels, _SIDE, _SIDE)
    states = noise(1, _TOKENS, config.cross_attention_dim)
    if config.addition_embed_type == "text_time":  # SDXL
        pooled = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        time_ids = torch.full((1, _TIME_IDS), float(_SIDE), device=device, dtype=dtype)
        more["added_cond_kwargs"] = {"text_embeds": noise(1, pooled), "time_ids": time_ids}
    times = torch.tensor([timestep], device=device)
    predicted: torch.Tensor = unet(latents, times, encoder_hidden_states=states, return_dict=False, **more)[0]
    return predicted


def _encode(encoder: Any) -> torch.Tensor:
    count = min(_TOKENS, encoder.config.max_position_embeddings)
    ids = torch.arange(count, device=encoder.device)[None] % encoder.config.vocab_size
    states: torch.Tensor = encoder(ids, output_hidden_states=True).hidden_states[-1]
    return states

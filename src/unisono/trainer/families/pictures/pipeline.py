"""The parts of a Stable Diffusion pipeline as torch modules: encoders for the caches, and the
denoiser that is trained.

Letters: U pictures, C latent channels, H and W latent positions, S tokens of a caption, E width of
its embeddings.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import ModelError
from unisono.base.text import library_words
from unisono.trainer.config.model_sections import AdapterSection
from unisono.trainer.config.schema import RunConfig, picture_settings
from unisono.trainer.families.pictures.captions import captions_vary
from unisono.trainer.families.pictures.pipeline_files import Pipeline, read_pipeline
from unisono.trainer.model.files import check_tokenizer_files
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.kernels import KEEP_UP_TO, Kernels
from unisono.trainer.model.load import DTYPES, LIBRARY_ERRORS, LoadedModel

BLOCK = "Transformer2DModel"
"""The class of the UNet's blocks whose layers `targets: unet` adapts, as sd-scripts does."""

_TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_CHUNK = 75  # tokens of a caption that a text encoder reads at a time, without the two at begin and end


@dataclass(frozen=True)
class TextStates:
    """What the UNet sees of captions.

    Attributes:
        states: (U, S, E).
        pooled: (U, P); None but for SDXL.
    """

    states: torch.Tensor
    pooled: torch.Tensor | None = None

    def to(self, device: torch.device) -> "TextStates":
        """The states on a device."""
        return TextStates(self.states.to(device), None if self.pooled is None else self.pooled.to(device))


class Denoiser(torch.nn.Module):
    """The UNet, and the text encoders where they are needed, as one module with named parts."""

    def __init__(self, unet: Any, text_encoders: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.unet = unet
        for name, encoder in text_encoders.items():
            self.add_module(name, encoder)
        self.text_names = tuple(text_encoders)

    @property
    def text_encoders(self) -> list[Any]:
        """The text encoders, in order; none if embeddings come from the cache."""
        return [getattr(self, name) for name in self.text_names]

    def get_input_embeddings(self) -> None:
        """None: no part of it is an embedding that optimizers have to know."""
        return

    def get_output_embeddings(self) -> None:
        """None, likewise."""
        return


@dataclass
class PictureForward(Forward):
    """The denoiser with its noise schedule."""

    alphas: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    """(T,) float32: the share of the signal at each timestep, ᾱ."""
    prediction: str = "epsilon"
    text: "TextEncoding | None" = None
    """Encodes captions that are not in the cache; None if all are."""

    @property
    def denoiser(self) -> Denoiser:
        """The model."""
        base = self.loaded.base
        assert isinstance(base, Denoiser)
        return base

    def predict(
        self, noisy: torch.Tensor, timesteps: torch.Tensor, text: TextStates, time_ids: torch.Tensor
    ) -> torch.Tensor:
        """(U, C, H, W) float32, with a gradient: what the UNet predicts for noisy latents of one
        size.

        Args:
            noisy: (U, C, H, W).
            timesteps: (U,) int64.
            text: of the captions.
            time_ids: (U, 6), the size that SDXL is told.
        """
        more: dict[str, dict[str, torch.Tensor]] = {}
        if text.pooled is not None:
            more["added_cond_kwargs"] = {"text_embeds": text.pooled, "time_ids": time_ids}
        with self._precision():
            unet = self.denoiser.unet
            states = text.states if self.autocast else text.states.to(unet.dtype)
            prediction: torch.Tensor = unet(
                noisy, timesteps, encoder_hidden_states=states, return_dict=False, **more
            )[0]
        return prediction.float()

    @contextmanager
    def ready_to_generate(self) -> Iterator[Denoiser]:
        """A context in which the denoiser computes in the run's precision."""
        with self._precision():
            yield self.denoiser

    def _precision(self) -> Any:
        if not self.autocast:
            return super()._precision()
        return torch.autocast(next(self.denoiser.parameters()).device.type, dtype=self.dtype)


class FullAttention(torch.autograd.Function):
    """Attention of all queries to all keys in bfloat16 on a CPU: q (B, N, D), k and v (B, M, D) →
    (B, N, D), for B pictures × heads.

    The probabilities (B, N, M) are kept for the backward, in bfloat16. torch's function recomputes
    them, in float32, and takes 1.5 × as long.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kernels: Kernels
    ) -> torch.Tensor:
        """Also takes the factor of the scores."""
        scaled = q * scale
        p = torch.bmm(scaled, k.transpose(1, 2))
        kernels.softmax(p, first=k.shape[1], group=1, window=None)
        ctx.save_for_backward(scaled, k, v, p)
        ctx.settings = (scale, kernels)
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v."""
        scaled, k, v, p = ctx.saved_tensors
        scale, kernels = ctx.settings
        d_scores = torch.bmm(grad, v.transpose(1, 2))
        kernels.softmax_backward(d_scores, p, first=k.shape[1], group=1, window=None)
        d_q = torch.bmm(d_scores, k).mul_(scale)
        return (
            d_q,
            torch.bmm(d_scores.transpose(1, 2), scaled),
            torch.bmm(p.transpose(1, 2), grad),
            None,
            None,
        )


def fast_attention(kernels: Kernels) -> Any:
    """What a UNet of diffusers calls for its attention: `FullAttention` where it can, else torch's
    function.
    """
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Processor(AttnProcessor2_0):
        def __call__(
            self,
            attn: Any,
            hidden_states: torch.Tensor,
            encoder_hidden_states: Any = None,
            *more: Any,
            **named: Any,
        ) -> torch.Tensor:
            context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            if (
                context.shape[1] > KEEP_UP_TO
                or _is_special(attn, hidden_states)
                or any(value is not None for value in (*more, *named.values()))
            ):
                return super().__call__(attn, hidden_states, encoder_hidden_states, *more, **named)
            shape, heads = hidden_states.shape, attn.heads
            q, k, v = (
                _split(layer(x), heads)
                for layer, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
            )
            with torch.autocast("cpu", enabled=False):
                mixed = FullAttention.apply(q, k, v, q.shape[2] ** -0.5, kernels)
            out = attn.to_out[0](mixed.unflatten(0, (-1, heads)).transpose(1, 2).reshape(*shape[:2], -1))
            return attn.to_out[1](out)

    return Processor()


def _is_special(attn: Any, hidden_states: torch.Tensor) -> bool:
    """Whether an attention layer does more than those of Stable Diffusion's UNets."""
    norms = (attn.spatial_norm, attn.group_norm, attn.norm_cross, attn.norm_q, attn.norm_k)
    return (
        hidden_states.ndim != 3
        or any(map(bool, norms))
        or attn.residual_connection
        or attn.rescale_output_factor != 1
    )


def _split(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """(U, N, H · D) → (U · H, N, D)."""
    return tensor.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)


def load_component(pipeline: Pipeline, name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the pipeline: unet, vae, text_encoder or text_encoder_2.

    Raises:
        ModelError: if diffusers or transformers cannot load it.
    """
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    diffusers = import_diffusers()
    kinds = {
        "unet": diffusers.UNet2DConditionModel,
        "vae": diffusers.AutoencoderKL,
        "text_encoder": CLIPTextModel,
        "text_encoder_2": CLIPTextModelWithProjection,
    }
    key = "torch_dtype" if name in ("unet", "vae") else "dtype"
    try:
        with quiet():
            component = kinds[name].from_pretrained(
                str(pipeline.root / name), use_safetensors=True, local_files_only=True, **{key: dtype}
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError.of(
            f"the {name} of the pipeline cannot be loaded",
            where=str(pipeline.root / name),
            why=library_words(error),
            fix="check that its config.json belongs to its weights",
        ) from error
    component.requires_grad_(requires_grad=False)
    return component.eval()


def import_diffusers() -> Any:
    """The package diffusers, with the code of its models."""
    import diffusers
    from diffusers import UNet2DConditionModel  # noqa: F401 - loads the code of models and quantizers

    return diffusers


@contextmanager
def quiet() -> Iterator[None]:
    """A context without warnings and progress bars of diffusers and transformers."""
    from transformers.utils import logging

    diffusers_logging = import_diffusers().utils.logging
    before = logging.get_verbosity(), diffusers_logging.get_verbosity()
    for one in (logging, diffusers_logging):
        one.set_verbosity_error()
        one.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before[0])
        diffusers_logging.set_verbosity(before[1])


def load_tokenizers(pipeline: Pipeline) -> list[Any]:
    """The tokenizer of each text encoder.

    Raises:
        ModelError: if transformers cannot read one.
    """
    from transformers import CLIPTokenizer

    tokenizers = []
    for name in pipeline.text_encoders:
        folder = pipeline.root / name.replace("text_encoder", "tokenizer")
        check_tokenizer_files(folder)
        try:
            with quiet():
                tokenizers.append(CLIPTokenizer.from_pretrained(str(folder), local_files_only=True))
        except Exception as error:  # tokenizers raises a plain Exception for an invalid tokenizer.json
            if type(error) is not Exception and not isinstance(error, LIBRARY_ERRORS):
                raise
            raise ModelError.of(
                "the tokenizer of the pipeline cannot be read",
                where=str(folder),
                why=library_words(error),
                fix="copy its files again",
            ) from error
    return tokenizers


@dataclass
class TextEncoding:
    """Tokenizers and text encoders of a pipeline, and which of their layers the UNet sees."""

    tokenizers: list[Any]
    encoders: list[Any]
    is_xl: bool
    clip_skip: int | None
    max_tokens: int = _CHUNK

    def encode(self, captions: Sequence[str]) -> TextStates:
        """The embeddings of captions, as the pipeline of diffusers computes them.

        A caption is cut at `max_tokens`. If these are more than 75, it is encoded in parts of 75,
        each between begin and end, and the UNet sees one begin, all parts, and one end, as in
        sd-scripts. The pooled state is that of the first part.
        """
        tokens = [
            token_ids(tokenizer, captions, length=token_limit(tokenizer, self.max_tokens))
            for tokenizer in self.tokenizers
        ]
        if self.max_tokens == _CHUNK:
            return self._encode(tokens)
        parts = []
        for first in range(1, self.max_tokens + 1, _CHUNK):
            ids = [
                torch.cat([all_[:, :1], all_[:, first : first + _CHUNK], all_[:, -1:]], dim=1)
                for all_ in tokens
            ]
            parts.append(self._encode(ids))
        inner = [part.states[:, 1:-1] for part in parts]
        states = torch.cat([parts[0].states[:, :1], *inner, parts[-1].states[:, -1:]], dim=1)
        return TextStates(states, parts[0].pooled)

    def _encode(self, tokens: Sequence[torch.Tensor]) -> TextStates:
        """The states of tokens (U, 77), for each text encoder."""
        parts, pooled = [], None
        for all_ids, encoder in zip(tokens, self.encoders, strict=True):
            ids = all_ids.to(encoder.device)
            hidden = self.is_xl or self.clip_skip is not None
            out = encoder(ids, output_hidden_states=hidden)
            if not self.is_xl:
                states = out.last_hidden_state
                if self.clip_skip not in (None, 1):
                    states = _final_norm(encoder)(out.hidden_states[-self.clip_skip])
            else:  # SDXL was trained on the layer before the last, without the last norm
                states = out.hidden_states[-(self.clip_skip or 2)]
                pooled = out[0]
            parts.append(states)
        return TextStates(torch.cat(parts, dim=-1), pooled if self.is_xl else None)


def _final_norm(encoder: Any) -> Any:
    """The norm after the last layer: transformers 5 has it in the encoder itself, earlier versions
    in `text_model`.
    """
    body = getattr(encoder, "text_model", encoder)
    return body.final_layer_norm


def text_encoding(config: RunConfig, pipeline: Pipeline, encoders: list[Any]) -> TextEncoding:
    """How the captions of a run are encoded."""
    section = config.diffusion
    return TextEncoding(
        load_tokenizers(pipeline), encoders, pipeline.is_xl, section.clip_skip, section.max_tokens
    )


def token_limit(tokenizer: Any, max_tokens: int) -> int:
    """The tokens of a caption that are read, with begin and end: `diffusion.max_tokens`, of which
    75 are what any text encoder reads.
    """
    return max_tokens + 2 if max_tokens != _CHUNK else int(tokenizer.model_max_length)


def token_ids(tokenizer: Any, captions: Sequence[str], *, length: int) -> torch.Tensor:
    """(U, S) int64: the tokens of captions, padded or cut to `length`."""
    encoded = tokenizer(
        list(captions),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    return encoded.input_ids


def load_denoiser(config: RunConfig, *, directory: Path, dtype: str, device: torch.device) -> LoadedModel:
    """The UNet with its LoRA, and the text encoders if they are trained or captions change in each
    step.

    Frozen weights are in `dtype`, trained ones in float32. The caller must seed torch's global
    generator.

    Raises:
        ModelError: if a part cannot be loaded, or no layer matches the targets.
    """
    assert config.adapter is not None
    pipeline = read_pipeline(directory)
    unet = load_component(pipeline, "unet", dtype=DTYPES[dtype])
    encoders = {}
    if needs_text_encoders(config):
        encoders = {
            name: load_component(pipeline, name, dtype=DTYPES[dtype]) for name in pipeline.text_encoders
        }
    denoiser = Denoiser(unet, encoders).to(device)
    add_lora(denoiser, config.adapter)
    trainable = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
    for parameter in trainable.values():
        parameter.data = parameter.data.float()
    count = sum(p.numel() for p in denoiser.parameters())
    return LoadedModel(denoiser, denoiser, load_tokenizers(pipeline)[0], trainable, count)


def needs_text_encoders(config: RunConfig) -> bool:
    """Whether captions are encoded in each step: they change, or the text encoders are trained, or
    nothing is cached.
    """
    vary = any(captions_vary(section) for section in picture_settings(config))
    return trains_text(config) or vary or not config.diffusion.cache


def trains_text(config: RunConfig) -> bool:
    """Whether the text encoders are trained."""
    return config.adapter is not None and config.adapter.targets == "unet+text"


def add_lora(denoiser: Denoiser, section: AdapterSection) -> None:
    """Puts LoRA layers on the UNet, and on the text encoders with `targets: unet+text`.

    Raises:
        ModelError: if no layer matches.
    """
    names = unet_targets(denoiser.unet, section)
    if not names:
        raise ModelError.of(
            "no layer of the UNet matches adapter.targets",
            where="adapter.targets",
            why=f"it is {section.targets}",
            fix="use `unet`, or a pattern such as to_q",
        )
    denoiser.unet.add_adapter(lora_config(section, names), adapter_name="default")
    if section.targets == "unet+text":
        for encoder in denoiser.text_encoders:
            layers = [n for n, m in encoder.named_modules() if n.rpartition(".")[2] in _TEXT_LAYERS]
            encoder.add_adapter(lora_config(section, layers), adapter_name="default")


def unet_targets(unet: Any, section: AdapterSection) -> list[str]:
    """Names of the UNet's layers that get a LoRA: linear layers and 1 × 1 convolutions."""
    layers = {
        name: module
        for name, module in unet.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and not _is_wide(module)
    }
    if isinstance(section.targets, list):
        return [name for name in layers if any(re.search(pattern, name) for pattern in section.targets)]
    blocks = [name for name, module in unet.named_modules() if type(module).__name__ == BLOCK]
    return [name for name in layers if any(name.startswith(f"{block}.") for block in blocks)]


def _is_wide(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1)


def lora_config(section: AdapterSection, names: list[str]) -> Any:
    """peft's settings for these layers."""
    from peft import LoraConfig

    alpha = int(section.alpha) if section.alpha == int(section.alpha) else section.alpha
    return LoraConfig(r=section.rank, lora_alpha=alpha, lora_dropout=section.dropout, target_modules=names)


def choose_picture_forward(
    loaded: LoadedModel, config: RunConfig, *, directory: Path, dtype: str, gradient_checkpointing: bool
) -> PictureForward:
    """The forward of a loaded denoiser, whose LoRA layers compute weight and adapter in one product
    where they can.
    """
    from unisono.trainer.model.layers import kernels_of, speed_up_lora

    pipeline = read_pipeline(directory)
    denoiser = loaded.base
    if gradient_checkpointing:
        denoiser.unet.enable_gradient_checkpointing()
        if trains_text(config):
            for encoder in denoiser.text_encoders:
                encoder.gradient_checkpointing_enable({"use_reentrant": False})
    speed_up_lora(denoiser)
    kernels = kernels_of(next(denoiser.parameters()).device) if dtype == "bfloat16" else None
    if isinstance(kernels, Kernels):
        denoiser.unet.set_attn_processor(fast_attention(kernels))
    with quiet():
        folder = str(pipeline.root / "scheduler")
        scheduler = import_diffusers().DDPMScheduler.from_pretrained(folder, local_files_only=True)
    device = next(denoiser.parameters()).device
    section = config.diffusion
    text = None
    if denoiser.text_encoders:
        text = text_encoding(config, pipeline, denoiser.text_encoders)
    return PictureForward(
        loaded,
        "padded",
        "model",
        DTYPES[dtype],
        dtype != "float32",
        "",
        alphas=scheduler.alphas_cumprod.to(device=device, dtype=torch.float32),
        prediction=section.prediction if section.prediction != "auto" else pipeline.prediction,
        text=text,
    )

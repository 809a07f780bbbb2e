"""LoRA files of image models: `pytorch_lora_weights.safetensors` of diffusers, and the file of
sd-scripts that A1111 and ComfyUI read.

A LoRA has a *part* (unet, text_encoder, text_encoder_2), and in it for each layer two matrices,
*down* (A, the rank's rows) and *up* (B), and an alpha: the layer's output changes by up·down ·
alpha / rank.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from unisono.base.errors import ModelError
from unisono.base.files import write_json
from unisono.base.text import library_words
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.state import bytes_of, dtype_name
from unisono.trainer.checkpoint.writer import TensorPart, write_tensor_file
from unisono.trainer.families.pictures.pipeline_files import Pipeline
from unisono.trainer.plan import RunPlan

LORA_FILE = "pytorch_lora_weights.safetensors"
SETTINGS_FILE = "unisono_lora.json"
"""Beside the weights: what the LoRA was trained on."""

_SETTINGS = "lora_adapter_metadata"  # the key under which diffusers stores ranks and alphas
_FLAT = "text_model."  # transformers 5 has no such module in CLIPTextModel; diffusers accepts both names
_PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
_XL_PREFIXES = _PREFIXES | {"text_encoder": "lora_te1"}
_TEXT_LAYERS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


@dataclass(frozen=True)
class Layer:
    """The LoRA of one layer; `alpha` None: equal to the rank."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        """alpha, as a number."""
        return float(self.rank) if self.alpha is None else self.alpha


@dataclass
class LoraFile:
    """The contents of a LoRA file.

    Attributes:
        layers: by part and name of the layer as diffusers has it, e.g.
            `unet.down_blocks.0.attentions.0.proj_in`.
        metadata: of the file, without what describes ranks and alphas.
        sgm: layers per block of the UNet if the file of sd-scripts uses the names of the original
            SDXL UNet; 0: those of diffusers.
    """

    layers: dict[str, Layer]
    metadata: dict[str, str] = field(default_factory=dict)
    sgm: int = 0


def lora_of(tensors: Mapping[str, torch.Tensor], alpha: float) -> LoraFile:
    """The LoRA among the parameters of a denoiser, by their names there."""
    layers = {}
    for name, down in tensors.items():
        match = re.fullmatch(r"(unet|text_encoder|text_encoder_2)\.(.*)\.lora_A\.default\.weight", name)
        if match is None:
            continue
        part, layer = match[1], match[2]
        if part != "unet" and not layer.startswith(_FLAT):
            layer = _FLAT + layer
        up = tensors[name.replace(".lora_A.", ".lora_B.")]
        layers[f"{part}.{layer}"] = Layer(down.detach().cpu(), up.detach().cpu(), alpha)
    return LoraFile(layers)


def write_lora(
    denoiser: torch.nn.Module, plan: RunPlan, directory: Path, *, step: int
) -> dict[str, FileEntry]:
    """Writes the weights that a run has at a step: the file for diffusers, and what it was trained
    on.

    Raises:
        OSError: if the storage fails.
    """
    assert plan.config.adapter is not None
    file = lora_of(dict(denoiser.named_parameters()), plan.config.adapter.alpha)
    entry = write_diffusers(file, directory / LORA_FILE)
    write_json(
        directory / SETTINGS_FILE,
        {
            "schema": 1,
            "base_model": plan.config.model.path,
            "model_type": plan.model.model_type,
            "rank": plan.config.adapter.rank,
            "alpha": plan.config.adapter.alpha,
            "resolution": plan.config.data.resolution,
            "seed": plan.config.seed,
            "steps": step,
            "pictures": plan.data.train.rows,
            "prediction": plan.config.diffusion.prediction,
        },
    )
    return {LORA_FILE: entry}


def write_diffusers(file: LoraFile, path: Path) -> FileEntry:
    """Writes a file that `pipeline.load_lora_weights` takes as it is, with ranks and alphas in its
    metadata.
    """
    settings: dict[str, object] = {}
    for part in _PREFIXES:
        own = {
            n.removeprefix(f"{part}."): layer for n, layer in file.layers.items() if n.startswith(f"{part}.")
        }
        if own:
            settings |= {f"{part}.{key}": value for key, value in _settings(part, own).items()}
    tensors = {}
    for name, layer in file.layers.items():
        tensors[f"{name}.lora_A.weight"] = layer.down
        tensors[f"{name}.lora_B.weight"] = layer.up
    kept = file.metadata | ({"unisono_sgm": str(file.sgm)} if file.sgm else {})
    return _write(path, tensors, {"format": "pt", _SETTINGS: json.dumps(settings, sort_keys=True), **kept})


def _settings(part: str, layers: Mapping[str, Layer]) -> dict[str, object]:
    """peft's settings of a part: the most frequent rank and alpha, and patterns for the others."""
    ranks, alphas = [layer.rank for layer in layers.values()], [layer.scale for layer in layers.values()]
    rank, alpha = max(set(ranks), key=ranks.count), max(set(alphas), key=alphas.count)
    names = {name: name.removeprefix(_FLAT) for name in layers}
    return {
        "r": rank,
        "lora_alpha": _number(alpha),
        "target_modules": sorted(layers)
        if part == "unet"
        else sorted({n.rpartition(".")[2] for n in layers}),
        "rank_pattern": {names[n]: layer.rank for n, layer in layers.items() if layer.rank != rank},
        "alpha_pattern": {
            names[n]: _number(layer.scale) for n, layer in layers.items() if layer.scale != alpha
        },
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def read_lora(path: Path) -> LoraFile:
    """The contents of a file of either kind.

    Raises:
        ModelError: if it is none, or has layers of other kinds.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ModelError.of(
            f"{path.name} cannot be read",
            where=str(path),
            why=library_words(error),
            fix="copy the file again",
        ) from error
    if any(".lora_down." in name for name in tensors):
        return _from_kohya(tensors, metadata, path)
    return _from_diffusers(tensors, metadata, path)


def _from_diffusers(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> LoraFile:
    settings = json.loads(metadata.pop(_SETTINGS, "{}"))
    metadata.pop("format", None)
    sgm = int(metadata.pop("unisono_sgm", "0"))
    layers = {}
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        full = name.removesuffix(".lora_A.weight")
        part, _, layer = full.partition(".")
        if part not in _PREFIXES or f"{full}.lora_B.weight" not in tensors:
            break
        known = settings.get(f"{part}.alpha_pattern") or {}
        alpha = known.get(layer.removeprefix(_FLAT), settings.get(f"{part}.lora_alpha"))
        layers[full] = Layer(down, tensors[f"{full}.lora_B.weight"], None if alpha is None else float(alpha))
    if not layers or 2 * len(layers) != len(tensors):
        raise ModelError.of(
            f"{path.name} is not a LoRA of a Stable Diffusion model",
            where=str(path),
            why="its tensors are not pairs of lora_A and lora_B, nor of lora_down and lora_up",
            fix="use a file that unisono, diffusers or sd-scripts wrote",
        )
    return LoraFile(layers, metadata, sgm)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> FileEntry:
    parts = [
        TensorPart(name, dtype_name(tensor.dtype), tuple(tensor.shape), partial(_bytes, tensor))
        for name, tensor in tensors.items()
    ]
    return write_tensor_file(path, parts, metadata=metadata)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())


# ---- the file of sd-scripts

_WORDS = (
    "down_blocks",
    "mid_block",
    "up_blocks",
    "attentions",
    "transformer_blocks",
    "resnets",
    "downsamplers",
    "upsamplers",
    "attn1",
    "attn2",
    "to_q",
    "to_k",
    "to_v",
    "to_out",
    "proj_in",
    "proj_out",
    "ff",
    "net",
    "proj",
    "time_emb_proj",
    "time_embedding",
    "add_embedding",
    "linear_1",
    "linear_2",
    "conv_in",
    "conv_out",
    "conv_shortcut",
    "conv1",
    "conv2",
    "conv",
    "text_model",
    "encoder",
    "layers",
    "self_attn",
    "mlp",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "fc1",
    "fc2",
    "text_projection",
    "input_blocks",
    "middle_block",
    "output_blocks",
)
"""Names of modules; the file of sd-scripts joins them by `_`."""
_TOKEN = re.compile("(" + "|".join(sorted(_WORDS, key=len, reverse=True)) + r"|\d+)(?:_|$)")


def dotted(name: str) -> str | None:
    """A layer's name with dots, from one with `_` only; None if it has unknown parts."""
    parts, place = [], 0
    while place < len(name):
        match = _TOKEN.match(name, place)
        if match is None:
            return None
        parts.append(match[1])
        place = match.end()
    return ".".join(parts)


def to_sgm(layer: str, per_block: int) -> str:
    """The name of a UNet's layer in the original SDXL UNet, which sd-scripts trains."""
    match = re.match(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.*)$", layer)
    if match is not None:
        number = int(match[2]) * (per_block + 1) + int(match[3])
        block = f"input_blocks.{number + 1}" if match[1] == "down" else f"output_blocks.{number}"
        return f"{block}.1.{match[4]}"
    return re.sub(r"^mid_block\.attentions\.0\.", "middle_block.1.", layer)


def from_sgm(layer: str, per_block: int) -> str:
    """The opposite of `to_sgm`."""
    match = re.match(r"(input|output)_blocks\.(\d+)\.1\.(.*)$", layer)
    if match is not None:
        number = int(match[2]) - (match[1] == "input")
        block, place = divmod(number, per_block + 1)
        side = "down" if match[1] == "input" else "up"
        return f"{side}_blocks.{block}.attentions.{place}.{match[3]}"
    return re.sub(r"^middle_block\.1\.", "mid_block.attentions.0.", layer)


_SGM_PER_BLOCK = 2  # of SDXL, the only model whose files have these names


def _from_kohya(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> LoraFile:
    layers: dict[str, Layer] = {}
    unknown, sgm = [], 0
    parts = {prefix: part for table in (_PREFIXES, _XL_PREFIXES) for part, prefix in table.items()}
    for name, down in tensors.items():
        stem, _, kind = name.partition(".")
        if kind != "lora_down.weight":
            if kind not in ("lora_up.weight", "alpha"):
                unknown.append(name)
            continue
        prefix = next((p for p in sorted(parts, key=len, reverse=True) if stem.startswith(f"{p}_")), None)
        layer = dotted(stem.removeprefix(f"{prefix}_")) if prefix is not None else None
        up = tensors.get(f"{stem}.lora_up.weight")
        if prefix is None or layer is None or up is None:
            unknown.append(name)
            continue
        if layer.startswith(("input_blocks", "middle_block", "output_blocks")):
            sgm = _SGM_PER_BLOCK
            layer = from_sgm(layer, sgm)
        alpha = tensors.get(f"{stem}.alpha")
        layers[f"{parts[prefix]}.{layer}"] = Layer(down, up, None if alpha is None else float(alpha))
    if unknown or not layers:
        raise ModelError.of(
            f"{path.name} has tensors that do not belong to a LoRA for Stable Diffusion, e.g."
            f" {(unknown or ['none'])[0]}",
            where=str(path),
            why="LoHa, LoKr and other modules of LyCORIS, and LoRAs of other models, are not supported",
            fix="use a file of networks.lora of sd-scripts",
        )
    metadata.pop("format", None)
    return LoraFile(layers, metadata, sgm)


def write_kohya(
    file: LoraFile, path: Path, *, dtype: torch.dtype | None, more: Mapping[str, str]
) -> FileEntry:
    """Writes the file of sd-scripts, with its hashes in the metadata.

    Args:
        file: the LoRA.
        path: a new file.
        dtype: of the tensors; None: as they are.
        more: metadata that the file does not have yet.
    """
    prefixes = (
        _XL_PREFIXES if file.sgm or any(n.startswith("text_encoder_2.") for n in file.layers) else _PREFIXES
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in file.layers.items():
        part, _, inner = name.partition(".")
        inner = to_sgm(inner, file.sgm) if part == "unet" and file.sgm else inner
        stem = f"{prefixes[part]}_{inner.replace('.', '_')}"
        kind = dtype or layer.down.dtype
        alpha = torch.tensor(layer.scale, dtype=kind)
        tensors[f"{stem}.lora_down.weight"] = layer.down.to(kind)
        tensors[f"{stem}.lora_up.weight"] = layer.up.to(kind)
        # An alpha that the dtype cannot hold would be another scale.
        tensors[f"{stem}.alpha"] = alpha if float(alpha) == layer.scale else torch.tensor(layer.scale)
    metadata = {**more, **file.metadata}
    metadata |= _hashes(tensors, {key: value for key, value in metadata.items() if key.startswith("ss_")})
    return _write(path, tensors, metadata)


def _hashes(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, str]:
    """The two hashes that A1111 shows: of the file with the metadata `ss_…` only, after its header,
    and of a part of it.
    """
    from safetensors.torch import save

    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata)
    begin = 8 + int.from_bytes(content[:8], "little")
    legacy = hashlib.sha256(content[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return {"sshash_model_hash": hashlib.sha256(content[begin:]).hexdigest(), "sshash_legacy_hash": legacy}


def kohya_metadata(
    file: LoraFile, plan: RunPlan | None, pipeline: Pipeline | None, *, step: int | None
) -> dict[str, str]:
    """The metadata that sd-scripts writes and other tools show, as far as they are known; `step` is
    that of the weights.
    """
    ranks, alphas = (
        {f(layer) for layer in file.layers.values()} for f in (lambda o: o.rank, lambda o: o.scale)
    )
    metadata = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(max(ranks)) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": f"{max(alphas):g}" if len(alphas) == 1 else "Dynamic",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora"
        if file.sgm
        else "stable-diffusion-v1/lora",
    }
    if pipeline is not None:
        is_v2 = pipeline.unet.get("cross_attention_dim") == 1024 and not pipeline.is_xl
        version = "sdxl_base_v1-0" if pipeline.is_xl else "sd_v2" if is_v2 else "sd_v1"
        metadata |= {"ss_base_model_version": version, "ss_v2": str(is_v2)}
        metadata["modelspec.architecture"] = f"{_ARCHITECTURES[version]}/lora"
    if plan is not None:
        config, train = plan.config, plan.data.train
        assert config.adapter is not None
        section = config.diffusion
        metadata |= {
            "ss_sd_model_name": Path(config.model.path).name,
            "ss_learning_rate": str(config.optim.lr),
            "ss_text_encoder_lr": str(section.text_lr or config.optim.lr),
            "ss_network_dropout": str(config.adapter.dropout),
            "ss_num_train_images": str(train.sequences),
            "ss_num_epochs": str(round(plan.total_sequences / max(1, train.sequences))),
            "ss_max_train_steps": str(plan.total_steps),
            "ss_steps": str(step or plan.total_steps),
            "ss_batch_size_per_device": str(plan.micro_batch),
            "ss_total_batch_size": str(plan.global_batch),
            "ss_lr_scheduler": config.optim.schedule,
            "ss_optimizer": "torch.optim.adamw.AdamW",
            "ss_mixed_precision": {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[plan.dtype],
            "ss_seed": str(config.seed),
            "ss_clip_skip": str(section.clip_skip),
            "ss_min_snr_gamma": str(section.min_snr_gamma),
            "ss_noise_offset": str(section.noise_offset or None),
            "ss_caption_dropout_rate": str(section.caption_dropout),
            "ss_shuffle_caption": str(section.shuffle_captions),
            "ss_keep_tokens": str(section.keep_tokens),
            "ss_flip_aug": str(section.flip),
            "ss_prior_loss_weight": str(section.prior_weight),
            "ss_cache_latents": str(section.cache),
            "ss_enable_bucket": str(section.buckets),
            "ss_resolution": str(config.data.resolution),
            "ss_output_name": Path(plan.output_dir).name,
        }
    return metadata


_ARCHITECTURES = {
    "sd_v1": "stable-diffusion-v1",
    "sd_v2": "stable-diffusion-v2-512",
    "sdxl_base_v1-0": "stable-diffusion-xl-v1-base",
}

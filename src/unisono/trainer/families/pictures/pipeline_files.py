"""The files of a Stable Diffusion pipeline in diffusers' layout: where they are, what they are,
their digests.

Without torch.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from unisono.base.errors import ModelError
from unisono.base.files import open_plain
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.directory import is_hub_id, locate_model
from unisono.trainer.model.files import (
    indexed_files,
    odd_weights,
    read_contents,
    read_json_object,
    read_safetensors_header,
)
from unisono.trainer.plan.run_plan import ModelFacts

PIPELINES = {
    "StableDiffusionPipeline": "stable-diffusion",
    "StableDiffusionXLPipeline": "stable-diffusion-xl",
}
"""Class in model_index.json, and `model_type` of ModelFacts."""

INDEX = "model_index.json"
WEIGHTS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}
"""Component, and the stem of its weight file."""

_COUNTS = ("layers_per_block", "transformer_layers_per_block", "num_hidden_layers")
_WIDTHS = ("block_out_channels", "cross_attention_dim", "hidden_size", "intermediate_size", "vocab_size")
_MOST_TIMES = 100_000  # a thousand are usual, each with a number in memory

_LORA_MODULES = (".attn1.", ".attn2.", ".ff.", ".proj_in.", ".proj_out.")


ComponentConfig = dict[str, Any]  # config.json of a component, with diffusers' keys


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's directory.

    Attributes:
        root: the directory with model_index.json.
        kind: of PIPELINES.
        unet: the UNet's config.
        vae: the VAE's config.
        prediction: epsilon or v_prediction, as the scheduler's config says.
    """

    root: Path
    kind: str
    unet: ComponentConfig
    vae: ComponentConfig
    prediction: str

    @property
    def is_xl(self) -> bool:
        """Whether it is SDXL, with two text encoders."""
        return self.kind == PIPELINES["StableDiffusionXLPipeline"]

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The components that read captions."""
        return ("text_encoder", "text_encoder_2") if self.is_xl else ("text_encoder",)

    @property
    def factor(self) -> int:
        """Pixels of a picture's side for each position of its latents."""
        return int(2 ** (len(self.vae["block_out_channels"]) - 1))

    @property
    def resolution(self) -> int:
        """The side of the pictures that it was trained on."""
        size = self.unet.get("sample_size") or 64
        return int(size if isinstance(size, int) else max(size)) * self.factor

    def weights(self, component: str) -> list[Path]:
        """The weight files of a component.

        Raises:
            ModelError: if there are none.
        """
        folder, stem = self.root / component, WEIGHTS[component]
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            return indexed_files(index)
        single = folder / f"{stem}.safetensors"
        if not single.is_file():
            raise ModelError.of(
                f"the pipeline has no weights of its {component}",
                where=str(single),
                why="only safetensors files are read: loading a pickle can run arbitrary code",
                fix="copy the file, or save the pipeline again with diffusers (pipeline.save_pretrained)",
            )
        return [single]


def locate_pipeline(config: RunConfig) -> Pipeline:
    """The pipeline that `model.path` names: a directory, or a hub id, which is downloaded.

    Raises:
        ModelError: if there is none, or it is of another kind.
    """
    named = config.model.path
    directory = Path(named).expanduser()
    if directory.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        raise ModelError.of(
            f"{directory.name} is a pickle",
            where=f"model.path: {directory}",
            why="loading a pickle can run arbitrary code",
            fix="use the .safetensors file of the model, or its directory in the layout of diffusers",
        )
    if not directory.exists() and is_hub_id(named):
        directory = locate_model(named, config.model.revision)
    if not (directory / INDEX).is_file():
        raise ModelError.of(
            f"{named} is not an image model" if directory.exists() else f"there is no image model {named}",
            where=f"model.path: {directory}",
            why=f"there is no {INDEX}, which a pipeline of diffusers has",
            fix="set model.path to the directory of a Stable Diffusion pipeline (diffusers: pipeline.save_pretrained)",
        )
    return read_pipeline(directory.resolve())


def read_pipeline(root: Path) -> Pipeline:
    """The pipeline in a directory.

    Raises:
        ModelError: if it is not a Stable Diffusion pipeline, or a config is missing.
    """
    name = str(_read(root / INDEX).get("_class_name"))
    if name not in PIPELINES:
        raise ModelError.of(
            f"the pipeline is a {name}",
            where=str(root / INDEX),
            why="LoRA training is for Stable Diffusion 1.x, 2.x and SDXL",
            fix=f"use a pipeline of the class {' or '.join(PIPELINES)}",
        )
    unet, vae = _read(root / "unet" / "config.json"), _read(root / "vae" / "config.json")
    if unet.get("in_channels", 4) != vae.get("latent_channels", 4):
        raise ModelError.of(
            f"the UNet has {unet.get('in_channels')} input channels, but latents have"
            f" {vae.get('latent_channels', 4)}",
            where=str(root / "unet" / "config.json"),
            why="inpainting and similar models see more than the noisy picture",
            fix="use the base model",
        )
    scheduler = _read(root / "scheduler" / "scheduler_config.json")
    pipeline = Pipeline(root, PIPELINES[name], unet, vae, str(scheduler.get("prediction_type", "epsilon")))
    _refuse_numbers(
        root / "scheduler" / "scheduler_config.json", scheduler, {"num_train_timesteps": _MOST_TIMES}
    )
    for component in ("unet", "vae", *pipeline.text_encoders):
        headers = [header for file in pipeline.weights(component) for header in read_safetensors_header(file)]
        limits = dict.fromkeys(_COUNTS, len(headers))
        limits |= dict.fromkeys(_WIDTHS, max(max(header.shape, default=1) for header in headers))
        _refuse_numbers(root / component / "config.json", _read(root / component / "config.json"), limits)
    return pipeline


def _refuse_numbers(file: Path, settings: Mapping[str, object], limits: dict[str, int]) -> None:
    """Refuses numbers, alone or in a list, for which far more memory would be taken than the
    weights need.
    """
    for name, most in limits.items():
        value = settings.get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not 0 < number <= most:
                raise ModelError.of(
                    f"{name} in the config of the pipeline's {file.parent.name} is {number}",
                    where=str(file),
                    why=f"it is at most {most} for the weights there",
                    fix="copy the directory of the pipeline again",
                )


def _read(file: Path) -> ComponentConfig:
    try:
        return read_json_object(file, fix="copy it again")
    except FileNotFoundError:
        raise ModelError.of(
            f"the pipeline lacks {file.parent.name}/{file.name}",
            where=str(file),
            fix="copy the whole directory of the pipeline again",
        ) from None


def all_files(pipeline: Pipeline) -> list[tuple[str, Path]]:
    """Label and path of each file that determines what the pipeline computes."""
    labels = [INDEX, "unet/config.json", "vae/config.json", "scheduler/scheduler_config.json"]
    for name in pipeline.text_encoders:
        tokenizer = name.replace("text_encoder", "tokenizer")
        labels += [f"{name}/config.json"]
        labels += [
            f"{tokenizer}/{file}"
            for file in (
                "tokenizer.json",
                "vocab.json",
                "merges.txt",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "added_tokens.json",
            )
        ]
    paths = [(label, pipeline.root / label) for label in labels]
    for component in ("unet", "vae", *pipeline.text_encoders):
        paths += [(f"{component}/{file.name}", file) for file in pipeline.weights(component)]
    return [(label, path) for label, path in paths if path.is_file()]


@dataclass(frozen=True)
class PipelineDigests:
    """Digests of a pipeline's contents.

    Attributes:
        all: of all files.
        encoder: of the VAE, which makes latents.
        text: of tokenizers and text encoders, which make embeddings.
        tokenizer: of the tokenizers' files.
    """

    all: str
    encoder: str
    text: str
    tokenizer: str


def inspect_pipeline(pipeline: Pipeline) -> tuple[ModelFacts, PipelineDigests]:
    """The figures of a pipeline, and its digests. Reads all weights once.

    Raises:
        ModelError: if a file is missing or damaged, or weights are NaN or infinite.
    """
    digests: dict[str, str] = {}
    odd = {}
    for label, path in all_files(pipeline):
        if path.suffix == ".safetensors":
            contents = read_contents(path)
            digests[label] = contents.digest
            if contents.odd:
                odd[path] = contents.odd
        else:
            digests[label] = sha256_of(path)
    if odd:
        raise odd_weights(odd)
    headers = [header for file in pipeline.weights("unet") for header in read_safetensors_header(file)]
    matrices = [
        header.shape
        for header in headers
        if len(header.shape) >= 2 and any(word in header.name for word in _LORA_MODULES)
    ]
    files = [
        file for component in ("unet", "vae", *pipeline.text_encoders) for file in pipeline.weights(component)
    ]
    total = sum(prod(header.shape) for file in files for header in read_safetensors_header(file))
    channels = list(pipeline.unet["block_out_channels"])
    facts = ModelFacts(
        directory=str(pipeline.root),
        model_type=pipeline.kind,
        parameters=total,
        hidden_size=channels[0],
        layers=len(channels),
        intermediate_size=channels[-1],
        vocab_size=1,
        linear_parameters=sum(map(prod, matrices)),
        linear_in_out=sum(shape[0] + shape[1] for shape in matrices),
        weight_bytes=sum(file.stat().st_size for file in files),
        digest=digest_parts(digests),
    )

    def part(*folders: str) -> str:
        return digest_parts({label: value for label, value in digests.items() if label.startswith(folders)})

    return facts, PipelineDigests(
        facts.digest, part("vae/"), part("text_encoder", "tokenizer"), part("tokenizer")
    )


def sha256_of(file: Path) -> str:
    """The digest of a regular file of any size."""
    with open_plain(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_parts(parts: dict[str, str]) -> str:
    """The digest of several digests by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

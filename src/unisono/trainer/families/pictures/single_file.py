"""A whole Stable Diffusion model in one `.safetensors` file of the original layout: converted once,
into the cache, to a pipeline of diffusers.

diffusers maps the names of tensors, as in its `from_single_file`; the configs, which it would
download, are made from the shapes of the tensors. What such a file does not have is its tokenizer.
Only the conversion needs torch.
"""

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from unisono.base.errors import ModelError, UnfitError, storage_failure
from unisono.base.files import read_object, write_json
from unisono.base.text import library_words
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.pictures.pipeline_files import (
    INDEX,
    PIPELINES,
    Pipeline,
    PipelineDigests,
    digest_parts,
    inspect_pipeline,
    locate_pipeline,
    read_pipeline,
    sha256_of,
)
from unisono.trainer.model.directory import from_hub, is_hub_id
from unisono.trainer.model.files import read_contents, read_safetensors_header
from unisono.trainer.plan.run_plan import ModelFacts

TOKENIZER = "openai/clip-vit-large-patch14"
"""The hub id whose vocabulary all Stable Diffusion models use, as sd-scripts does; a single file
has no tokenizer.
"""

_TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_CLIP = {
    False: "cond_stage_model.transformer.text_model.",
    True: "conditioner.embedders.0.transformer.text_model.",
}
_OPEN_CLIP = {False: "cond_stage_model.model.", True: "conditioner.embedders.1.model."}
"""Text encoders of OpenAI's CLIP (1.x and the first of SDXL) and of OpenCLIP (2.x and the second of
SDXL), by whether it is SDXL.
"""
_UNREAD = ("position_ids", "logit_scale")
_HEAD = 64  # width of an attention head, but for the UNet of 1.x, which has eight heads
_CONVERSION = 1
"""Changes when the same file would be converted to something else."""

Shapes = Mapping[str, tuple[int, ...]]


def single_file(config: RunConfig) -> Path | None:
    """The file that `model.path` names, if it is a single file with a whole model."""
    path = Path(config.model.path).expanduser()
    return path.resolve() if path.suffix == ".safetensors" and path.is_file() else None


def is_whole_model(file: Path) -> bool:
    """Whether a safetensors file has parts of a whole model in the original layout; a LoRA has
    none.

    Raises:
        ModelError: if it is not a safetensors file.
    """
    return any(header.name.startswith((_UNET, _VAE)) for header in read_safetensors_header(file))


def tokenizer_of_file(named: str | None) -> Path:
    """The directory of the tokenizer for a single file: `model.tokenizer`, else that of CLIP in the
    hub's cache or on the hub.

    Raises:
        ModelError: if there is none.
    """
    named = named or TOKENIZER
    try:
        if is_hub_id(named):
            return from_hub(named, None, key="model.tokenizer", patterns=_TOKENIZER_FILES)
        if Path(named).expanduser().is_dir():
            return Path(named).expanduser().resolve()
        raise ModelError.of(f"there is no directory {named}", why="the path does not exist")
    except ModelError as error:
        raise ModelError.of(
            "the tokenizer of the model is missing",
            where="model.tokenizer",
            why=f"a single file has none, and {error.problems[0].what}: {error.problems[0].why}",
            fix=(
                "set model.tokenizer to a directory with vocab.json and merges.txt of CLIP, or to a pipeline"
                " of the same kind of model"
            ),
        ) from error


def open_files(config: RunConfig, *, cache_dir: Path) -> tuple[Pipeline, ModelFacts, PipelineDigests]:
    """The pipeline of a config with its figures and digests; a single file is converted unless that
    has been done before.

    Raises:
        ModelError: if there is none, or it cannot be read or converted.
        UnfitError: if the cache gives back something else than was written.
    """
    file = single_file(config)
    if file is None:
        pipeline = locate_pipeline(config)
        return pipeline, *inspect_pipeline(pipeline)
    return open_single_file(
        file, tokenizer=config.model.tokenizer, prediction=config.diffusion.prediction, cache_dir=cache_dir
    )


def open_single_file(
    file: Path, *, tokenizer: str | None, prediction: str, cache_dir: Path
) -> tuple[Pipeline, ModelFacts, PipelineDigests]:
    """The pipeline of a single file with its figures and digests; it is converted unless that has
    been done before.

    Args:
        file: the safetensors file.
        tokenizer: as `model.tokenizer`.
        prediction: as `diffusion.prediction`.
        cache_dir: where the pipeline is kept.

    Raises:
        ModelError: if it cannot be read or converted.
        UnfitError: if the cache gives back something else than was written.
    """
    shapes = {header.name: header.shape for header in read_safetensors_header(file)}
    kind, prediction = _kind_of(file, shapes), _prediction_of(prediction, file, shapes)
    vocabulary_dir = tokenizer_of_file(tokenizer)
    vocabulary = [
        path
        for path in sorted(vocabulary_dir.rglob("*"))
        if path.suffix in (".json", ".txt") and path.is_file()
    ]
    key = digest_parts(
        {"conversion": str(_CONVERSION), "prediction": prediction, "model": read_contents(file).digest}
        # By their paths, since folders may have files of the same names.
        | {path.relative_to(vocabulary_dir).as_posix(): sha256_of(path) for path in vocabulary}
    )
    place = cache_dir / "pictures" / "models" / key
    for _ in range(2):
        if not (place / INDEX).is_file():
            shutil.rmtree(place, ignore_errors=True)
            _convert(file, shapes, place, vocabulary_dir, kind=kind, prediction=prediction)
        pipeline = read_pipeline(place)
        facts, digests = inspect_pipeline(pipeline)
        if read_object(place / "single_file.json").get("digest") == facts.digest:
            return pipeline, facts, digests
        shutil.rmtree(place)  # damaged since it was written: converted again
    raise UnfitError.of(
        "the cache returns different values of the converted model than were written",
        where=str(place),
        why="the storage is damaged",
        fix="set XDG_CACHE_HOME to a different disk",
    )


def _kind_of(file: Path, shapes: Shapes) -> str:
    """`v1`, `v2` or `xl`."""
    kinds = {
        "v1": _CLIP[False] + "embeddings.token_embedding.weight" in shapes,
        "v2": _OPEN_CLIP[False] + "token_embedding.weight" in shapes,
        "xl": (
            _OPEN_CLIP[True] + "token_embedding.weight" in shapes
            and _CLIP[True] + "embeddings.token_embedding.weight" in shapes
        ),
    }
    lacks = [
        word
        for word, name in (
            ("UNet", _UNET + "input_blocks.0.0.weight"),
            ("VAE", _VAE + "decoder.conv_in.weight"),
        )
        if name not in shapes
    ] + ([] if any(kinds.values()) else ["text encoder"])
    if lacks:
        raise ModelError.of(
            f"{file.name} is not a whole Stable Diffusion model: it has no {' and no '.join(lacks)}",
            where=str(file),
            why=(
                "single files are read in the original layout of Stable Diffusion 1.x, 2.x and SDXL; a LoRA,"
                " a part of a model, FLUX and Stable Diffusion 3 are not such a file"
            ),
            fix="use the complete checkpoint, or the directory of a pipeline of diffusers",
        )
    return next(kind for kind, is_it in kinds.items() if is_it)


def _prediction_of(named: str, file: Path, shapes: Shapes) -> str:
    if named != "auto":
        return named
    if "v_pred" in shapes:  # how SDXL models with v prediction are marked
        return "v_prediction"
    if _OPEN_CLIP[False] + "token_embedding.weight" in shapes:
        raise ModelError.of(
            f"{file.name} does not show what its UNet predicts",
            where="diffusion.prediction",
            why=(
                "the files of Stable Diffusion 2.x with 512 pixels (epsilon) and 768 pixels (v) have the same"
                " shapes"
            ),
            fix="set diffusion.prediction to epsilon, or to v_prediction",
        )
    return "epsilon"


def _convert(file: Path, shapes: Shapes, place: Path, tokenizer: Path, *, kind: str, prediction: str) -> None:
    """Writes the pipeline of a single file; its configs come from the shapes, the mapping of names
    is diffusers'.
    """
    import torch

    from unisono.trainer.families.pictures.pipeline import import_diffusers, quiet

    temporary = place.with_name(f"{place.name}.new")
    configs = place.with_name(f"{place.name}.configs")
    for folder in (temporary, configs):
        shutil.rmtree(folder, ignore_errors=True)
    diffusers = import_diffusers()
    named = diffusers.StableDiffusionXLPipeline if kind == "xl" else diffusers.StableDiffusionPipeline
    kinds = {
        header.dtype for header in read_safetensors_header(file) if header.name.startswith((_UNET, _VAE))
    }
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(
        kinds.pop() if len(kinds) == 1 else "", torch.float32
    )
    try:
        with quiet():
            _write_configs(configs, shapes, tokenizer, kind=kind, prediction=prediction)
            more = (
                {}
                if kind == "xl"
                else {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
            )
            opened = named.from_single_file(
                str(file), config=str(configs), local_files_only=True, torch_dtype=dtype, **more
            )
            opened.save_pretrained(str(temporary), safe_serialization=True)
    except (  # what diffusers raises for tensors that it does not expect, by the step that meets them
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        NotImplementedError,
        AttributeError,
    ) as error:
        if (failure := storage_failure(error)) is not None:  # a full disk is not a damaged file
            raise failure from error
        raise ModelError.of(
            f"{file.name} cannot be converted to a pipeline of diffusers",
            where=str(file),
            why=library_words(error, library="diffusers"),
            fix=(
                "check the file, or convert it with diffusers:"
                " pipeline.from_single_file(…).save_pretrained(…)"
            ),
        ) from error
    pipeline = read_pipeline(temporary)
    _refuse_lost_values(file, shapes, pipeline)
    write_json(
        temporary / "single_file.json",
        {"schema": 1, "name": file.name, "digest": inspect_pipeline(pipeline)[0].digest},
    )
    shutil.rmtree(configs)
    temporary.rename(place)


def _refuse_lost_values(file: Path, shapes: Shapes, pipeline: Pipeline) -> None:
    """Compares the number of values of each part with those in the file.

    Raises:
        ModelError: if they differ, because the architecture is a different one.
    """
    prefixes = {
        "unet": (_UNET,),
        "vae": (_VAE,),
        "text_encoder": (_CLIP[pipeline.is_xl], _OPEN_CLIP[False]),
        "text_encoder_2": (_OPEN_CLIP[True],),
    }
    for name in ("unet", "vae", *pipeline.text_encoders):
        wanted = sum(
            prod(shape)
            for key, shape in shapes.items()
            if key.startswith(prefixes[name]) and not _is_unread(key)
        )
        headers = [header for path in pipeline.weights(name) for header in read_safetensors_header(path)]
        count = sum(prod(header.shape) for header in headers if not _is_unread(header.name))
        if wanted != count:
            raise ModelError.of(
                f"the {name} of {file.name} has {wanted} values, but its pipeline has {count}",
                where=f"model.path: {file}",
                why="its architecture is not Stable Diffusion 1.x, 2.x or SDXL",
                fix="use the directory of its pipeline in the layout of diffusers",
            )


def _is_unread(name: str) -> bool:
    """Whether no pipeline has this tensor; Stable Diffusion 2.x does not use the last of 24 layers,
    nor the projection.
    """
    unused = (_OPEN_CLIP[False] + "transformer.resblocks.23.", _OPEN_CLIP[False] + "text_projection")
    return name.endswith(_UNREAD) or name.startswith(unused)


def _write_configs(root: Path, shapes: Shapes, tokenizer: Path, *, kind: str, prediction: str) -> None:
    is_xl = kind == "xl"
    text = (
        _clip_config(shapes, _CLIP[is_xl]) if kind != "v2" else _open_clip_config(shapes, _OPEN_CLIP[False])
    )
    parts = {
        "unet": ("diffusers", "UNet2DConditionModel", _unet_config(shapes, kind=kind, prediction=prediction)),
        "vae": ("diffusers", "AutoencoderKL", _vae_config(shapes, is_xl=is_xl)),
        "scheduler": ("diffusers", *_scheduler_config(kind, prediction, zero_snr="ztsnr" in shapes)),
        "text_encoder": ("transformers", "CLIPTextModel", text),
        "tokenizer": ("transformers", "CLIPTokenizer", {}),
    }
    if is_xl:
        second = _open_clip_config(shapes, _OPEN_CLIP[True])
        parts["text_encoder_2"] = ("transformers", "CLIPTextModelWithProjection", second)
        parts["tokenizer_2"] = ("transformers", "CLIPTokenizer", {})
    name = next(name for name, pipeline_class in PIPELINES.items() if pipeline_class.endswith("xl") == is_xl)
    root.mkdir(parents=True)
    write_json(
        root / INDEX,
        {"_class_name": name} | {part: [library, of] for part, (library, of, _) in parts.items()},
    )
    for part, (_library, _, config) in parts.items():
        (root / part).mkdir()
        if part.startswith("tokenizer"):
            size = parts[part.replace("tokenizer", "text_encoder")][2]
            _copy_tokenizer(
                tokenizer,
                root / part,
                size,
                pad="!" if kind == "v2" or part == "tokenizer_2" else "<|endoftext|>",
            )
        else:
            write_json(
                root / part / ("scheduler_config.json" if part == "scheduler" else "config.json"), config
            )


def _copy_tokenizer(source: Path, target: Path, encoder: Mapping[str, object], *, pad: str) -> None:
    from transformers import CLIPTokenizer

    own = source / target.name if (source / target.name).is_dir() else source / "tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(
        str(own if own.is_dir() else source),
        local_files_only=True,
        pad_token=pad,
        model_max_length=encoder["max_position_embeddings"],
    )
    if len(tokenizer) != encoder["vocab_size"]:
        raise ModelError.of(
            f"the tokenizer has {len(tokenizer)} tokens, but the text encoder has {encoder['vocab_size']}",
            where=f"model.tokenizer: {source}",
            fix="set model.tokenizer to the tokenizer of CLIP",
        )
    tokenizer.save_pretrained(str(target))


def _unet_config(shapes: Shapes, *, kind: str, prediction: str) -> dict[str, object]:
    levels: list[list[int]] = [[]]  # the transformer layers beside each residual block, by level
    channels: list[int] = []
    number = 1
    while any(
        f"{_UNET}input_blocks.{number}.0.{name}" in shapes for name in ("op.weight", "in_layers.2.weight")
    ):
        block = f"{_UNET}input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            levels.append([])
        else:
            levels[-1].append(_count(shapes, f"{block}.1.transformer_blocks."))
            channels[len(levels) - 1 :] = [shapes[f"{block}.0.in_layers.2.weight"][0]]
        number += 1
    depths = [max(level, default=0) for level in levels]
    with_text = next(name for name in shapes if name.startswith(_UNET) and name.endswith("attn2.to_k.weight"))
    down = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    depths[-1] = depths[-1] or _count(shapes, f"{_UNET}middle_block.1.transformer_blocks.")
    config: dict[str, object] = {
        "in_channels": shapes[f"{_UNET}input_blocks.0.0.weight"][1],
        "out_channels": shapes[f"{_UNET}out.2.weight"][0],
        "sample_size": 128 if kind == "xl" else 96 if prediction == "v_prediction" and kind == "v2" else 64,
        "block_out_channels": channels,
        "layers_per_block": len(levels[0]),
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "transformer_layers_per_block": [depth or 1 for depth in depths],
        "cross_attention_dim": shapes[with_text][1],
        "attention_head_dim": 8 if kind == "v1" else [width // _HEAD for width in channels],
        "use_linear_projection": len(shapes[f"{_UNET}middle_block.1.proj_in.weight"]) == 2,
        "upcast_attention": kind == "v2",
    }  # fmt: skip
    if kind == "xl":
        seen = shapes[f"{_UNET}label_emb.0.0.weight"][1]
        pooled = shapes[f"{_OPEN_CLIP[True]}text_projection"][1]
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": (seen - pooled) // 6,
            "projection_class_embeddings_input_dim": seen,
        }
    return config


def _vae_config(shapes: Shapes, *, is_xl: bool) -> dict[str, object]:
    down = _VAE + "encoder.down."
    channels = [shapes[f"{down}{level}.block.0.conv1.weight"][0] for level in range(_count(shapes, down))]
    return {
        "block_out_channels": channels,
        "layers_per_block": _count(shapes, f"{down}0.block."),
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "latent_channels": shapes[_VAE + "decoder.conv_in.weight"][1],
        "sample_size": 1024 if is_xl else 512,
        "scaling_factor": 0.13025 if is_xl else 0.18215,
    }


def _clip_config(shapes: Shapes, prefix: str) -> dict[str, object]:
    return _text_config(
        shapes[prefix + "embeddings.token_embedding.weight"],
        shapes[prefix + "embeddings.position_embedding.weight"][0],
        layers=_count(shapes, prefix + "encoder.layers."),
        wide=shapes[prefix + "encoder.layers.0.mlp.fc1.weight"][0],
        act="quick_gelu",
    )


def _open_clip_config(shapes: Shapes, prefix: str) -> dict[str, object]:
    blocks = {name for name in shapes if not _is_unread(name)}
    projection = shapes.get(prefix + "text_projection", (0, 0))[1]
    return _text_config(
        shapes[prefix + "token_embedding.weight"],
        shapes[prefix + "positional_embedding"][0],
        layers=_count(blocks, prefix + "transformer.resblocks."),
        wide=shapes[prefix + "transformer.resblocks.0.mlp.c_fc.weight"][0],
        act="gelu",
    ) | ({"projection_dim": projection} if projection else {})


def _text_config(
    embedding: tuple[int, ...], positions: int, *, layers: int, wide: int, act: str
) -> dict[str, object]:
    tokens, width = embedding
    return {
        "vocab_size": tokens,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": width // _HEAD,
        "max_position_embeddings": positions,
        "hidden_act": act,
        "projection_dim": width,
        "bos_token_id": tokens - 2,
        "eos_token_id": tokens - 1,
        "model_type": "clip_text_model",
    }


def _scheduler_config(kind: str, prediction: str, *, zero_snr: bool) -> tuple[str, dict[str, object]]:
    """The noise schedule of all Stable Diffusion models, with the sampler that the pipelines on the
    hub have.
    """
    name = {"v1": "PNDMScheduler", "v2": "DDIMScheduler", "xl": "EulerDiscreteScheduler"}[kind]
    own = {
        "v1": {"skip_prk_steps": True, "set_alpha_to_one": False},
        "v2": {"clip_sample": False, "set_alpha_to_one": False},
        "xl": {},
    }[kind]
    return name, own | ({"rescale_betas_zero_snr": True} if zero_snr and kind != "v1" else {}) | {
        "_class_name": name,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "num_train_timesteps": 1000,
        "prediction_type": prediction,
        "steps_offset": 1,
        "timestep_spacing": "leading",
    }


def _count(names: Any, prefix: str) -> int:
    """How many numbers follow a prefix in the names of tensors."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})

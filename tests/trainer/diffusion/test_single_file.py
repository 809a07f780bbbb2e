"""Whole models in one safetensors file of the original layout, which the test writes by the inverse
mapping: they become the same pipeline.

Run: pytest tests/trainer/diffusion/test_single_file.py
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_usual_pipeline
from unisono.base.errors import ModelError, UsageError
from unisono.base.events import Reporter
from unisono.trainer.config import RunConfig
from unisono.trainer.families.pictures.pipeline_files import Pipeline, read_pipeline
from unisono.trainer.families.pictures.single_file import open_files
from unisono.trainer.plan.task_requests import DrawRequest, ExportRequest, RequestedModel
from unisono.trainer.task.picture_tasks import run_export, run_generate

needs.package("diffusers")
Image = needs.package("PIL.Image")

Tensors = dict[str, torch.Tensor]
_RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}  # fmt: skip
_ENDS = {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}  # fmt: skip
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "self_attn": "attn", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}  # fmt: skip


def _part(root: Path, name: str) -> Tensors:
    return {
        key: tensor for file in read_pipeline(root).weights(name) for key, tensor in load_file(file).items()
    }


def _unet_name(name: str, names: set[str]) -> str:
    """A tensor of a UNet with one residual block in each level, as the original model calls it."""
    stem, _, end = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{end}"
    match = re.match(r"(down|up|mid)_block(?:s\.(\d+))?\.(\w+)\.(\d+)\.(.*)\.(\w+)$", name)
    assert match is not None, name
    where, block, kind, number, rest = match[1], int(match[2] or 0), match[3], int(match[4]), match[5]
    rest = _RESNET.get(rest, rest)
    if where == "mid":
        return f"middle_block.{2 * number if kind == 'resnets' else 1}.{rest}.{end}"
    if kind == "downsamplers":
        return f"input_blocks.{2 * block + 2}.0.op.{end}"
    if kind == "upsamplers":
        has_attention = any(other.startswith(f"up_blocks.{block}.attentions.") for other in names)
        return f"output_blocks.{2 * block + 1}.{2 if has_attention else 1}.conv.{end}"
    position = 2 * block + number + (where == "down")
    return f"{'input' if where == 'down' else 'output'}_blocks.{position}.{int(kind == 'attentions')}.{rest}.{end}"


def _vae_name(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor of an autoencoder of two levels, as the original model has it: attention in 1 × 1
    convolutions.
    """
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{1 - int(m[1])}.block.{m[2]}", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{1 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    if "mid_block.attentions.0" in name:
        head, _, rest = name.replace("mid_block.attentions.0", "mid.attn_1").partition("attn_1.")
        stem, _, end = rest.rpartition(".")
        name, tensor = f"{head}attn_1.{_ATTENTION[stem]}.{end}", tensor[:, :, None, None] if tensor.ndim == 2 else tensor  # fmt: skip
    return name, tensor


def _open_clip(state: Tensors) -> Tensors:
    """A text encoder with the names of OpenCLIP: query, key and value are one matrix, and the
    projection is transposed.
    """
    found: Tensors = {"logit_scale": torch.tensor(4.6)}
    ends = {"embeddings.token_embedding.weight": "token_embedding.weight", "embeddings.position_embedding.weight": "positional_embedding", "final_layer_norm.weight": "ln_final.weight", "final_layer_norm.bias": "ln_final.bias"}  # fmt: skip
    for name, tensor in state.items():
        if name in ends:
            found[ends[name]] = tensor
        elif name == "text_projection.weight":
            found["text_projection"] = tensor.T.contiguous()
        elif match := re.match(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [state[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            found[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif not re.search(r"[kv]_proj", name):
            for ours, theirs in _OPEN.items():
                name = name.replace(ours, theirs)  # noqa: PLW2901
            found[name.replace("encoder.layers", "transformer.resblocks")] = tensor
    return found


def write_single_file(root: Path, file: Path, kind: str) -> Path:
    """Writes the pipeline of a directory as one file in the original layout, with tensors in it
    that no pipeline reads.
    """
    unet = _part(root, "unet")
    found = {f"model.diffusion_model.{_unet_name(name, set(unet))}": t for name, t in unet.items()}
    found |= {
        f"first_stage_model.{name}": t
        for name, t in (_vae_name(*item) for item in _part(root, "vae").items())
    }
    encoders = [
        {name.removeprefix("text_model."): t for name, t in _part(root, part).items()}
        for part in read_pipeline(root).text_encoders
    ]
    clip = {"v1": "cond_stage_model.transformer.text_model.", "xl": "conditioner.embedders.0.transformer.text_model."}  # fmt: skip
    if kind in clip:
        found |= {clip[kind] + name: t for name, t in encoders[0].items()}
        found[clip[kind] + "embeddings.position_ids"] = torch.arange(77)[None]
    if kind != "v1":
        prefix = "cond_stage_model.model." if kind == "v2" else "conditioner.embedders.1.model."
        found |= {prefix + name: t for name, t in _open_clip(encoders[-1]).items()}
    if kind == "v2":
        found["cond_stage_model.model.text_projection"] = torch.zeros(64, 64)
    found["alphas_cumprod"] = torch.ones(3)
    save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, file)
    return file


def _config(model: Path, tokenizer: Path | None, **diffusion: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"objective": "diffusion", "model": {"path": str(model), "tokenizer": str(tokenizer) if tokenizer else None},
         "adapter": {"targets": "unet"}, "data": {"train": "pictures"}, "diffusion": diffusion, "output_dir": "out"}
    )  # fmt: skip


@pytest.fixture(scope="module", params=["v1", "v2", "xl"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The kind of a model, the directory of its pipeline, and its single file."""
    folder = tmp_path_factory.mktemp(request.param)
    root = write_usual_pipeline(folder, request.param)
    return request.param, root, write_single_file(root, folder / "model.safetensors", request.param)


def test_a_single_file_becomes_the_pipeline_that_it_was_written_from(
    both: tuple[str, Path, Path], tmp_path: Path
) -> None:
    kind, root, file = both
    prediction = {"prediction": "v_prediction"} if kind == "v2" else {}
    config = _config(file, root.parent / "vocabulary", **prediction)
    found, facts, digests = open_files(config, cache_dir=tmp_path)
    wanted = read_pipeline(root)
    assert (found.kind, found.prediction, found.factor) == (wanted.kind, wanted.prediction, wanted.factor)
    for part in ("unet", "vae", *wanted.text_encoders):
        old, new = _part(root, part), _part(found.root, part)
        old = {name: tensor for name, tensor in old.items() if not name.endswith("position_ids")}
        assert new.keys() == old.keys(), part
        assert all(torch.equal(new[name], tensor) for name, tensor in old.items()), part
    for part in ("unet", "vae", "scheduler", *wanted.text_encoders):
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        old, new = (json.loads((place / part / name).read_text()) for place in (root, found.root))
        odd = {
            key: (old[key], new.get(key))
            for key in old
            if old[key] != new.get(key) and not key.startswith(("_", "transformers_version", "architectures"))
        }
        assert set(odd) <= ({"transformer_layers_per_block"} if part == "unet" else {"dtype"}), (part, odd)
    again, same, _ = open_files(config, cache_dir=tmp_path)
    assert (again.root, same.digest) == (found.root, facts.digest)
    weights = found.weights("unet")[0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert open_files(config, cache_dir=tmp_path)[1:] == (facts, digests)  # converted again


def test_a_picture_of_a_single_file_equals_that_of_its_directory(
    both: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, root, file = both
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = DrawRequest(
        target=str(file), prompt="a tile", out=tmp_path / "file", steps=2, width=32, height=32,
        tokenizer=str(root.parent / "vocabulary"), prediction="v_prediction" if kind == "v2" else None,
    )  # fmt: skip
    pixels = []
    parts = replace(whole, target=str(root), out=tmp_path / "directory", tokenizer=None, prediction=None)
    for request in (whole, parts):
        (drawn,) = run_generate(request, Reporter(None))["files"]
        pixels.append(np.asarray(Image.open(drawn)))
    assert np.array_equal(pixels[0], pixels[1])


def test_a_whole_model_has_no_lora_to_export(both: tuple[str, Path, Path], tmp_path: Path) -> None:
    request = ExportRequest(model=RequestedModel(str(both[2])), out="", format="kohya")
    with pytest.raises(UsageError, match="has no LoRA"):
        run_export(request, Reporter(None), tmp_path / "out", tmp_path / "new")


def test_a_run_on_a_single_file_has_the_losses_of_its_directory(
    tmp_path_factory: pytest.TempPathFactory, pictures_dir: Path
) -> None:
    folder = tmp_path_factory.mktemp("file")
    root = write_usual_pipeline(folder, "v1")
    file = write_single_file(root, folder / "model.safetensors", "v1")
    more: dict[str, Any] = {"duration": "2 steps", "adapter": {"targets": "unet+text"}}
    runs = []
    for model, tokenizer in ((root, None), (file, folder / "vocabulary")):
        studio = Studio(model, {"sft": pictures_dir}, tmp_path_factory.mktemp("studio"))
        own = more | ({"model": {"tokenizer": str(tokenizer)}} if tokenizer else {})
        runs.append(studio.alone(studio.plan("diffusion", **own)))
    assert runs[0].losses == runs[1].losses
    for name, tensor in runs[0].weights().items():
        assert torch.equal(tensor, runs[1].weights()[name]), name


def test_what_cannot_be_read_is_refused_with_what_to_do(
    both: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, root, file = both
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    vocabulary = root.parent / "vocabulary"

    def refusal(model: Path, tokenizer: Path | None, **diffusion: Any) -> str:
        with pytest.raises(ModelError) as caught:
            open_files(_config(model, tokenizer, **diffusion), cache_dir=tmp_path)
        (problem,) = caught.value.problems
        return f"{problem.what}; {problem.why}; {problem.fix}"

    words = refusal(file, None, prediction="epsilon")
    assert "a single file has none" in words
    assert "vocab.json and merges.txt" in words
    if kind == "v2":
        assert "set diffusion.prediction" in refusal(file, vocabulary)
        return
    if kind == "xl":
        return
    pickle = tmp_path / "model.ckpt"
    pickle.write_bytes(b"x")
    assert "arbitrary code" in refusal(pickle, vocabulary)
    tensors = load_file(file)
    for name, kept in (("VAE", "model.|cond"), ("text encoder", "model.|first"), ("UNet", "first|cond")):
        part = tmp_path / f"{name}.safetensors"
        save_file({key: tensor for key, tensor in tensors.items() if re.match(kept, key)}, part)
        assert f"it has no {name}" in refusal(part, vocabulary)
    odd = tmp_path / "odd.safetensors"
    save_file(tensors | {"model.diffusion_model.more.weight": torch.zeros(3)}, odd)
    assert "its architecture is not" in refusal(odd, vocabulary)
    other = tmp_path / "other"
    other.mkdir()
    words_of = json.loads((vocabulary / "vocab.json").read_text())
    (other / "vocab.json").write_text(json.dumps(words_of | {"more": len(words_of)}))
    (other / "merges.txt").write_text("#version: 0.2\n")
    assert "the tokenizer has" in refusal(file, other)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_of_an_image_model_lists_files_beside_it_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    index = tmp_path / "unet/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="in the index of the weights the name"):
        Pipeline(tmp_path, "stable-diffusion", {}, {}, "epsilon").weights("unet")

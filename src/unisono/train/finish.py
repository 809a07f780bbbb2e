"""The result: final weights in the Hugging Face layout, written whole or not at all."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.reader import Tensors
from unisono.files import fsync_dir, read_json, write_json
from unisono.model.inspect import read_safetensors_header, weight_files
from unisono.model.load import DTYPES, LoadedModel
from unisono.model.shard import whole
from unisono.plan import RunPlan
from unisono.train.run import Run
from unisono.train.saving import gather

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_result(run: Run) -> Path | None:
    """Writes adapter/ or model/ of the run, with tokenizer and chat template; gives its path.

    All ranks must call it; rank 0 writes, and the others get None.
    """
    gathered = _gathered(run) if run.sharded is not None else None
    if not run.group.is_main:
        return None
    target = run.files.adapter if run.plan.config.adapter is not None else run.files.model
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_weights(run.forward.loaded, run.plan, temporary, gathered=gathered)
    _sync(temporary)
    if target.exists():  # of an earlier, shorter run that this one has prolonged
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    fsync_dir(target.parent)
    return target


def _gathered(run: Run) -> Tensors:
    """What is written, whole, on rank 0: one tensor at a time, each in the dtype that it is written in."""
    loaded = run.forward.loaded
    if run.plan.config.adapter is not None:
        return gather(dict(loaded.trainable), keep=run.group.is_main)
    dtype = DTYPES[stored_dtype(run.plan)]
    found: Tensors = {}
    for name, tensor in loaded.base.state_dict().items():
        full = whole(tensor)
        if run.group.is_main:
            found[name] = (full.to(dtype) if full.is_floating_point() else full).cpu()
    return found


def write_weights(
    loaded: LoadedModel, plan: RunPlan, directory: Path, *, gathered: Tensors | None = None
) -> None:
    """The adapter in peft's layout, or the whole model in transformers', with all that chat and generation need.

    Args:
        loaded: the model.
        plan: of the run.
        directory: which does not exist yet.
        gathered: the weights where the model holds parts of them only.
    """
    directory.mkdir(parents=True)
    if plan.config.adapter is not None:
        model: Any = loaded.model
        model.peft_config["default"].base_model_name_or_path = _base_name(plan)
        model.save_pretrained(str(directory), save_embedding_layers=False, state_dict=gathered)
    else:
        base = loaded.base
        base.config.use_cache = True
        dtype = DTYPES[stored_dtype(plan)]
        state = gathered or {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in base.state_dict().items()
        }
        base.save_pretrained(str(directory), state_dict=_tied_once(base, state))
        base.config.use_cache = False
        _say_dtype(directory / "config.json", stored_dtype(plan))
    _give_template(loaded.tokenizer, plan)
    loaded.tokenizer.save_pretrained(str(directory))
    if loaded.base.generation_config is not None and plan.config.adapter is not None:
        loaded.base.generation_config.save_pretrained(str(directory))


def _say_dtype(file: Path, dtype: str) -> None:
    """transformers writes the dtype that the model has in memory; the files may have another."""
    config = read_json(file)
    config.pop("torch_dtype", None)
    write_json(file, config | {"dtype": dtype})


def _give_template(tokenizer: Any, plan: RunPlan) -> None:
    """The result talks in the template that it was trained with, also where that was a file or the stand-in."""
    used = Path(plan.data.cache_dir) / "template.jinja"
    if used.is_file() and (plan.config.data.template is not None or tokenizer.chat_template is None):
        tokenizer.chat_template = used.read_text(encoding="utf-8")


def stored_dtype(plan: RunPlan) -> str:
    """The dtype in which trained weights are stored: that of the files they came from, else the computation's."""
    if plan.config.model.weights == "random":
        return plan.dtype
    headers = [
        header
        for file in weight_files(Path(plan.model.directory))
        for header in read_safetensors_header(file)
    ]
    largest = max(headers, key=lambda header: torch.Size(header.shape).numel())
    return _NAMES.get(largest.dtype, plan.dtype)


def _tied_once(base: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Casting made copies of tied weights; only the first name of each stays, as transformers itself would save them."""
    seen: dict[int, str] = {}
    kept = {}
    for name, original in base.state_dict(keep_vars=True).items():
        if seen.setdefault(id(original), name) == name:
            kept[name] = state[name].contiguous()
    return kept


def _base_name(plan: RunPlan) -> str:
    """What peft will load the base from: the hub id as it was given, or the directory."""
    asked = plan.config.model.path
    return plan.model.directory if asked.startswith("builtin:") or Path(asked).exists() else asked


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    fsync_dir(directory)

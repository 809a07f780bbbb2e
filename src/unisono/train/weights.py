"""Final weights in the Hugging Face layout, gathered and written tensor by tensor.

A tensor is whole only while it is written, and only on the ranks that have just gathered it; so rank 0 never holds more than its own part of
the model and one tensor.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.state import bytes_of, dtype_name
from unisono.checkpoint.writer import TensorPart, file_order, write_tensor_file
from unisono.files import read_json, write_json
from unisono.model.files import read_contents, read_safetensors_header, weight_files
from unisono.model.hf_layout import (
    MODEL_INDEX,
    FileLayout,
    StoredTensor,
    Tensors,
    adapter_layout,
    model_layout,
    untied,
)
from unisono.model.load import DTYPES, LoadedModel
from unisono.model.sharding import full_on_one_rank
from unisono.plan import RunPlan
from unisono.units import parse_bytes

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_METADATA = {"format": "pt"}  # without it transformers refuses the file

Entries = dict[str, FileEntry]


def write_weights(loaded: LoadedModel, plan: RunPlan, directory: Path, *, writes: bool = True) -> Entries:
    """The adapter in peft's layout, or the whole model in transformers', with all that chat and generation need.

    All ranks whose weights are sharded must call it.

    Args:
        loaded: the model.
        plan: of the run.
        directory: which does not exist yet, in one that does.
        writes: whether this rank writes; the others only give their parts.

    Returns:
        the digests of the weight files, as they were meant.

    Raises:
        OSError: if the storage fails.
    """
    if writes:
        directory.mkdir()
    target = directory if writes else None
    if plan.config.adapter is not None:
        entries = write_adapter(loaded.model, target, base_name=_base_name(plan))
    else:
        limit = parse_bytes(plan.config.checkpoint.max_shard_size)
        loaded.base.config.use_cache = True
        entries = write_model(loaded.base, target, dtype=stored_dtype(plan), max_file_bytes=limit)
        loaded.base.config.use_cache = False
    if target is not None:
        _give_template(loaded.tokenizer, plan)
        loaded.tokenizer.save_pretrained(str(target))
        if loaded.base.generation_config is not None and plan.config.adapter is not None:
            loaded.base.generation_config.save_pretrained(str(target))
    return entries


def write_model(base: Any, directory: Path | None, *, dtype: str, max_file_bytes: int) -> Entries:
    """Weights, config and generation_config of a model of transformers, as its `save_pretrained` would write them.

    All ranks whose weights are sharded must call it.

    Args:
        base: the model.
        directory: where; None on ranks that only give their parts.
        dtype: of the files.
        max_file_bytes: a larger model becomes several files.

    Returns:
        the digests of the weight files, as they were meant where we wrote them.

    Raises:
        OSError: if the storage fails.
    """
    tensors = untied(base)
    layout = model_layout(base, dtype=DTYPES[dtype], max_file_bytes=max_file_bytes)
    # Where tensors are made of several of the model's (a fused one of three), transformers must see all of them: then, and only
    # then, rank 0 holds the whole model.
    state = {} if layout else _all_whole(tensors, DTYPES[dtype], keep=directory is not None)
    if directory is not None:
        base.save_pretrained(str(directory), state_dict=state, max_shard_size=max_file_bytes)
        _say_dtype(directory / "config.json", dtype)
    if layout is None:
        return entries_of(directory) if directory is not None else {}
    entries = _write_files(layout, tensors, directory)
    if directory is not None and layout.index is not None:
        write_json(directory / MODEL_INDEX, layout.index)
    return entries


def entries_of(directory: Path) -> Entries:
    """The digests of the weight files in a directory, read now."""
    found = {file.name: read_contents(file, tensors=True) for file in directory.glob("*.safetensors")}
    return {
        name: FileEntry(bytes=contents.bytes, xxh3_128=contents.digest, tensors=contents.tensors)
        for name, contents in found.items()
    }


def write_adapter(model: Any, directory: Path | None, *, base_name: str) -> Entries:
    """Weights, settings and card of a peft model's adapter, as its `save_pretrained` would write them.

    All ranks whose weights are sharded must call it.

    Args:
        model: the model.
        directory: which exists; None on ranks that only give their parts.
        base_name: what peft will load the model beneath it from.

    Returns:
        the digest of the weights, as they were meant.

    Raises:
        OSError: if the storage fails.
    """
    entries = _write_files(adapter_layout(model), dict(model.state_dict()), directory)
    if directory is None:
        return entries
    model.peft_config["default"].base_model_name_or_path = base_name
    model.create_or_update_model_card(str(directory))
    settings = copy.copy(model.peft_config["default"])
    settings.inference_mode = True
    settings.save_pretrained(str(directory))
    return entries


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


def _write_files(layout: FileLayout, tensors: Tensors, directory: Path | None) -> Entries:
    """Writes the files of a layout, or takes part in gathering what stands in them, in the same order; gives the digests of those written."""
    entries: Entries = {}
    made = _Made(layout, tensors, keep=directory is not None)
    for name, stored in layout.files.items():
        parts = made.parts(stored)
        if directory is not None:
            entries[name] = write_tensor_file(directory / name, parts, metadata=_METADATA)
        else:
            for part in file_order(parts):
                part.read()
        made.forget()
    return entries


class _Made:
    """The tensors of the files, made when they are asked for; those of one source are asked for one after the other.

    On a rank that does not keep them, asking is taking part.
    """

    def __init__(self, layout: FileLayout, tensors: Tensors, *, keep: bool) -> None:
        self._layout = layout
        self._keep = keep
        self._tensors = tensors
        self._source = ""
        self._now: Tensors = {}

    def parts(self, stored: list[StoredTensor]) -> list[TensorPart]:
        """What goes into one file."""
        return [
            TensorPart(tensor.name, dtype_name(tensor.dtype), tensor.shape, partial(self._bytes, tensor))
            for tensor in stored
        ]

    def forget(self) -> None:
        """Lets go of what was made last."""
        self._source, self._now = "", {}

    def _bytes(self, stored: StoredTensor) -> memoryview:
        if self._source != stored.source:
            self.forget()  # before the next is whole
            found = _whole(self._tensors[stored.source], stored.dtype, keep=self._keep)
            self._now = self._layout.convert(stored.source, found) if found is not None else {}
            self._source = stored.source
        return bytes_of(self._now[stored.name].contiguous()) if self._keep else memoryview(b"")


def _whole(tensor: torch.Tensor, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
    """Cast before it is gathered, so that what travels and what is whole is no larger than what is written. All ranks must call it."""
    return full_on_one_rank(tensor.detach().to(dtype), keep=keep)


def _all_whole(tensors: Tensors, dtype: torch.dtype, *, keep: bool) -> Tensors:
    """All tensors at once, where `keep` says so. All ranks must call it."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        full = _whole(tensor, dtype if tensor.is_floating_point() else tensor.dtype, keep=keep)
        if full is not None:
            found[name] = full.contiguous()
    return found


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


def _base_name(plan: RunPlan) -> str:
    """What peft will load the base from: the hub id as it was given, or the directory."""
    asked = plan.config.model.path
    return plan.model.directory if asked.startswith("builtin:") or Path(asked).exists() else asked

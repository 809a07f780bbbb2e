"""The layout of weights in Hugging Face files: names, shapes and files, before any tensor is gathered.

What `save_pretrained` would write is determined by passing tensors without data to transformers and peft. So each tensor can be gathered,
converted and written on its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

ADAPTER_FILE = "adapter_model.safetensors"
_MODEL_FILES = "model{suffix}.safetensors"
MODEL_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: in the file.
        source: name of the model's tensor that it is computed from.
        shape: in the file.
        dtype: in the file.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The files and their tensors.

    Attributes:
        files: for each file its tensors, in order.
        index: the JSON object of the index; None if there is only one file.
        convert: gives the tensors of the files that are computed from a full tensor of the model.
    """

    files: dict[str, list[StoredTensor]]
    index: dict[str, Any] | None
    convert: Callable[[str, torch.Tensor], Tensors]


def model_layout(base: Any, *, dtype: torch.dtype, max_file_bytes: int) -> FileLayout | None:
    """The layout of a full model; None if a file's tensor is computed from several of the model's, which must be gathered together.

    Args:
        base: of transformers; its weights may be sharded.
        dtype: of floating-point tensors in the files.
        max_file_bytes: maximum size of a file; a larger tensor gets a separate file.
    """
    shown = {name: _without_data(tensor, dtype) for name, tensor in untied(base).items()}
    try:
        wanted = _reverted(base, dict(shown))
        apart = {name: _reverted(base, {name: tensor}) for name, tensor in shown.items()}
    except Exception:  # noqa: BLE001 - any error of an operation that fails on single tensors or without data, but works on all together
        return None
    sources = {name: source for source, made in apart.items() for name in made}
    alike = {name: tensor for made in apart.values() for name, tensor in made.items()}
    if sum(map(len, apart.values())) != len(wanted) or _outline(alike) != _outline(wanted):
        return None
    stored = [
        StoredTensor(name, sources[name], tuple(tensor.shape), tensor.dtype)
        for name, tensor in wanted.items()
    ]

    def convert(source: str, tensor: torch.Tensor) -> Tensors:
        return _reverted(base, {source: tensor})

    files, index = _split(stored, max_file_bytes, parameters=base.num_parameters())
    return FileLayout(files, index, convert)


def adapter_layout(model: Any) -> FileLayout:
    """The layout of a peft model's adapter: always one file.

    Args:
        model: of peft; its weights may be sharded.
    """
    from peft import get_peft_model_state_dict

    shown = {name: _without_data(tensor, tensor.dtype) for name, tensor in model.state_dict().items()}
    sources = {id(tensor): name for name, tensor in shown.items()}
    kept = get_peft_model_state_dict(model, state_dict=dict(shown), save_embedding_layers=False)
    names = {
        sources[id(tensor)]: name for name, tensor in kept.items()
    }  # peft renames tensors, but does not change them
    stored = [
        StoredTensor(names[source], source, tuple(shown[source].shape), shown[source].dtype)
        for source in names
    ]
    return FileLayout({ADAPTER_FILE: stored}, None, lambda source, tensor: {names[source]: tensor})


def untied(base: Any) -> Tensors:
    """The tensors of a model by name; tensors that share memory once, by their first name, as transformers saves them."""
    seen: dict[int, str] = {}
    ignored = set(base._keys_to_ignore_on_save or ())  # noqa: SLF001 - transformers has no public name for it
    return {
        name: tensor.detach()
        for name, tensor in base.state_dict(keep_vars=True).items()
        if seen.setdefault(id(tensor), name) == name and name not in ignored
    }


def _without_data(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor as in the file, without data."""
    return torch.empty(
        tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta"
    )


def _reverted(base: Any, tensors: Tensors) -> Tensors:
    """The tensors with the names and shapes of the model's files: transformers converts many models when it loads them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Tensors = revert_weight_conversion(base, tensors)
    return found


def _outline(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _split(
    stored: list[StoredTensor], max_file_bytes: int, *, parameters: int
) -> tuple[dict[str, list[StoredTensor]], dict[str, Any] | None]:
    """The tensors split into files, as huggingface_hub splits them, and the index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in stored}
    found = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=_MODEL_FILES,
        max_shard_size=max_file_bytes,
    )
    files = {file: [by_name[name] for name in names] for file, names in found.filename_to_tensors.items()}
    if not found.is_sharded:
        return files, None
    metadata = {"total_parameters": parameters, **found.metadata}
    return files, {"metadata": metadata, "weight_map": found.tensor_to_filename}

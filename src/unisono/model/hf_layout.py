"""How weights stand in Hugging Face's files: names, shapes and files, known before a single tensor is whole.

What `save_pretrained` would write is found by showing transformers and peft tensors without data. So each tensor can be gathered, converted
and written by itself.
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
    """A tensor of a file.

    Attributes:
        name: in the file.
        source: of the tensor in the model that it is made of.
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
    """What is written where.

    Attributes:
        files: for each file what is in it, in order.
        index: the JSON object of the index; None where there is one file.
        convert: gives, of a whole tensor of the model, the tensors of the files that are made of it.
    """

    files: dict[str, list[StoredTensor]]
    index: dict[str, Any] | None
    convert: Callable[[str, torch.Tensor], Tensors]


def model_layout(base: Any, *, dtype: torch.dtype, max_file_bytes: int) -> FileLayout | None:
    """The layout of a whole model; None where a file's tensor is made of several of the model's, which must be whole together.

    Args:
        base: of transformers; its weights may be sharded.
        dtype: of the files, for all numbers that are not whole.
        max_file_bytes: of a file; a tensor that is larger has one of its own.
    """
    shown = {name: _without_data(tensor, dtype) for name, tensor in untied(base).items()}
    try:
        wanted = _reverted(base, dict(shown))
        apart = {name: _reverted(base, {name: tensor}) for name, tensor in shown.items()}
    except Exception:  # noqa: BLE001 - whatever an operation says that cannot work on one tensor, or on none at all: together they can
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
    """The layout of a peft model's adapter: always one file, as peft reads it.

    Args:
        model: of peft; its weights may be sharded.
    """
    from peft import get_peft_model_state_dict

    shown = {name: _without_data(tensor, tensor.dtype) for name, tensor in model.state_dict().items()}
    sources = {id(tensor): name for name, tensor in shown.items()}
    kept = get_peft_model_state_dict(model, state_dict=dict(shown), save_embedding_layers=False)
    names = {sources[id(tensor)]: name for name, tensor in kept.items()}  # peft renames, and changes nothing
    stored = [
        StoredTensor(names[source], source, tuple(shown[source].shape), shown[source].dtype)
        for source in names
    ]
    return FileLayout({ADAPTER_FILE: stored}, None, lambda source, tensor: {names[source]: tensor})


def untied(base: Any) -> Tensors:
    """The tensors of a model by name; of those that are one in memory only the first name, as transformers itself would save them."""
    seen: dict[int, str] = {}
    ignored = set(base._keys_to_ignore_on_save or ())  # noqa: SLF001 - transformers has no other name for it
    return {
        name: tensor.detach()
        for name, tensor in base.state_dict(keep_vars=True).items()
        if seen.setdefault(id(tensor), name) == name and name not in ignored
    }


def _without_data(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As it will be in a file, whole, but for its numbers."""
    return torch.empty(
        tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta"
    )


def _reverted(base: Any, tensors: Tensors) -> Tensors:
    """The tensors under the names, and in the shapes, that the model's files have: transformers converts many models on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Tensors = revert_weight_conversion(base, tensors)
    return found


def _outline(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _split(
    stored: list[StoredTensor], max_file_bytes: int, *, parameters: int
) -> tuple[dict[str, list[StoredTensor]], dict[str, Any] | None]:
    """Into files as huggingface_hub splits them, and their index."""
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

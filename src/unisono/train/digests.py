"""Short names of what a rank holds, equal where the bits are: tensors, rows, the tokenizer."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unisono.data.table import TokenTable

_WIDTH = 1024  # words of a block; a word's weight is that of its place in the block times that of the block
_BLOCKS = 4096  # 32 MiB at a time
_MOST_NAMES = 256
_PROBE = "Hello, wörld! 123 καλημέρα\n\t你好 🙂 def f(x): return x  # end"
_NUMBERED = re.compile(r"^(.*?\.\d+)\.")


def checksum(tensor: torch.Tensor) -> int:
    """A number that one turned bit or two words that changed places alter; the same on every device.

    Σ of the tensor's 8-byte words, each times an odd number that depends on its place, modulo 2⁶⁴. Made where the tensor is.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    place = torch.arange(_WIDTH, device=words.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = _WIDTH * _BLOCKS
    for number, first in enumerate(range(0, len(words), step)):
        part = words[first : first + step]
        part = torch.nn.functional.pad(part, (0, -len(part) % _WIDTH)).view(-1, _WIDTH)
        block = torch.arange(len(part), device=words.device) + number * _BLOCKS
        total += ((part * place).sum(1) * (block * 4 + 1)).sum()
    return int(total) & ((1 << 64) - 1)


def values_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The checksum of each tensor."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def digest_of(parts: Iterable[Any]) -> str:
    """Of plain values, in order."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32]


def outline(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes and dtypes, in order."""
    return digest_of([name, list(t.shape), str(t.dtype)] for name, t in tensors.items())


def by_layer(values: dict[str, int]) -> dict[str, str]:
    """A bounded number of digests: of each tensor, or of each layer where there are many tensors."""
    if len(values) <= _MOST_NAMES:
        return {name: f"{value:016x}" for name, value in values.items()}
    layers: dict[str, list[Any]] = {}
    for name, value in values.items():
        found = _NUMBERED.match(name)
        layers.setdefault(found[1] if found else name, []).append([name, value])
    return {layer: digest_of(members)[:16] for layer, members in list(layers.items())[:_MOST_NAMES]}


def rows_digest(table: TokenTable) -> str:
    """Of where each row comes from and how long it is, in the order of the table, and of which rows make which sequence."""
    digest = hashlib.sha256(json.dumps(table.files).encode())
    for name in ("file", "number", "length", "loss"):
        digest.update(table.columns[name].tobytes())
    digest.update(table.sequence_rows.tobytes())
    digest.update(table.sequence_ends.tobytes())
    return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """Of what a fixed text becomes, and of the vocabulary."""
    ids = tokenizer(_PROBE)["input_ids"]
    return digest_of([ids, sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])

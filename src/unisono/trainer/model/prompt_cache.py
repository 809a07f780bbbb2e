"""Keys and values of prompts that have been read, so that a prompt with the same beginning, e.g. a
long system prompt or an earlier turn of a chat, is read from there on.

They are those that the model computed: attention at a token depends on nothing after it. Only for
models that keep all tokens of their past, as `model.engine` does.

Letters: H heads, L tokens of a prompt, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

LEAST = 64
"""Tokens that must be common for a prompt to wait for another one, or to be kept beside it."""

Layers = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (H, L, D) of each layer that has some, by its number."""


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """A prompt that has been read.

    Attributes:
        owner: the adapter that read it.
        ids: (L,) int64.
        layers: of all its tokens.
        size: bytes of the layers.
    """

    owner: str
    ids: np.ndarray
    layers: Layers
    size: int


def common_tokens(ids: np.ndarray, others: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    length = min(len(ids), len(others))
    differ = ids[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length


class PromptCache:
    """The prompts that were used last, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: list[KeptPrompt] = []  # the one that was used last is the last
        self.size = 0

    def find(self, owner: str, ids: np.ndarray) -> tuple[int, KeptPrompt | None]:
        """The longest beginning of a prompt that is known: its tokens, without the last one of the
        prompt, and where it is.
        """
        known = [
            (min(common_tokens(one.ids, ids), len(ids) - 1), one) for one in self._kept if one.owner == owner
        ]
        count, best = max(known, key=lambda pair: pair[0], default=(0, None))
        if best is None or count < LEAST:
            return 0, None
        self._kept.remove(best)
        self._kept.append(best)
        return count, best

    def keep(self, owner: str, ids: np.ndarray, layers: Layers) -> None:
        """Keeps a prompt instead of those that it continues, and of the oldest ones."""
        size = sum(part.numel() * part.element_size() for pair in layers.values() for part in pair)
        if size > self._most_bytes:
            return
        for one in list(self._kept):
            if one.owner == owner and common_tokens(one.ids, ids) == len(one.ids):
                self._drop(one)
        while self.size + size > self._most_bytes:
            self._drop(self._kept[0])
        copies = {number: (keys.clone(), values.clone()) for number, (keys, values) in layers.items()}
        self._kept.append(KeptPrompt(owner, ids, copies, size))
        self.size += size

    def forget(self, owner: str) -> None:
        """Drops the prompts of an adapter."""
        for one in [one for one in self._kept if one.owner == owner]:
            self._drop(one)

    def _drop(self, one: KeptPrompt) -> None:
        self._kept.remove(one)
        self.size -= one.size


def beginnings(
    rows: Sequence[tuple[int, KeptPrompt | None]], columns: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (P, H, columns, D) of the beginnings of P prompts, padded on the left.

    Args:
        rows: of each its number of tokens, and where they are.
        columns: tokens of the longest.
    """
    sample = next(kept for _, kept in rows if kept is not None)
    made = {}
    for number, pair in sample.layers.items():
        parts = []
        for side, like in enumerate(pair):
            whole = like.new_zeros(len(rows), like.shape[0], columns, like.shape[2])
            for row, (count, kept) in enumerate(rows):
                if kept is not None and count:
                    whole[row, :, columns - count :] = kept.layers[number][side][:, :count]
            parts.append(whole)
        made[number] = (parts[0], parts[1])
    return made

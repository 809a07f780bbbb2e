"""Keys and values of running answers, in memory with room for their next tokens.

Letters: B answers, H heads, L tokens so far, D head size.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

_ROOM = 64  # tokens: as often everything is copied
_SMALL = 1 << 20  # bytes of keys: a copy of so many takes less time than what it spares


class AnswerLayer(DynamicLayer):
    """Those of one layer: `keys` and `values` (B, H, L, D) are the used part of larger tensors.

    That of transformers copies all of them into new memory for every token, which is done here only
    while they are small.
    """

    keys: torch.Tensor
    values: torch.Tensor
    _memory: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values (B, H, n, D); gives all."""
        if not self.is_initialized or self.keys.nbytes < _SMALL:
            self._memory = ()
            super().update(key_states, value_states)
            return self.keys, self.values
        start, count = self.get_seq_length(), key_states.shape[2]
        if not self._memory or self._memory[0].shape[2] < start + count:
            self._grow(start + count)
        keys, values = self._memory
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        self._use(start + count)
        return self.keys, self.values

    def _grow(self, length: int) -> None:
        used = (self.keys, self.values)
        self._memory = tuple(_memory(part, len(part), length) for part in used)
        for memory, part in zip(self._memory, used, strict=True):
            memory[:, :, : part.shape[2]] = part

    def select(self, rows: torch.Tensor, first: int = 0) -> None:
        """Keeps these answers, or others with the same prompts, from a column on."""
        self.keys, self.values = self.keys[rows, :, first:], self.values[rows, :, first:]
        self._memory = ()

    def join(self, other: "AnswerLayer", *, length: int) -> None:
        """Takes the answers of another cache behind its own; all are padded on the left to a
        length.
        """
        pairs = [(self.keys, other.keys), (self.values, other.values)]
        self._memory = tuple(_memory(mine, len(mine) + len(theirs), length) for mine, theirs in pairs)
        for memory, (mine, theirs) in zip(self._memory, pairs, strict=True):
            for part, rows in ((mine, memory[: len(mine)]), (theirs, memory[len(mine) :])):
                gap = length - part.shape[2]
                rows[:, :, :gap] = 0  # finite: attention multiplies it by 0
                rows[:, :, gap:length] = part
        self._use(length)

    def _use(self, length: int) -> None:
        keys, values = self._memory
        self.keys, self.values = keys.narrow(2, 0, length), values.narrow(2, 0, length)


def _memory(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """For as many tokens and some more."""
    return like.new_empty(rows, like.shape[1], length + _ROOM, like.shape[3])

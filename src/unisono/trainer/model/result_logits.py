"""The logits of three rows, by which files are compared with the model that was trained when they
are loaded again.

Letters: L tokens of a row, K last of them whose logits are kept, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unisono.base.files import whole_file
from unisono.trainer.model.directory import SCORE
from unisono.trainer.model.forward import head_values
from unisono.trainer.model.multimodal import body_of
from unisono.trainer.model.result_outputs import ResultOutputs

ROWS = 3
KEPT = 4
"""The last tokens of a row have seen all others; the logits of more would make a file of hundreds
of megabytes.
"""

_TOKENS = 32


@dataclass(frozen=True)
class ResultLogits(ResultOutputs):
    """What a language model gives for some rows.

    Attributes:
        outputs: the logits, (K, V) float32 for each row; of a reward model its values, (K,).
        rows: the tokens of each, (L,).
    """

    name: ClassVar[str] = "logits"

    rows: list[list[int]]

    @classmethod
    def of(cls, model: Any, rows: Iterable[Sequence[int]], *, dtype: str) -> Self:
        """Computes them, each row alone. With sharded weights all ranks must call it.

        Args:
            model: of transformers or peft, in evaluation mode.
            rows: their first tokens are used.
            dtype: of the computation.
        """
        used = [list(map(int, row[:_TOKENS])) for row in rows]
        with torch.no_grad():
            return cls([_last_logits(model, row) for row in used], dtype, used)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            OSError, SafetensorError: if it cannot be read.
        """
        with safe_open(path, framework="pt") as file:
            rows = [file.get_tensor(f"row-{i}.ids").tolist() for i in range(ROWS)]
            logits = [file.get_tensor(f"row-{i}.logits") for i in range(ROWS)]
            return cls(logits, str((file.metadata() or {})["dtype"]), rows)

    def write(self, path: Path) -> None:
        """Writes them to a file, which replaces an earlier one.

        Raises:
            OSError: if the storage fails.
        """
        tensors = {f"row-{i}.ids": torch.tensor(row) for i, row in enumerate(self.rows)}
        tensors |= {f"row-{i}.logits": values.contiguous() for i, values in enumerate(self.outputs)}
        with whole_file(path, mode=0o600) as temporary:
            save_file(tensors, temporary, metadata={"dtype": self.dtype})

    def again(self, model: Any, *, dtype: str) -> Self:
        """Those of a model for the same rows."""
        return type(self).of(model, self.rows, dtype=dtype)


def fixed_rows(vocabulary: int) -> list[list[int]]:
    """Three rows of tokens for a model whose training rows are not known."""
    return [
        [(first + step * i) % vocabulary for i in range(16)] for first, step in ((11, 7), (3, 5), (8, 11))
    ]


def _last_logits(model: Any, row: list[int]) -> torch.Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.tensor([row], device=base.device)
    if hasattr(base, SCORE):  # its logits are one value for a row, too few to compare
        values = head_values(base, body_of(base)(input_ids=ids, use_cache=False).last_hidden_state)
    else:
        values = model(input_ids=ids, use_cache=False).logits
    return values[0, -KEPT:].float().cpu()

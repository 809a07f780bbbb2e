"""The logits of three rows, by which files are compared with the model that was trained when they
are loaded again.

Letters: L tokens of a row, K last of them whose logits are kept, V vocabulary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unisono.base.files import whole_file
from unisono.trainer.model.directory import SCORE
from unisono.trainer.model.forward import PictureInputs, head_values
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
        pictures: those of rows by their numbers.
    """

    name: ClassVar[str] = "logits"

    rows: list[list[int]]
    pictures: Mapping[int, PictureInputs] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Any,
        rows: Iterable[Sequence[int]],
        *,
        dtype: str,
        pictures: Mapping[int, PictureInputs] | None = None,
    ) -> Self:
        """Computes them, each row alone. With sharded weights all ranks must call it.

        Args:
            model: of transformers or peft, in evaluation mode.
            rows: their first tokens are used; of those with pictures all.
            dtype: of the computation.
            pictures: those of rows by their numbers.
        """
        seen = pictures or {}
        used = [list(map(int, row if i in seen else row[:_TOKENS])) for i, row in enumerate(rows)]
        with torch.no_grad():
            logits = [_last_logits(model, row, seen.get(i)) for i, row in enumerate(used)]
        return cls(logits, dtype, used, seen)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            OSError, SafetensorError: if it cannot be read.
        """
        with safe_open(path, framework="pt") as file:
            rows = [file.get_tensor(f"row-{i}.ids").tolist() for i in range(ROWS)]
            logits = [file.get_tensor(f"row-{i}.logits") for i in range(ROWS)]
            metadata = file.metadata() or {}
            image_ids = json.loads(metadata.get("image_ids", "[]"))
            stored: dict[int, dict[str, torch.Tensor]] = {}
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                row, _, argument = name.removeprefix("row-").partition(".picture.")
                if argument:
                    stored.setdefault(int(row), {})[argument] = file.get_tensor(name)
            pictures = {row: PictureInputs(tensors, image_ids) for row, tensors in stored.items()}
            return cls(logits, str(metadata["dtype"]), rows, pictures)

    def write(self, path: Path) -> None:
        """Writes them to a file, which replaces an earlier one.

        Raises:
            OSError: if the storage fails.
        """
        tensors = {f"row-{i}.ids": torch.tensor(row) for i, row in enumerate(self.rows)}
        tensors |= {f"row-{i}.logits": values.contiguous() for i, values in enumerate(self.outputs)}
        metadata = {"dtype": self.dtype}
        for row, seen in self.pictures.items():
            tensors |= {f"row-{row}.picture.{name}": v.cpu().contiguous() for name, v in seen.tensors.items()}
            metadata["image_ids"] = json.dumps(list(seen.image_ids))
        with whole_file(path, mode=0o600) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    def again(self, model: Any, *, dtype: str) -> Self:
        """Those of a model for the same rows."""
        return type(self).of(model, self.rows, dtype=dtype, pictures=self.pictures)


def fixed_rows(vocabulary: int) -> list[list[int]]:
    """Three rows of tokens for a model whose training rows are not known."""
    return [
        [(first + step * i) % vocabulary for i in range(16)] for first, step in ((11, 7), (3, 5), (8, 11))
    ]


def _last_logits(model: Any, row: list[int], pictures: PictureInputs | None) -> torch.Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.tensor([row], device=base.device)
    if hasattr(base, SCORE):  # its logits are the values of a row, too few to compare
        values = head_values(base, body_of(base)(input_ids=ids, use_cache=False).last_hidden_state)
        values = values[..., 0] if values.shape[-1] == 1 else values
    else:
        more = {}
        if pictures is not None:
            here = PictureInputs.of([pictures.tensors], pictures.image_ids, base.device)
            assert here is not None
            more = here.arguments(ids, base)
        values = model(input_ids=ids, use_cache=False, **more).logits
    return values[0, -KEPT:].float().cpu()

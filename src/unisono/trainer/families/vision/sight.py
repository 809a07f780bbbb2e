"""A row with one picture, which is the same everywhere: by it files are compared with the model
that they are of, together with their processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.base.errors import ModelError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.families.text.written import WrittenModel
from unisono.trainer.model.forward import PictureInputs, PictureProbe, Rows

_SIZE = (120, 90)


def drawn() -> Any:
    """A picture of Pillow in RGB, made of ramps and bars."""
    from PIL import Image

    width, height = _SIZE
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    layers = (x * 255 // (width - 1), y * 255 // (height - 1), (x // 15 + y // 15) % 2 * 255)
    return Image.fromarray(np.stack(layers, axis=-1).astype(np.uint8), "RGB")


def row_with_picture(processor: PictureProcessor) -> tuple[list[int], PictureInputs]:
    """The tokens of the row, and its picture."""
    image = drawn()
    ids = processor.processor.tokenizer.encode(processor.expansion(image.size))
    seen = PictureInputs.of([processor.inputs(image)], processor.image_ids, torch.device("cpu"))
    assert seen is not None
    return ids, seen


def probe_of(processor: PictureProcessor, device: torch.device) -> PictureProbe:
    """Two rows with the picture, of different lengths."""
    ids, picture = row_with_picture(processor)
    text = processor.processor.tokenizer.encode(" what is in this picture", add_special_tokens=False)
    rows = [[*ids, *text[:4]], [*text[:2], *ids, *text]]
    return probe_of_rows(rows, [picture, picture], device)


def probe_of_rows(
    rows: Sequence[Sequence[int]], pictures: Sequence[PictureInputs], device: torch.device
) -> PictureProbe:
    """Rows of tokens with the pictures of each, as one micro batch and alone."""
    ids = [torch.tensor(list(row), device=device) for row in rows]
    alone = [PictureInputs.of([one.tensors], one.image_ids, device) for one in pictures]
    ends = np.cumsum([len(row) for row in ids])
    flat = torch.cat(ids)
    last = {int(end) - 1 for end in ends}
    index = torch.tensor([i for i in range(len(flat)) if i not in last], device=device)
    joined = PictureInputs.of([one.tensors for one in pictures], pictures[0].image_ids, device)
    positions = torch.cat([torch.arange(len(row), device=device) for row in ids])
    together = Rows(flat, positions, [len(row) for row in ids], index, flat[index + 1], pictures=joined)
    return PictureProbe(together, [one for one in alone if one is not None])


@dataclass(frozen=True)
class WrittenVisionModel(WrittenModel):
    """A vision-language model, or an adapter of one.

    Attributes:
        original: the directory of the model that it was trained from.
    """

    original: Path

    def load(self, *, dtype: str, device: torch.device) -> Any:
        """The model of transformers, or of peft on its base.

        Raises:
            ModelError: if its processor is not that of the original.
        """
        if not self.is_adapter:
            (_, here), (_, there) = (
                row_with_picture(PictureProcessor(place, trust_remote_code=self.trusts_code))
                for place in (self.directory, self.original)
            )
            same = here.tensors.keys() == there.tensors.keys()
            if not (
                same and all(torch.equal(here.tensors[name], there.tensors[name]) for name in there.tensors)
            ):
                raise ModelError.of(
                    "the processor beside the model makes different pixels than the original processor",
                    where=str(self.directory),
                    fix=f"copy processor_config.json and preprocessor_config.json of {self.original}",
                )
        return super().load(dtype=dtype, device=device)

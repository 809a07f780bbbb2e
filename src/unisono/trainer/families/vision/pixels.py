"""The pixels of rows: made by the model's processor when a micro batch is loaded, and kept in
memory by picture; or features in their place, where the vision part is not trained.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from unisono.base.errors import DataError
from unisono.trainer.data import RowError
from unisono.trainer.data.pictures.decoding import BadPictureError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.pictures.store import Picture, read_pictures
from unisono.trainer.data.token_table import read_picture_numbers
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.frozen_vision import FrozenVision, KeptPictures

_IN_MEMORY_BYTES = 1 << 28

Tensors = dict[str, torch.Tensor]


class PixelLoader:
    """Loads the pictures of the rows of a table, as `families.family.ContentsLoader`.

    Attributes:
        processor: of the model.
        vision: if set, it keeps the features of pictures, whose pixels are then loaded once.
    """

    def __init__(self, table: Path, processor: PictureProcessor, device: torch.device) -> None:
        """Reads the list of pictures.

        Raises:
            OSError, IntegrityError: if it cannot be read.
        """
        self._pictures = read_pictures(table)
        self._of_rows = read_picture_numbers(table)
        self.processor = processor
        self._device = device
        self.vision: FrozenVision | None = None
        self._kept: OrderedDict[int, Tensors] = OrderedDict()
        self._bytes = 0

    def pictures_of(self, row: int) -> list[int]:
        """The numbers of the pictures of a row, as in the file of tokens."""
        return self._of_rows[row]

    def load(
        self, numbers: Sequence[int], seeds: Sequence[int], steps: Sequence[int], /
    ) -> PictureInputs | None:
        """The pictures of some rows; None if they have none. Nothing is drawn.

        Raises:
            DataError: if a picture is not the one that was prepared.
        """
        del seeds, steps
        pictures = [picture for row in numbers for picture in self._of_rows[row]]
        vision, ids = self.vision, self.processor.image_ids
        if vision is None or not pictures:
            return PictureInputs.of([self._tensors(one) for one in pictures], ids, self._device)
        made = {one: self._tensors(one) for one in pictures if one not in vision.kept}

        def pixels(number: int) -> Tensors:
            tensors = made[number] if number in made else self._tensors(number)
            return {name: value.to(self._device) for name, value in tensors.items()}

        return PictureInputs({}, ids, KeptPictures(vision, pictures, pixels))

    def load_evaluation(self, numbers: Sequence[int], seeds: Sequence[int], /) -> PictureInputs | None:
        """Those of rows in an evaluation."""
        return self.load(numbers, seeds, [])

    def _tensors(self, number: int) -> Tensors:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        made = tensors_of(self._pictures[number], self.processor)
        if self.vision is not None and not self.vision.is_full:
            return made
        self._kept[number] = made
        self._bytes += _bytes_of(made)
        while self._bytes > _IN_MEMORY_BYTES and len(self._kept) > 1:
            self._bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return made


def tensors_of(picture: Picture, processor: PictureProcessor) -> Tensors:
    """What the model gets of a picture.

    Raises:
        DataError: if it is not the one that was prepared.
    """
    try:
        return processor.inputs(picture.pixels())
    except (BadPictureError, RowError) as error:
        raise DataError.of(
            f"the picture {picture.name} cannot be read any more",
            where=picture.file,
            why=str(error),
            fix="put the picture back, or start again: rows are then prepared with the present files",
        ) from error


def _bytes_of(tensors: Tensors) -> int:
    return sum(value.nbytes for value in tensors.values())

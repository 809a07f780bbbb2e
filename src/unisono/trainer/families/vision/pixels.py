"""The pixels of rows: made by the model's processor when a micro batch is loaded, and kept in
memory by picture; or features in their place, where the vision part is not trained.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import DataError
from unisono.guard.facts import read_environment
from unisono.trainer.data import RowError
from unisono.trainer.data.pictures.decoding import BadPictureError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.pictures.store import TablePicture, read_pictures
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.frozen_vision import FrozenVision, KeptPictures

PIXEL_BYTES = 1 << 28
"""Of pixels in memory where the config does not say how many."""

Tensors = dict[str, torch.Tensor]


class PixelLoader:
    """Loads the pictures of the rows of a table, as `families.family.ContentsLoader`.

    Attributes:
        processor: of the model.
        vision: if set, it keeps the features of pictures, whose pixels are then loaded once.
        most_bytes: of pixels in memory, besides those of the picture loaded last.
    """

    def __init__(self, table: Path, processor: PictureProcessor, device: torch.device) -> None:
        """Reads the list of pictures.

        Raises:
            OSError, IntegrityError: if it cannot be read.
        """
        self._table = table
        self._pictures = read_pictures(table)
        self._of_rows = read_picture_numbers(table)
        self.processor = processor
        self._device = device
        self.vision: FrozenVision | None = None
        self.most_bytes = PIXEL_BYTES
        self._kept: OrderedDict[int, Tensors] = OrderedDict()
        self._bytes = 0

    @property
    def feature_ids(self) -> Sequence[int]:
        """The tokens of which each stands for a feature."""
        return self.processor.image_ids

    def pictures_of(self, row: int) -> list[int]:
        """The numbers of the pictures of a row, as in the file of tokens."""
        return self._of_rows[row]

    def has_video(self, row: int) -> bool:
        """Whether the row has one that the model reads as such."""
        return any(self._pictures[number].frames for number in self._of_rows[row])

    def sample_video(self) -> list[Tensors]:
        """The tensors of the first video; none if there is none.

        Raises:
            DataError: if it is not the one that was prepared.
        """
        numbers = [number for number, one in enumerate(self._pictures) if one.frames][:1]
        return [self._tensors(number) for number in numbers]

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
        picture = self._pictures[number]
        try:
            made = picture.inputs(self.processor)
        except (BadPictureError, RowError) as error:
            raise _changed(picture, error, self._row_of(number)) from error
        if self.vision is not None and not self.vision.is_full:
            return made
        self._kept[number] = made
        self._bytes += _bytes_of(made)
        while self._bytes > self.most_bytes and len(self._kept) > 1:
            self._bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return made

    def _row_of(self, picture: int) -> str:
        """The origin of the first row with a picture."""
        stored = next(row for row, pictures in enumerate(self._of_rows) if picture in pictures)
        for split in ("train", "eval"):
            with contextlib.suppress(OSError):  # not every table has both
                table = TokenTable.open(self._table, split)
                rows = np.flatnonzero(table.columns["stored"] == stored)
                if len(rows):
                    return table.row_id(int(rows[0]))
        return f"row {stored}"


def _changed(picture: TablePicture, error: Exception, row: str) -> DataError:
    """The error of a picture that is not the one that was prepared, with its row."""
    medium = "video" if picture.frames else "picture"
    what = f"the {medium} {picture.name} of {row} cannot be read any more"
    entry = find_cause("picture_changed")
    rank = read_environment().rank
    verdict = Verdict(
        cause="picture_changed",
        when="during",
        summary=f"{what}: {error}",
        ranks=(rank or 0,),
        phase="data",
        evidence=(Evidence(where=picture.file, text=str(error)),),
        fix=entry.remedy if entry else (),
    )
    fix = "put the picture back, or start again: rows are then prepared with the present files"
    return DataError.of(what, where=picture.file, why=str(error), fix=fix, verdict=verdict)


def _bytes_of(tensors: Tensors) -> int:
    return sum(value.nbytes for value in tensors.values())

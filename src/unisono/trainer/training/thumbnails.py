"""Small copies of pictures beside samples, which the board shows."""

import contextlib
import io
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.files import whole_file
from unisono.trainer.data.pictures.decoding import BadPictureError
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import read_picture_numbers

SIDE = 256
"""Pixels of the longer side, at most."""


class SampleThumbnails:
    """Thumbnails of the pictures of a table's rows."""

    def __init__(self, table: Path, folder: Path) -> None:
        """Reads the list of pictures.

        Args:
            table: its directory.
            folder: of the run, for thumbnails.

        Raises:
            OSError, IntegrityError: if the list cannot be read.
        """
        self._pictures = read_pictures(table)
        self._of_rows = read_picture_numbers(table)
        self._folder = folder

    def of(self, row: int) -> list[str]:
        """The names of the thumbnails of a row's pictures, in order; without those that cannot be
        made: a sample without its picture is no reason to end a run.

        Args:
            row: as in the file of tokens.
        """
        names = []
        for number in self._of_rows[row] if self._of_rows else ():
            picture = self._pictures[number]
            name = f"{picture.digest}.jpg"
            with contextlib.suppress(OSError, BadPictureError):
                if not (self._folder / name).is_file():
                    _write(picture.pixels(), self._folder / name)
                names.append(name)
        return names


def drawn_thumbnail(file: Path, folder: Path) -> str | None:
    """The name of the thumbnail of a picture that the run has drawn; None if there is none."""
    from PIL import Image

    with contextlib.suppress(OSError), Image.open(file) as image:
        name = f"{xxhash.xxh3_128(file.read_bytes()).hexdigest()}.jpg"
        _write(image.convert("RGB"), folder / name)
        return name
    return None


def _write(image: Any, file: Path) -> None:
    image.thumbnail((SIDE, SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=85)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as temporary:
        temporary.write_bytes(encoded.getvalue())

"""The pictures of a token table: each is decoded once while rows are encoded, and listed beside the
table, with what is needed to make its pixels again.

    TABLE/pictures.json       the pictures, by their numbers
    TABLE/pictures.arrow      the numbers of the pictures of each row of tokens.arrow
    CACHE/pictures/inline/DIGEST   the bytes of a picture that a row held
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.errors import IntegrityError, UnfitError, cache_remedy, storage_reason, storage_words
from unisono.base.files import read_json, whole_file, write_json
from unisono.base.text import one_line
from unisono.trainer.config.sections import PixelsSection
from unisono.trainer.data import PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, Decoded, decode_all
from unisono.trainer.data.pictures.decoding import BadPictureError, decoding, read_picture_file, upright_rgb
from unisono.trainer.data.pictures.processor import PictureProcessor, Size, fitted_size

LIST_FILE = "pictures.json"


@dataclass(frozen=True, slots=True)
class TablePicture:
    """A picture of a table.

    Attributes:
        name: as the row has it, for messages.
        file: its path; that of its copy in the cache if the row held its bytes.
        digest: the xxh3-128 of its bytes.
        width: of the model's picture in pixels, within the bounds.
        height: likewise.
        resized: whether the bounds changed its size.
        tokens: that stand for it in a row.
        features: tokens of these that stand for a feature each.
        bytes: size of its file.
        changed_ns: when its file was changed last; 0 for a copy in the cache.
        several: whether it is one of several of a row, with a processor that minds.
        values: of its pixels, as the model gets them.
    """

    name: str
    file: str
    digest: str
    width: int
    height: int
    resized: bool
    tokens: int
    features: int
    bytes: int
    changed_ns: int
    several: bool = False
    values: int = 0

    @property
    def words(self) -> str:
        """Its name, size and tokens, for people."""
        how = ", resized" if self.resized else ""
        return f"{one_line(self.name, limit=80)}: {self.width} × {self.height}{how}, {self.tokens} tokens"

    def pixels(self) -> Any:
        """The picture of Pillow, upright, in RGB, within the bounds.

        Raises:
            BadPictureError: if it is missing, or has changed since it was listed.
        """
        data = read_picture_file(Path(self.file))
        if xxhash.xxh3_128(data).hexdigest() != self.digest:
            raise BadPictureError("it has changed since its row was prepared")
        with decoding(data) as image:
            upright = upright_rgb(image)
        size = (self.width, self.height)
        return upright if upright.size == size else upright.resize(size)


class PictureStore:
    """Decodes the pictures of rows, and numbers them by content and size.

    Attributes:
        processor: of the model.
        pictures: so far.
    """

    def __init__(self, processor: PictureProcessor, pixels: PixelsSection, *, cache_dir: Path) -> None:
        """Has no pictures yet."""
        self.processor = processor
        self.pictures: list[TablePicture] = []
        self._pixels = pixels
        self._inline = cache_dir / "pictures" / "inline"
        self._decoded: dict[str, Decoded | Broken] = {}
        self._numbers: dict[tuple[str, Size, bool], int] = {}

    def decode(self, sources: Iterable[PictureSource]) -> None:
        """Decodes those that are not known yet, several at once."""
        new = {key: source for source in sources if (key := _key(source)) not in self._decoded}
        processes = len(os.sched_getaffinity(0))
        self._decoded |= zip(new, decode_all(list(new.values()), processes=processes), strict=True)

    def numbers(self, sources: Sequence[PictureSource]) -> tuple[int, ...]:
        """The numbers of the decoded pictures of a row.

        Raises:
            PictureError: if one is missing, cannot be decoded, or the processor refuses it.
        """
        several = len(sources) > 1
        return tuple(self._number(source, several=several) for source in sources)

    def _number(self, source: PictureSource, *, several: bool) -> int:
        decoded = self._decoded[_key(source)]
        if isinstance(decoded, Broken):
            raise PictureError(
                f"the picture {source.name} cannot be used: {decoded.why}", missing=decoded.missing
            )
        own = (decoded.width, decoded.height)
        size = fitted_size(own, source, self._pixels)
        several = several and self.processor.reads_rows
        known = self._numbers.get((decoded.digest, size, several))
        if known is not None:
            return known
        try:
            text = self.processor.expansion(size, several=several)
        except RowError as error:
            raise PictureError(
                f"the picture {source.name} cannot be used: {error.why}", missing=False
            ) from error
        ids = self.processor.processor.tokenizer.encode(text, add_special_tokens=False)
        features = sum(i in self.processor.image_ids for i in ids)
        file = source.file or self._keep(source.data or b"", decoded.digest)
        changed = decoded.changed_ns if source.file is not None else 0
        self.pictures.append(
            TablePicture(
                name=source.name,
                file=file,
                digest=decoded.digest,
                width=size[0],
                height=size[1],
                resized=size != own,
                tokens=len(ids),
                features=features,
                bytes=decoded.bytes,
                changed_ns=changed,
                several=several,
                values=self.processor.count_values(size, several=several),
            )
        )
        self._numbers[decoded.digest, size, several] = len(self.pictures) - 1
        return len(self.pictures) - 1

    def expansion(self, number: int) -> str:
        """The text that takes the place of a picture."""
        picture = self.pictures[number]
        return self.processor.expansion((picture.width, picture.height), several=picture.several)

    def digest(self) -> str:
        """Of the contents and sizes of all pictures, in order."""
        parts = (f"{one.digest} {one.width} {one.height}{' several' * one.several}" for one in self.pictures)
        return xxhash.xxh3_128("\n".join(parts).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Writes pictures.json of a table."""
        pictures = [asdict(one) for one in self.pictures]
        body = {"schema": 1, "image_ids": list(self.processor.image_ids), "pictures": pictures}
        write_json(directory / LIST_FILE, body)

    def _keep(self, data: bytes, digest: str) -> str:
        """Copies bytes into the cache; gives the file.

        Raises:
            UnfitError: if the cache cannot be written.
        """
        file = self._inline / digest
        if not file.is_file():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(file) as temporary:
                    temporary.write_bytes(data)
            except OSError as error:
                raise UnfitError.of(
                    f"the cache of pictures cannot be written: {storage_words(error)}",
                    where=str(file),
                    why=storage_reason(error),
                    fix=cache_remedy(error),
                ) from error
        return str(file)


class PictureError(RowError):
    """The error of a row whose picture cannot be used.

    Attributes:
        missing: whether there is no such file.
    """

    def __init__(self, why: str, *, missing: bool) -> None:
        fix = "copy it there, or remove the row" if missing else "replace the picture, or remove the row"
        super().__init__(why, fix)
        self.missing = missing


def _key(source: PictureSource) -> str:
    if source.file is not None:
        return source.file
    return f"data {hashlib.sha256(source.data or b'').hexdigest()}"


def read_pictures(table: Path) -> list[TablePicture]:
    """The pictures of a table; none if its rows are text.

    Raises:
        IntegrityError: if their list cannot be read.
    """
    file = table / LIST_FILE
    if not file.is_file():
        return []
    try:
        return [TablePicture(**entry) for entry in read_json(file)["pictures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError.of(
            "the list of pictures of the prepared data cannot be read",
            where=str(file),
            why=str(error),
            fix="remove its directory: it is made again",
        ) from error


def read_image_ids(table: Path) -> list[int]:
    """The tokens of which each stands for a feature of a picture, of a table with pictures."""
    ids: list[int] = read_json(table / LIST_FILE)["image_ids"]
    return ids


def changed_picture(pictures: Sequence[TablePicture]) -> str | None:
    """Why the first picture is not the one that was prepared; None if all are.

    Of a file whose size and time are the same the contents are not read again.
    """
    for picture in pictures:
        try:
            status = Path(picture.file).stat()
        except OSError:
            return f"the picture {picture.name} is gone"
        same = status.st_size == picture.bytes and picture.changed_ns in (0, status.st_mtime_ns)
        if not same and _digest_of(picture.file) != picture.digest:
            return f"the picture {picture.name} has changed"
    return None


def _digest_of(file: str) -> str:
    try:
        return xxhash.xxh3_128(read_picture_file(Path(file))).hexdigest()
    except BadPictureError as error:
        return str(error)


def table_text(numbers: Sequence[int]) -> str:
    """The numbers of a row's pictures as they enter the digest of a table."""
    return json.dumps(list(numbers))

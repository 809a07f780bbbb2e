"""The pictures of a token table: each is decoded once while rows are encoded, and listed beside the
table, with what is needed to make its pixels again.

    TABLE/pictures.json       the pictures, by their numbers
    TABLE/pictures.arrow      the numbers of the pictures of each row of tokens.arrow
    CACHE/pictures/inline/DIGEST   the bytes of a picture that a row held, or that were fetched
    CACHE/pictures/urls/SHA256     the digest of what a URL gave
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.errors import IntegrityError
from unisono.base.files import read_json, write_json
from unisono.base.named_hosts import NamedHosts
from unisono.base.text import one_line
from unisono.trainer.config.sections import FramesSection, PixelsSection
from unisono.trainer.data import PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, Decoded, decode_all
from unisono.trainer.data.pictures.decoding import BadPictureError, decoding, read_picture_file, upright_rgb
from unisono.trainer.data.pictures.kept_bytes import KeptBytes, fetch_all
from unisono.trainer.data.pictures.processor import PictureProcessor, Size, fitted_size
from unisono.trainer.data.pictures.videos import VideoOrigin, VideoReader

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
        videos: samples their frames.
    """

    def __init__(
        self,
        processor: PictureProcessor,
        pixels: PixelsSection,
        *,
        cache_dir: Path,
        hosts: NamedHosts,
        frames: FramesSection,
    ) -> None:
        """Has no pictures yet; those with URLs are fetched from `hosts`, and `frames` of videos are
        pictures.
        """
        self.processor = processor
        self.pictures: list[TablePicture] = []
        self._pixels = pixels
        self._kept = KeptBytes(cache_dir / "pictures")
        self._hosts = hosts
        self.videos = VideoReader(frames, self._kept, processor)
        self._decoded: dict[str, Decoded | Broken] = {}
        self._files: dict[str, str] = {}  # of those that were fetched
        self._numbers: dict[tuple[str, Size], int] = {}

    def decode(self, sources: Iterable[PictureSource]) -> None:
        """Decodes those that are not known yet, several at once."""
        new = {key: source for source in sources if (key := _key(source)) not in self._decoded}
        processes = len(os.sched_getaffinity(0))
        local = self._fetched(new)
        self._decoded |= zip(local, decode_all(list(local.values()), processes=processes), strict=True)
        for key, source in new.items():
            if source.url is not None and isinstance(self._decoded[key], Broken):
                self._kept.forget_url(source.url)  # its host may have given an error page

    def _fetched(self, new: Mapping[str, PictureSource]) -> dict[str, PictureSource]:
        """The new sources as files or bytes; those that cannot be fetched are broken."""
        urls = {key: source.url for key, source in new.items() if source.url is not None}
        files = fetch_all(urls.values(), self._hosts, self._kept) if urls else {}
        local = {key: source for key, source in new.items() if key not in urls}
        for key, url in urls.items():
            result = files[url]
            if isinstance(result, Path):
                self._files[key] = str(result)
                local[key] = replace(new[key], file=str(result))
            else:
                self._decoded[key] = Broken(result)
        return local

    def number(self, source: PictureSource) -> int:
        """The number of a decoded picture.

        Raises:
            PictureError: if it is missing, cannot be decoded, or the processor refuses it.
        """
        decoded = self._decoded[_key(source)]
        if isinstance(decoded, Broken):
            raise PictureError(
                f"the picture {source.name} cannot be used: {decoded.why}", missing=decoded.missing
            )
        own = (decoded.width, decoded.height)
        size = fitted_size(own, source, self._pixels)
        known = self._numbers.get((decoded.digest, size))
        if known is not None:
            return known
        try:
            text = self.processor.expansion(size)
        except RowError as error:
            raise PictureError(
                f"the picture {source.name} cannot be used: {error.why}", missing=False
            ) from error
        ids = self.processor.processor.tokenizer.encode(text, add_special_tokens=False)
        features = sum(i in self.processor.image_ids for i in ids)
        file = source.file or self._files.get(_key(source)) or str(self._kept.keep(source.data or b""))
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
            )
        )
        self._numbers[decoded.digest, size] = len(self.pictures) - 1
        return len(self.pictures) - 1

    def size(self, source: PictureSource) -> Size:
        """The size of a decoded picture in its file, upright.

        Raises:
            PictureError: if it cannot be used.
        """
        self.number(source)
        decoded = self._decoded[_key(source)]
        assert isinstance(decoded, Decoded), "else it has no number"
        return decoded.width, decoded.height

    def seen_size(self, source: PictureSource) -> Size:
        """The size of a decoded picture as the model gets it.

        Raises:
            PictureError: if it cannot be used.
        """
        picture = self.pictures[self.number(source)]
        return self.processor.seen_size((picture.width, picture.height))

    def expansion(self, number: int) -> str:
        """The text that takes the place of a picture."""
        return self.processor.expansion((self.pictures[number].width, self.pictures[number].height))

    def digest(self) -> str:
        """Of the contents and sizes of all pictures, in order."""
        parts = (f"{one.digest} {one.width} {one.height}" for one in self.pictures)
        return xxhash.xxh3_128("\n".join(parts).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Writes pictures.json of a table."""
        pictures = [asdict(one) for one in self.pictures]
        body: dict[str, object] = {"schema": 1, "image_ids": list(self.processor.image_ids)}
        body |= {"pictures": pictures, "videos": [asdict(one) for one in self.videos.origins.values()]}
        write_json(directory / LIST_FILE, body)


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
    if source.url is not None:
        return f"url {source.url}"
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


def changed_picture(table: Path) -> str | None:
    """Why the first picture of a table, or the first video with frames in it, is not the one that
    was prepared; None if all are.

    Of a file whose size and time are the same the contents are not read again.
    """
    pictures = read_pictures(table)
    videos = read_json(table / LIST_FILE).get("videos", []) if pictures else []
    for video in (VideoOrigin(**entry) for entry in videos):
        if not video.is_same:
            return f"the video {video.name} has changed"
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

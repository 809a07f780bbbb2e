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
from unisono.trainer.data import Clip, PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, Decoded, decode_all
from unisono.trainer.data.pictures.decoding import BadPictureError, decoding, read_picture_file, upright_rgb
from unisono.trainer.data.pictures.kept_bytes import KeptBytes, fetch_all
from unisono.trainer.data.pictures.processor import ClipTimes, PictureProcessor, Size, fitted_size
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
        several: whether it is one of several of a row, with a processor that minds.
        values: of its pixels, as the model gets them.
        frames: of a video; empty for a picture.
        times: of the frames, in seconds after the first one of the video.
        seconds: of the video.
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
    frames: tuple["TablePicture", ...] = ()
    times: tuple[float, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "TablePicture":
        """That of an entry of the list."""
        frames = tuple(map(cls.of, entry["frames"]))
        return cls(**{**entry, "frames": frames, "times": tuple(entry["times"])})

    @property
    def words(self) -> str:
        """Its name, size and tokens, for people."""
        how = ", resized" if self.resized else ""
        how += f", {len(self.frames)} frames" if self.frames else ""
        return f"{one_line(self.name, limit=80)}: {self.width} × {self.height}{how}, {self.tokens} tokens"

    @property
    def files(self) -> "tuple[TablePicture, ...]":
        """The pictures that it is made of: itself, or its frames."""
        return self.frames or (self,)

    def inputs(self, processor: PictureProcessor) -> dict[str, Any]:
        """What the model gets of it, see `PictureProcessor.inputs`.

        Raises:
            BadPictureError: if it is missing, or has changed since it was listed.
            RowError: if the processor refuses it.
        """
        if not self.frames:
            return processor.inputs(self.pixels(), several=self.several)
        return processor.clip_inputs(
            [one.pixels() for one in self.frames], ClipTimes(self.times, self.seconds)
        )

    def pixels(self) -> Any:
        """The picture of Pillow, upright, in RGB, within the bounds; of a video the first frame.

        Raises:
            BadPictureError: if it is missing, or has changed since it was listed.
        """
        if self.frames:
            return self.frames[0].pixels()
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
        self._numbers: dict[tuple[str, Size, bool], int] = {}
        self._texts: list[str] = []

    def decode(self, sources: Iterable[PictureSource]) -> None:
        """Decodes those that are not known yet, several at once."""
        files = (one for source in sources for one in source.decoded)
        new = {key: source for source in files if (key := _key(source)) not in self._decoded}
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

    def numbers(self, sources: Sequence[PictureSource]) -> tuple[int, ...]:
        """The numbers of the decoded pictures of a row.

        Raises:
            PictureError: if one is missing, cannot be decoded, or the processor refuses it.
        """
        several = len(sources) > 1
        return tuple(self._number(source, several=several) for source in sources)

    def _number(self, source: PictureSource, *, several: bool) -> int:
        several = several and self.processor.reads_rows and source.clip is None
        picture = self._listed(source) if source.clip is None else self._clip(source.name, source.clip)
        key = picture.digest, (picture.width, picture.height), several
        known = self._numbers.get(key)
        if known is not None:
            return known
        size = picture.width, picture.height
        try:
            if picture.frames:
                times = ClipTimes(picture.times, picture.seconds)
                text, values = self.processor.clip_expansion(size, times)
            else:
                text = self.processor.expansion(size, several=several)
                values = self.processor.count_values(size, several=several)
        except RowError as error:
            what = "video" if picture.frames else "picture"
            raise PictureError(
                f"the {what} {source.name} cannot be used: {error.why}", missing=False
            ) from error
        ids = self.processor.processor.tokenizer.encode(text, add_special_tokens=False)
        features = sum(i in self.processor.image_ids for i in ids)
        self._texts.append(text)
        self.pictures.append(
            replace(picture, tokens=len(ids), features=features, several=several, values=values)
        )
        self._numbers[key] = len(self.pictures) - 1
        return len(self.pictures) - 1

    def _listed(self, source: PictureSource) -> TablePicture:
        """A decoded picture, not yet with its tokens.

        Raises:
            PictureError: if it cannot be used.
        """
        decoded = self._usable(source)
        in_file = (decoded.width, decoded.height)
        size = fitted_size(in_file, source, self._pixels)
        return TablePicture(
            name=source.name,
            file=source.file or self._files.get(_key(source)) or str(self._kept.keep(source.data or b"")),
            digest=decoded.digest,
            width=size[0],
            height=size[1],
            resized=size != in_file,
            tokens=0,
            features=0,
            bytes=decoded.bytes,
            changed_ns=decoded.changed_ns if source.file is not None else 0,
        )

    def _clip(self, name: str, clip: Clip) -> TablePicture:
        """A video of decoded frames, not yet with its tokens.

        Raises:
            PictureError: if a frame cannot be used, or has another size than the first one.
        """
        frames = tuple(map(self._listed, clip.frames))
        first = frames[0]
        other = next((one for one in frames if (one.width, one.height) != (first.width, first.height)), None)
        if other is not None:
            sizes = " and ".join(f"{one.width} × {one.height}" for one in (first, other))
            raise PictureError(
                f"the video {name} cannot be used: its frames have {sizes} pixels", missing=False
            )
        parts = [*(one.digest for one in frames), *map(repr, clip.times), repr(clip.seconds)]
        return replace(
            first,
            name=name,
            digest=xxhash.xxh3_128(" ".join(parts).encode()).hexdigest(),
            bytes=sum(one.bytes for one in frames),
            frames=frames,
            times=clip.times,
            seconds=clip.seconds,
        )

    def size(self, source: PictureSource) -> Size:
        """The size of a decoded picture in its file, upright.

        Raises:
            PictureError: if it cannot be used.
        """
        decoded = self._usable(source)
        return decoded.width, decoded.height

    def seen_size(self, source: PictureSource) -> Size:
        """The size of a decoded picture as the model gets it.

        Raises:
            PictureError: if it cannot be used.
        """
        size = fitted_size(self.size(source), source, self._pixels)
        try:
            return self.processor.seen_size(size)
        except RowError as error:
            raise PictureError(
                f"the picture {source.name} cannot be used: {error.why}", missing=False
            ) from error

    def _usable(self, source: PictureSource) -> Decoded:
        """A picture that could be decoded.

        Raises:
            PictureError: if it could not.
        """
        decoded = self._decoded[_key(source)]
        if isinstance(decoded, Broken):
            raise PictureError(
                f"the picture {source.name} cannot be used: {decoded.why}", missing=decoded.missing
            )
        return decoded

    def expansion(self, number: int) -> str:
        """The text that takes the place of a picture."""
        return self._texts[number]

    def digest(self) -> str:
        """Of the contents and sizes of all pictures, in order."""
        parts = (f"{one.digest} {one.width} {one.height}{' several' * one.several}" for one in self.pictures)
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
        return [TablePicture.of(entry) for entry in read_json(file)["pictures"]]
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
    for picture in (file for one in pictures for file in one.files):
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

"""Videos of rows as frames: for a model without tokens of videos they are pictures, one after the
other.

A video is a file (see film), a directory of pictures in the order of their names, where numbers are
compared as such, or a list of pictures. What was sampled from a file is kept in the cache:

    CACHE/pictures/videos/SHA256   the files of the frames, by path, size, time and sampling
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.base.files import read_json, write_json
from unisono.trainer.config.sections import FramesSection
from unisono.trainer.data import PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, DecoderProcess
from unisono.trainer.data.pictures.film import FrameRequest, sampled
from unisono.trainer.data.pictures.kept_bytes import KeptBytes
from unisono.trainer.data.pictures.processor import PictureProcessor

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True, slots=True)
class VideoOrigin:
    """A file or directory that frames are of, as it was when they were sampled.

    Attributes:
        name: as the row has it.
        path: absolute.
        bytes: its size.
        changed_ns: when it was changed last.
    """

    name: str
    path: str
    bytes: int
    changed_ns: int

    @property
    def is_same(self) -> bool:
        """Whether it still is as it was."""
        try:
            status = Path(self.path).stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.bytes, self.changed_ns)


class VideoReader:
    """Samples frames of the videos of rows.

    Attributes:
        origins: of the videos so far, by path.
    """

    def __init__(self, frames: FramesSection, kept: KeptBytes, processor: PictureProcessor) -> None:
        """Has no video yet."""
        self.origins: dict[str, VideoOrigin] = {}
        self._sampling = frames
        self._kept = kept
        self._processor = processor.processor
        self._decoder = DecoderProcess()

    def frames(self, pictures: Sequence[PictureSource], name: str) -> list[PictureSource]:
        """The frames that are used of a video.

        Args:
            pictures: one that is a file or a directory of frames, or each frame.
            name: of the video, for messages.

        Raises:
            RowError: if it cannot be read, or the model reads videos in another way.
        """
        self._refuse_own_tokens()
        if len(pictures) != 1 or pictures[0].file is None:
            return self._spread(pictures)
        path = Path(pictures[0].file)
        try:
            status = path.stat()
        except OSError as error:
            raise _unusable(name, str(error.strerror or error)) from error
        self.origins[str(path)] = VideoOrigin(name, str(path), status.st_size, status.st_mtime_ns)
        if path.is_dir():
            return self._spread(_in_directory(path, name))
        files = self._extracted(self.origins[str(path)])
        return [PictureSource(file, None, f"{name} frame {i}") for i, file in enumerate(files, 1)]

    def close(self) -> None:
        """Ends the process that decodes."""
        self._decoder.close()

    def _refuse_own_tokens(self) -> None:
        kind = type(self._processor)
        if "video_processor" in inspect.signature(kind.__init__).parameters:
            name = next(one.__name__ for one in kind.__mro__ if one.__name__.endswith("Processor"))
            raise RowError(
                f"it has a video, and {name} has tokens of its own for videos, which are not supported",
                "write some of its frames as pictures, in the column images, or remove the row",
            )

    def _spread(self, pictures: Sequence[PictureSource]) -> list[PictureSource]:
        numbers = sampled(len(pictures), seconds=None, fps=None, most=self._sampling.max)
        return [pictures[number] for number in numbers]

    def _extracted(self, origin: VideoOrigin) -> list[str]:
        key = json.dumps([asdict(origin), self._sampling.fps, self._sampling.max])
        note = self._kept.directory / "videos" / hashlib.sha256(key.encode()).hexdigest()
        try:
            known: list[str] = read_json(note)["frames"]
        except (OSError, ValueError, KeyError, TypeError):
            known = []
        if known and all(Path(file).is_file() for file in known):
            return known
        request = FrameRequest(origin.path, self._sampling.fps, self._sampling.max, str(self._kept.directory))
        frames = self._decoder.frames(request)
        if isinstance(frames, Broken):
            raise _unusable(origin.name, frames.why)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"frames": frames})
        return frames


def _in_directory(path: Path, name: str) -> list[PictureSource]:
    files = [file for file in path.iterdir() if file.suffix.lower() in _PICTURES]
    if not files:
        raise _unusable(name, f"the directory has no {', '.join(_PICTURES)} file")
    ordered = sorted(files, key=lambda file: _natural(file.name))
    return [PictureSource(str(file), None, f"{name}/{file.name}") for file in ordered]


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which frame_2 is before frame_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _unusable(name: str, why: str) -> RowError:
    return RowError(f"the video {name} cannot be used: {why}", "replace the video, or remove the row")

"""Videos of rows as frames: a clip for a model with tokens of videos; for others they are pictures,
one after the other.

A video is a file (see film), a directory of pictures in the order of their names, where numbers are
compared as such, or a list of pictures. What was sampled from a file is kept in the cache:

    CACHE/pictures/videos/SHA256   the frames, by path, size, time and sampling
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unisono.base.files import read_json, write_json
from unisono.trainer.config.sections import FramesSection
from unisono.trainer.data import Clip, PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, DecoderProcess
from unisono.trainer.data.pictures.film import FrameRequest, KeptFrames, sampled
from unisono.trainer.data.pictures.kept_bytes import KeptBytes
from unisono.trainer.data.pictures.processor import EXTRA, PictureProcessor, named_class

_USUAL_FPS = 2.0
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
        self._processor = processor
        self._decoder = DecoderProcess()

    def sources(
        self, pictures: Sequence[PictureSource], name: str, bound: Callable[[PictureSource], PictureSource]
    ) -> list[PictureSource]:
        """A video as the model reads it: with tokens of its own, or its frames as pictures.

        Args:
            pictures: one that is a file or a directory of frames, or each frame.
            name: of the video, for messages.
            bound: adds the bounds of pixels of the row.

        Raises:
            RowError: if it cannot be read, or only with torchvision.
        """
        if self._processor.lacks_videos:
            kind = named_class(self._processor.processor)
            raise RowError(
                f"it has a video, and {kind} reads videos with torchvision, which is not installed", EXTRA
            )
        clip = self._clip(pictures, name)
        most, least = self._sampling.pixels.max, self._sampling.pixels.min
        frames = [bound(replace(one, most_pixels=most, least_pixels=least)) for one in clip.frames]
        if self._processor.video_placeholder is None:
            return frames
        return [PictureSource(None, None, name, clip=replace(clip, frames=tuple(frames)))]

    def _clip(self, pictures: Sequence[PictureSource], name: str) -> Clip:
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
        kept = self._extracted(self.origins[str(path)])
        frames = [PictureSource(file, None, f"{name} frame {i}") for i, file in enumerate(kept.files, 1)]
        even = self._evenly(frames, range(len(frames)), len(frames))
        return replace(even, times=tuple(kept.times), seconds=kept.seconds) if kept.seconds else even

    def close(self) -> None:
        """Ends the process that decodes."""
        self._decoder.close()

    def _spread(self, pictures: Sequence[PictureSource]) -> Clip:
        numbers = sampled(len(pictures), seconds=None, fps=None, most=self._sampling.max)
        return self._evenly([pictures[number] for number in numbers], numbers, len(pictures))

    def _evenly(self, frames: Sequence[PictureSource], numbers: Sequence[int], total: int) -> Clip:
        """A clip whose frames have no times: `fps` of them are a second, as in LLaMA-Factory."""
        rate = self._sampling.fps or _USUAL_FPS
        return Clip(tuple(frames), tuple(number / rate for number in numbers), total / rate)

    def _extracted(self, origin: VideoOrigin) -> KeptFrames:
        key = json.dumps([asdict(origin), self._sampling.fps, self._sampling.max])
        note = self._kept.directory / "videos" / hashlib.sha256(key.encode()).hexdigest()
        with contextlib.suppress(OSError, ValueError, TypeError):  # none, or of an earlier version
            known = KeptFrames(**read_json(note))
            if all(Path(file).is_file() for file in known.files):
                return known
        request = FrameRequest(origin.path, self._sampling.fps, self._sampling.max, str(self._kept.directory))
        frames = self._decoder.frames(request)
        if isinstance(frames, Broken):
            raise _unusable(origin.name, frames.why)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, asdict(frames))
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

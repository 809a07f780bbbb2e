"""Frames of a video: an animated GIF or WebP through Pillow, an MP4, MOV, MKV, WebM or AVI file
through PyAV. Only the frames that are sampled are kept.
"""

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.base.files import open_plain
from unisono.base.text import one_line
from unisono.trainer.data.pictures.decoding import MOST_PIXELS, BadPictureError, upright_rgb
from unisono.trainer.data.pictures.kept_bytes import KeptBytes

MOST_FRAMES = 20_000
"""A video with more is refused."""
_CONTAINERS = ((4, b"ftyp", "mov"), (0, b"\x1aE\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))
"""Where a file has which bytes, and what FFmpeg calls its format. Others are refused, since some
name further files and URLs.
"""
_EXTRA = "pip install 'unisono[video]'"


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """Which frames of a video are kept.

    Attributes:
        path: of its file.
        fps: frames of a second; None: `most`, whatever its duration.
        most: frames.
        directory: of KeptBytes.
    """

    path: str
    fps: float | None
    most: int
    directory: str

    def to_json(self) -> str:
        """Its fields."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class KeptFrames:
    """The sampled frames of a video.

    Attributes:
        files: of the frames, as PNG.
        times: of each, in seconds after the first frame of the video; empty: not known.
        seconds: of the video; None: not known.
    """

    files: list[str]
    times: list[float]
    seconds: float | None


def keep_frames(request: FrameRequest) -> KeptFrames:
    """The sampled frames, in files.

    Raises:
        BadPictureError: if the video cannot be decoded.
    """
    kept = KeptBytes(Path(request.directory))
    path = Path(request.path)
    try:
        with open_plain(path) as stream:
            head = stream.read(16)
        reader = _animation if _is_animation(head) else partial(_film, head=head)
        return reader(path, request, lambda frame: str(kept.keep(_png(frame))))
    except OSError as error:
        raise BadPictureError(f"it cannot be read: {error.strerror or error}") from error


def sampled(total: int, *, seconds: float | None, fps: float | None, most: int) -> list[int]:
    """The numbers of the frames that are used, from 0, evenly over all: LLaMA-Factory's rule.

    Args:
        total: frames of the video.
        seconds: its duration; None: not known.
        fps: frames of a second that are used; None: as many as `most` allows.
        most: frames.
    """
    count = min(total, most)
    if fps is not None and seconds is not None:
        count = min(count, max(1, int(seconds * fps)))
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def _is_animation(head: bytes) -> bool:
    return head.startswith(b"GIF8") or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")


def _png(frame: Any) -> bytes:
    out = io.BytesIO()
    frame.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _refuse_large(width: int, height: int, frames: int) -> None:
    if width * height > MOST_PIXELS or frames > MOST_FRAMES:
        raise BadPictureError(
            f"{frames} frames of {width} × {height} pixels are more than {MOST_FRAMES} of {MOST_PIXELS}"
        )


def _animation(path: Path, request: FrameRequest, keep: Callable[[Any], str]) -> KeptFrames:
    from PIL import Image

    try:
        with open_plain(path) as file, Image.open(file, formats=("GIF", "WEBP")) as image:
            animation: Any = image  # a still picture has one frame
            total = int(getattr(animation, "n_frames", 1))
            _refuse_large(animation.width, animation.height, total)
            *begins, end = _begins(animation, total)
            seconds = end or None
            numbers = sampled(total, seconds=seconds, fps=request.fps, most=request.most)
            files = []
            for number in numbers:
                animation.seek(number)
                files.append(keep(upright_rgb(animation)))
    except BadPictureError:
        raise
    except Exception as error:  # Pillow passes on errors of its decoders
        raise BadPictureError(f"it is truncated or damaged: {type(error).__name__}: {error}") from error
    return KeptFrames(files, [begins[number] for number in numbers] if seconds else [], seconds)


def _begins(animation: Any, total: int) -> list[float]:
    """When each frame of an animation begins, and when the last one ends, in seconds; zeros if
    they have no times.
    """
    begins = [0.0]
    for number in range(total):
        animation.seek(number)
        animation.load()  # a WebP file has the time of a frame then
        begins.append(begins[-1] + float(animation.info.get("duration") or 0) / 1000)
    return begins


def _film(path: Path, request: FrameRequest, keep: Callable[[Any], str], *, head: bytes) -> KeptFrames:
    container = next((name for at, mark, name in _CONTAINERS if head[at:].startswith(mark)), None)
    if container is None:
        raise BadPictureError("it is not a GIF, WebP, MP4, MOV, MKV, WebM or AVI video")
    if find_spec("av") is None:
        raise BadPictureError(f"videos of this format are read with PyAV: {_EXTRA}")
    import av

    try:
        times, seconds = _times(path, container)
        numbers = sampled(len(times), seconds=seconds, fps=request.fps, most=request.most)
        files = [keep(frame) for frame in _decoded(path, container, numbers)]
    except av.error.FFmpegError as error:
        why = one_line(str(error.strerror or error), limit=100)
        raise BadPictureError(f"it is truncated or damaged: {why}") from error
    return KeptFrames(files, [times[number] for number in numbers] if seconds else [], seconds)


def _times(path: Path, container: str) -> tuple[list[float], float | None]:
    """When each frame of a video is, from the first one on, and its duration, in seconds; None: not
    known. Frames are counted, since many files do not say how many they have, or say it wrong.
    """
    import av

    with open_plain(path) as file, av.open(file, format=container) as opened:
        if not opened.streams.video:
            has_sound = bool(opened.streams.audio)
            raise BadPictureError("it has no pictures, only sound" if has_sound else "it has no pictures")
        stream = opened.streams.video[0]
        usual = 1 / float(stream.average_rate) if stream.average_rate else 0.0
        times: list[float | None] = []
        end = 0.0
        for frame in opened.decode(stream):
            times.append(frame.time)
            _refuse_large(frame.width, frame.height, len(times))
            lasts = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else usual
            end = max(end, (frame.time or 0.0) + lasts)
        if not times:
            raise BadPictureError("it has no frame that can be decoded")
        listed = _listed_seconds(opened, stream)
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return [0.0] * len(times), None
    first = known[0]
    if listed is not None and end + usual / 2 < 0.99 * listed:
        seconds = f"{end:.2f} of {listed:.2f} seconds"
        raise BadPictureError(f"it is truncated: it has {len(times)} frames, in {seconds}")
    return [time - first for time in known], end - first


def _listed_seconds(opened: Any, stream: Any) -> float | None:
    """When the frames of a video end by its file; None: it does not say. The number of frames in a
    file does not count: of a film that was trimmed on a phone some are never shown.
    """
    if stream.duration is not None:
        return float((stream.duration + (stream.start_time or 0)) * stream.time_base)
    clock = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if clock:  # of Matroska
        hours, minutes, seconds = map(float, clock.groups())
        return hours * 3600 + minutes * 60 + seconds
    return opened.duration / 1e6 if opened.duration and len(opened.streams) == 1 else None


def _decoded(path: Path, container: str, numbers: Sequence[int]) -> Iterator[Any]:
    import av

    chosen = set(numbers)
    with open_plain(path) as file, av.open(file, format=container) as opened:
        for number, frame in enumerate(opened.decode(opened.streams.video[0])):
            if number in chosen:
                image = frame.to_image()
                turned = int(frame.rotation or 0)  # counterclockwise, as that of Pillow
                yield image.rotate(turned, expand=True) if turned else image
            if number >= numbers[-1]:
                return

"""Pictures from bytes: decoded within bounds, upright, in RGB. Needs Pillow, no torch."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unisono.base.files import open_plain

MOST_PIXELS = 89_478_485
"""A larger picture is refused before it is decoded, as a possible decompression bomb: the limit at
which Pillow warns.
"""
MOST_BYTES = 1 << 28
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_NAMED = (
    (re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL), "a HEIC photo"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "an AVIF picture"),
    (re.compile(rb"....ftyp|\x1aE\xdf\xa3", re.DOTALL), "a video"),
    (re.compile(rb"GIF8"), "a GIF picture"),
    (re.compile(rb"II\*\0|MM\0\*"), "a TIFF picture"),
    (re.compile(rb"%PDF"), "a PDF document"),
    (re.compile(rb"(\xff\x0a|\0\0\0\x0cJXL )"), "a JPEG XL picture"),
    (re.compile(rb"8BPS"), "a Photoshop file"),
    (re.compile(rb"PK\x03\x04"), "a ZIP archive"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS, not the file itself"),
    (re.compile(rb"\s*(<\?xml.{0,400}?)?(<!--.{0,400}?-->\s*)?(<!DOCTYPE svg.{0,400}?)?<svg", re.DOTALL),
     "an SVG drawing"),
    (re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE), "an HTML page"),
)  # fmt: skip
"""First bytes of what people take for pictures, and what it is."""


class BadPictureError(Exception):
    """A picture cannot be used; the text is the reason."""


def read_picture_file(path: Path) -> bytes:
    """The bytes of a picture's file.

    Raises:
        BadPictureError: if it cannot be read, or is too large.
    """
    try:
        with open_plain(path) as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadPictureError(f"it cannot be read: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise BadPictureError(f"the file has more than {MOST_BYTES >> 20} MiB")
    return data


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of a picture after the rotation that its EXIF data ask for; it is decoded
    completely.

    Raises:
        BadPictureError: if it cannot be decoded.
    """
    with decoding(data) as image:
        width, height = image.size
        turned = _orientation(image) >= 5
    return (height, width) if turned else (width, height)


@contextlib.contextmanager
def decoding(data: bytes, *, smallest: tuple[int, int] | None = None) -> Iterator[Any]:
    """A decoded picture.

    With `smallest` a JPEG is decoded at a fraction of its size that is not below it.

    Raises:
        BadPictureError: if it cannot be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image: Any = Image.open(io.BytesIO(data), formats=_FORMATS)
            _refuse_bomb(image)
            if smallest is not None:
                image.draft(None, smallest)
            image.load()
        except BadPictureError:
            raise
        except UnidentifiedImageError:
            raise BadPictureError(_unidentified(data)) from None
        except Exception as error:  # Pillow passes on errors of a dozen decoders
            if isinstance(error, Image.DecompressionBombError):
                raise BadPictureError(f"it may be a decompression bomb: {error}") from error
            raise BadPictureError(f"it is truncated or damaged: {type(error).__name__}: {error}") from error
        yield image


def _unidentified(data: bytes) -> str:
    """Why bytes are not a picture that is read."""
    if not data:
        return "the file is empty"
    kind = next((name for pattern, name in _NAMED if pattern.match(data)), None)
    readable = "it is not a PNG, JPEG, WebP or BMP picture"
    return readable if kind is None else f"{readable}: it is {kind}"


def _refuse_bomb(image: Any) -> None:
    if image.width * image.height > MOST_PIXELS:
        raise BadPictureError(
            f"{image.width} × {image.height} pixels are more than {MOST_PIXELS}: it may be a decompression bomb"
        )


def _orientation(image: Any) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF data: the picture counts as upright
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright_rgb(image: Any) -> Any:
    """A decoded picture in RGB, turned as its EXIF data ask for. Transparent parts are white, as
    sd-scripts has them.
    """
    return _upright(_rgb(image), _orientation(image))


def _rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):
        values = np.asarray(image).astype(np.float32)
        if image.mode != "I;16" and values.size and values.max() <= 255:
            values = values * 257
        return Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8), "L").convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        layers = image.convert("RGBA")
        ground = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, layers).convert("RGB")
    return image.convert("RGB")


def _upright(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image

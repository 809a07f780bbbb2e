"""Pictures that are broken or odd, each as a file would have it, with what is said about it."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

from tests.vision_models import draw

PLAIN = draw("red", "square")


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """The bytes of a picture in a format."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def _header(width: int, height: int, *, depth: int = 8, color: int = 2) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)


def _bomb() -> bytes:
    """A PNG of 10⁹ pixels in a few bytes."""
    return _png(_header(40_000, 25_000), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _jpeg(**options: Any) -> bytes:
    return saved(PLAIN, "JPEG", **options)


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(PLAIN, "JPEG", exif=exif)


PNG = saved(PLAIN, "PNG")
_NOT = "not a PNG, JPEG, WebP or BMP"
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.png": (lambda: b"", "empty"),
    "one-byte.png": (lambda: b"\x89", _NOT),
    "zeros.jpg": (lambda: bytes(1000), _NOT),
    "text.png": (lambda: b"this is not a picture", _NOT),
    "page.jpg": (lambda: b"<!DOCTYPE html><html>404</html>", "an HTML page"),
    "svg.png": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
    "svg-xml.svg": (lambda: b"<?xml version='1.0'?>\n<svg/>", "an SVG drawing"),
    "photo.heic": (lambda: b"\0\0\0\x18ftypheic" + bytes(64), "a HEIC photo"),
    "photo.jpg": (lambda: b"\0\0\0\x18ftypmif1" + bytes(64), "a HEIC photo"),
    "photo.avif": (lambda: b"\0\0\0\x1cftypavif" + bytes(64), "an AVIF picture"),
    "film.mp4": (lambda: b"\0\0\0\x18ftypisom" + bytes(64), "a video"),
    "film.webm": (lambda: b"\x1aE\xdf\xa3" + bytes(64), "a video"),
    "moving.gif": (lambda: saved(PLAIN, "GIF"), "a GIF picture"),
    "scan.tif": (lambda: saved(PLAIN, "TIFF"), "a TIFF picture"),
    "paper.pdf": (lambda: b"%PDF-1.7\n" + bytes(64), "a PDF document"),
    "new.jxl": (lambda: b"\xff\x0a" + bytes(64), "a JPEG XL picture"),
    "layers.psd": (lambda: b"8BPS" + bytes(64), "a Photoshop file"),
    "all.zip": (lambda: b"PK\x03\x04" + bytes(64), "a ZIP archive"),
    "pointer.png": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "half.png": (lambda: PNG[: len(PNG) // 2], "truncated or damaged"),
    "head.png": (lambda: PNG[:40], f"truncated or damaged|{_NOT}"),
    "half.jpg": (lambda: _jpeg()[: len(_jpeg()) // 2], "truncated or damaged"),
    "half.webp": (lambda: saved(PLAIN, "WEBP")[:60], "truncated or damaged"),
    "half.bmp": (lambda: saved(PLAIN, "BMP")[:2000], "truncated or damaged"),
    "flipped.png": (lambda: _flipped(PNG, 60), "truncated or damaged"),
    "checksum.png": (lambda: _flipped(PNG, 29), "truncated or damaged|" + _NOT),
    "bomb.png": (_bomb, "decompression bomb"),
    "no-size.png": (
        lambda: _png(_header(0, 0), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")),
        f"truncated or damaged|{_NOT}",
    ),
    "no-data.png": (lambda: _png(_header(10, 10), (b"IEND", b"")), "truncated or damaged"),
    "odd-depth.png": (
        lambda: _png(_header(4, 4, depth=7), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")),
        f"truncated or damaged|{_NOT}",
    ),
}
"""Names and contents of pictures that cannot be used, and words of the reason."""

ODD: dict[str, tuple[Callable[[], bytes], tuple[int, int]]] = {
    "cmyk.jpg": (lambda: saved(PLAIN.convert("CMYK"), "JPEG"), (96, 64)),
    "gray.jpg": (lambda: saved(PLAIN.convert("L"), "JPEG"), (96, 64)),
    "palette.png": (lambda: saved(PLAIN.convert("P"), "PNG"), (96, 64)),
    "bits.png": (lambda: saved(PLAIN.convert("1"), "PNG"), (96, 64)),
    "alpha.png": (lambda: saved(Image.new("RGBA", (96, 64), (255, 0, 0, 0)), "PNG"), (96, 64)),
    "gray-alpha.png": (lambda: saved(PLAIN.convert("LA"), "PNG"), (96, 64)),
    "deep.png": (lambda: saved(Image.new("I;16", (96, 64), 40_000), "PNG"), (96, 64)),
    "turned.jpg": (lambda: _turned(6), (64, 96)),
    "mirrored.jpg": (lambda: _turned(2), (96, 64)),
    "odd-orientation.jpg": (lambda: _turned(77), (96, 64)),
    "progressive.jpg": (lambda: _jpeg(progressive=True), (96, 64)),
    "one-pixel.png": (lambda: saved(Image.new("RGB", (1, 1)), "PNG"), (1, 1)),
    "strip.png": (lambda: saved(Image.new("RGB", (400, 3)), "PNG"), (400, 3)),
    "wrong-suffix.png": (_jpeg, (96, 64)),
}
"""Names and contents of odd pictures that are used, and their upright size."""

"""Folders of pictures with captions, as sd-scripts has them: `4_name/picture.png` with
`picture.txt`, used four times an epoch.

Every file is a picture or its caption, or is dropped or bad, and the ledger says why. Without
torch.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from unisono.base.errors import DataError, UsageError
from unisono.base.files import iterate_lines, open_plain, parse_json
from unisono.base.text import one_line
from unisono.trainer.config.sections import DiffusionSection, PicturesSection
from unisono.trainer.data.pictures.decoding import (
    BadPictureError,
    decoding,
    read_picture_file,
    upright_rgb,
    upright_size,
)
from unisono.trainer.families.pictures.captions import plain_caption

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".bmp")
CAPTION_SUFFIXES = (".txt", ".caption")
_OTHERS = (".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".svg", ".psd")
_MOST_CAPTION_BYTES = 1 << 16
_MOST_ENLARGED = 4.0
_REPEATS = re.compile(r"^(\d{1,6})_(.*)$")
METADATA = "metadata.jsonl"

Pixels = npt.NDArray[np.uint8]


def need_pillow() -> Any:
    """The module PIL.Image.

    Raises:
        UsageError: if Pillow or diffusers is not installed.
    """
    import importlib.util

    missing = [
        name
        for name, module in (("diffusers", "diffusers"), ("pillow", "PIL"))
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise UsageError.of(
            f"objective: diffusion needs {' and '.join(missing)}",
            where="objective",
            why="these packages are not installed",
            fix="pip install 'unisono[diffusion]'",
        )
    from PIL import Image

    return Image


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that can be trained on.

    Attributes:
        path: on this machine.
        name: as in the config and relative to its folder, for messages and the ledger.
        caption: its text, as `plain_caption` gives it.
        repeats: how often it occurs in an epoch.
        width: pixels, after the rotation that its EXIF data ask for.
        height: likewise.
        digest: the xxh3-128 of the file.
        source: number of its folder in the config.
        relative: its path in that folder.
        is_prior: whether it is a regularization picture.
        size: width and height of its bucket.
        unread_lines: lines of its caption file after the caption.
        written: its caption as it is written, of which each use in training has its own.
    """

    path: Path
    name: str
    caption: str
    repeats: int
    width: int
    height: int
    digest: str
    source: int
    relative: str
    is_prior: bool = False
    size: tuple[int, int] = (0, 0)
    unread_lines: int = 0
    written: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A file that is not used: `what` is bad or dropped.

    Attributes:
        is_picture: whether it may have been meant to be trained on, so that a warning counts it.
    """

    name: str
    source: int
    what: str
    why: str
    is_picture: bool = True


@dataclass
class FolderScan:
    """The pictures of all folders, in order, and the files that are not used."""

    pictures: list[Picture] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)


def list_files(root: Path) -> Iterator[tuple[Path, int | None, str]]:
    """Each file of a folder of pictures with its repeats and its folder's name; None where the
    folder's name has no number.

    Links to directories are not followed: a linked directory is given as a file.
    """
    for entry in _entries(root):
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path), 1, root.name
            continue
        match = _REPEATS.match(entry.name)
        for path in _files_below(Path(entry.path)):
            yield path, int(match[1]) if match else None, match[2] if match else entry.name


def _files_below(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        else:
            yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted((entry for entry in items if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise DataError.of(
            f"the folder {folder} cannot be read",
            where=str(folder),
            why=error.strerror or str(error),
            fix="check the path and its permissions",
        ) from error


def read_folder(
    named: str,
    section: DiffusionSection,
    *,
    source: int,
    is_prior: bool,
    key: str,
    decoded: dict[str, list[int] | str],
    own: PicturesSection | None = None,
) -> FolderScan:
    """The pictures of a folder, each decoded once, and the files that are not used.

    Args:
        named: the folder, as in the config.
        section: `diffusion` of the config, as it is for this folder.
        source: its number.
        is_prior: whether it has regularization pictures.
        key: its config key, for messages.
        decoded: size or fault of pictures by their digest, from earlier runs; new ones are added.
        own: what only a source has: `flat` and `caption`.

    Raises:
        DataError: if there is no such folder.
    """
    own = own or PicturesSection()
    root = Path(named).expanduser()
    if not root.is_dir():
        raise DataError.of(
            f"there is no folder of pictures {named}" if not root.exists() else f"{named} is not a folder",
            where=key,
            why="pictures are read from a folder, e.g. `4_name/picture.png` with `picture.txt`",
            fix="check the path; relative paths start at the working directory",
        )
    scan = FolderScan()
    inside = root.resolve()
    captions = _Captions(section, folder_names=section.folder_captions or is_prior, usual=own.caption)
    others: list[Path] = []
    stems: set[Path] = set()  # of pictures, used or not
    for path, repeats, folder in list_files(root):
        relative = path.relative_to(root).as_posix()
        name = f"{named.rstrip('/')}/{relative}"
        suffix = path.suffix.lower()
        is_link_to_folder = path.is_symlink() and path.is_dir()
        if suffix in (*SUFFIXES, *_OTHERS):
            stems.add(path.with_suffix(""))
        if suffix in _OTHERS:
            scan.lost.append(
                Lost(name, source, "dropped", f"{suffix} files are not read; save it as PNG, JPEG or WebP")
            )
        if suffix not in SUFFIXES and not is_link_to_folder:
            others += [path] if suffix not in _OTHERS else []
            continue
        why = _why_left_out(path, root, repeats, is_flat=own.flat)
        if why is not None:
            scan.lost.append(Lost(name, source, "dropped", why))
            continue
        try:
            _refuse_link(path, inside)
            width, height, digest = probe(path, decoded)
            text, unread = captions.of(path, folder, root)
            written = " ".join(filter(None, (section.caption_prefix, text, section.caption_suffix)))
            caption = plain_caption(written, section)
        except BadPictureError as error:
            scan.lost.append(Lost(name, source, "bad", one_line(str(error), limit=200)))
            continue
        picture = Picture(
            path, name, caption, repeats or 1, width, height, digest, source, relative, is_prior
        )
        scan.pictures.append(replace(picture, unread_lines=unread, written=written))
    used = {picture.path.with_suffix("") for picture in scan.pictures}
    for path in [*others, *_hidden_below(root)]:
        lost = captions.why_unused(path, stems - used, used)
        if lost is not None:
            why, is_picture = lost
            name = f"{named.rstrip('/')}/{path.relative_to(root).as_posix()}"
            scan.lost.append(Lost(name, source, "dropped", why, is_picture))
    return scan


def _why_left_out(path: Path, root: Path, repeats: int | None, *, is_flat: bool) -> str | None:
    """Why a picture is not used because of where it is; None: it is used."""
    if is_flat:
        return None if path.parent == root else "it is in a folder inside, and `flat` takes none of them"
    if repeats is None:
        return "the name of its folder does not begin with a number of repeats, e.g. 4_name"
    return "its folder has 0 repeats" if repeats == 0 else None


def _hidden_below(root: Path) -> Iterator[Path]:
    """Files and directories whose names begin with a dot, which `list_files` leaves out."""
    for folder, directories, files in os.walk(root):
        yield from (Path(folder, name) for name in sorted([*directories, *files]) if name.startswith("."))
        directories[:] = [name for name in directories if not name.startswith(".")]


def _refuse_link(path: Path, inside: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise BadPictureError(f"the link cannot be followed: {error}") from error
    if not target.is_relative_to(inside):
        raise BadPictureError(f"it is a symlink out of the folder, to {target}")
    if target.is_dir():
        raise BadPictureError("it is a directory" if not path.is_symlink() else "it is a link to a directory")


class _Captions:
    """Finds captions: beside the picture, or in metadata.jsonl of its folder or of the folder
    above.
    """

    def __init__(self, section: DiffusionSection, *, folder_names: bool, usual: str | None) -> None:
        self._section = section
        self._folder_names, self._usual = folder_names, usual
        self._tables: dict[Path, dict[str, str]] = {}
        self._read: set[Path] = set()

    def of(self, path: Path, folder: str, root: Path) -> tuple[str, int]:
        """The caption of a picture, and how many lines of its file follow.

        Raises:
            BadPictureError: if there is none, or it is empty.
        """
        for extension in self._section.caption_extensions:
            file = path.with_suffix(extension)
            if file.is_file():
                self._read.add(file)
                return _read_caption(file, all_lines=self._section.wildcards)
        for place in (path.parent, root):
            caption = self._table(place).get(path.relative_to(place).as_posix())
            if caption is not None:
                lines = _nonblank(caption) if self._section.wildcards else [caption]
                return _refuse_empty("\n".join(lines), METADATA), 0
        if self._usual is not None:
            return self._usual, 0
        if self._folder_names:
            return folder, 0
        extensions = " or ".join(self._section.caption_extensions)
        raise BadPictureError(
            f"no caption: there is no {path.stem} with {extensions}, and no entry in {METADATA}"
        )

    def why_unused(self, path: Path, lost: set[Path], used: set[Path]) -> tuple[str, bool] | None:
        """Why a file that is no picture is not used, and whether a warning counts it; None: it is,
        or its picture accounts for it.

        Args:
            path: of the file.
            lost: paths of pictures that are not used, without suffixes.
            used: those of the others.
        """
        stem, suffix = path.with_suffix(""), path.suffix.lower()
        if path in self._read or (path.name == METADATA and path.parent in self._tables):
            return None
        if path.name.startswith("."):
            return "its name begins with a dot", False
        if path.name == METADATA:
            return "its pictures have captions in other files", False
        extensions = self._section.caption_extensions
        has_own = any(path.with_suffix(extension) in self._read for extension in extensions)
        if suffix in CAPTION_SUFFIXES and suffix not in extensions and stem in used and not has_own:
            return f"captions are read from {' and '.join(extensions)} files (caption_extensions)", True
        if path.suffix not in extensions:
            return f"{suffix or 'such'} files are neither pictures nor captions", False
        if stem in lost:
            return None
        if stem in used:
            return "its picture has its caption in another file", True
        return "a caption without a picture of its name", True

    def _table(self, folder: Path) -> dict[str, str]:
        if folder not in self._tables:
            self._tables[folder] = _read_metadata(folder / METADATA)
        return self._tables[folder]


def _read_caption(file: Path, *, all_lines: bool) -> tuple[str, int]:
    """The first line of a caption file, or all of them, as sd-scripts reads it, and the number of
    those after it; blank lines do not count.
    """
    try:
        with open_plain(file) as stream:
            data = stream.read(_MOST_CAPTION_BYTES + 1)
    except OSError as error:
        raise BadPictureError(f"its caption {file.name} cannot be read: {error.strerror or error}") from error
    if len(data) > _MOST_CAPTION_BYTES:
        raise BadPictureError(f"its caption {file.name} has more than {_MOST_CAPTION_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadPictureError(f"its caption {file.name} is not UTF-8") from None
    lines = _nonblank(text)
    read = lines if all_lines else lines[:1]
    return _refuse_empty("\n".join(read), file.name), len(lines) - len(read)


def _nonblank(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _refuse_empty(caption: str, name: str) -> str:
    if not caption:
        raise BadPictureError(f"its caption in {name} is empty")
    return caption


def _read_metadata(file: Path) -> dict[str, str]:
    """Captions by file name; lines of another form are ignored, so that their pictures have no
    caption.
    """
    captions: dict[str, str] = {}
    if not file.is_file():
        return captions
    for line in iterate_lines(file):
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            text = row.get("text", row.get("caption", row.get("prompt"))) if isinstance(row, dict) else None
            if isinstance(text, str) and isinstance(row.get("file_name"), str):
                captions[row["file_name"]] = text.strip()
    return captions


# ---- pixels


def probe(path: Path, decoded: dict[str, list[int] | str]) -> tuple[int, int, str]:
    """Width and height after rotation, and the digest of the file, which is decoded completely
    unless that has been done before.

    Args:
        path: of the file.
        decoded: size or fault of pictures by their digest; new ones are added.

    Raises:
        BadPictureError: if it cannot be decoded.
    """
    data = read_picture_file(path)
    digest = xxhash.xxh3_128(data).hexdigest()
    if digest not in decoded:
        try:
            decoded[digest] = list(upright_size(data))
        except BadPictureError as error:
            decoded[digest] = one_line(str(error), limit=200)
    known = decoded[digest]
    if not isinstance(known, list):
        raise BadPictureError(str(known))
    return int(known[0]), int(known[1]), digest


def read_pixels(path: Path, digest: str, size: tuple[int, int]) -> Pixels:
    """(height, width, 3): the picture upright, in RGB, resized to cover `size` and cut to it at the
    center.

    Transparent parts are white, as sd-scripts has them.

    Raises:
        BadPictureError: if it cannot be decoded, or has changed since its digest was made.
    """
    data = read_picture_file(path)
    if xxhash.xxh3_128(data).hexdigest() != digest:
        raise BadPictureError("it has changed since it was listed")
    with decoding(data, smallest=(max(size) * 2, max(size) * 2)) as image:
        return fit(upright_rgb(image), size)


def fit(image: Any, size: tuple[int, int]) -> Pixels:
    """The pixels of an RGB picture, resized to cover `size` (width, height), and cut to it at the
    center.
    """
    Image = need_pillow()  # noqa: N806
    scale = max(size[0] / image.width, size[1] / image.height)
    covered = max(size[0], round(image.width * scale)), max(size[1], round(image.height * scale))
    if covered != image.size:
        image = image.resize(covered, Image.Resampling.LANCZOS)
    left, top = (covered[0] - size[0]) // 2, (covered[1] - size[1]) // 2
    return np.asarray(image)[top : top + size[1], left : left + size[0]]


# ---- buckets


def bucket_sizes(resolution: tuple[int, int], section: DiffusionSection) -> list[tuple[int, int]]:
    """The sizes (width, height) that pictures can have, sorted: multiples of the step with at most
    the area of the resolution.
    """
    if not section.buckets:
        return [resolution]
    step, area = section.bucket_step, resolution[0] * resolution[1]
    side = int(area**0.5) // step * step
    sizes = {(side, side)} if side else {resolution}
    for width in range(-(-section.min_side // step) * step, section.max_side + 1, step):
        height = min(section.max_side, area // width // step * step)
        if height >= section.min_side:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def own_size(
    picture: Picture, resolution: tuple[int, int], section: DiffusionSection
) -> tuple[int, int] | None:
    """The size of a picture that is not enlarged: its own, reduced to the area of the resolution,
    in multiples of the step.

    None if too small.
    """
    step = section.bucket_step
    scale = min(1.0, (resolution[0] * resolution[1] / (picture.width * picture.height)) ** 0.5)
    size = int(picture.width * scale) // step * step, int(picture.height * scale) // step * step
    return size if min(size) >= step else None


def with_bucket(
    picture: Picture, sizes: Sequence[tuple[int, int]], resolution: tuple[int, int], section: DiffusionSection
) -> Picture:
    """The picture with the size whose aspect ratio is nearest to its own, of equally near ones the
    larger.

    Raises:
        BadPictureError: if it would have to be enlarged too much.
    """
    if section.buckets and not section.upscale:
        kept = own_size(picture, resolution, section)
        if kept is None:
            raise BadPictureError(
                f"too small: {picture.width} × {picture.height} pixels are less than one step of {section.bucket_step}"
            )
        return replace(picture, size=kept)
    ratio = picture.width / picture.height
    size = min(sizes, key=lambda s: (abs(np.log(s[0] / s[1] / ratio)), -s[0] * s[1]))
    scale = max(size[0] / picture.width, size[1] / picture.height)
    if scale > _MOST_ENLARGED:
        raise BadPictureError(
            f"too small: {picture.width} × {picture.height} pixels would be enlarged {scale:.1f} times for"
            f" {size[0]} × {size[1]}; the limit is {_MOST_ENLARGED:g}"
        )
    return replace(picture, size=(int(size[0]), int(size[1])))


def caption_digest(caption: str) -> str:
    """The digest of a caption."""
    return hashlib.sha256(caption.encode()).hexdigest()[:32]

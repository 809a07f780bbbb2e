"""The directories that the page may read and write: paths below them, and uploads into them."""

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.files import path_below
from unisono.base.text import show_bytes

UPLOAD_BYTES = 8 << 30
_MOST_LISTED = 500


class Folders:
    """The allowed directories. Relative paths are relative to the first one.

    Attributes:
        roots: real paths; the first one gets the studio's own files and new runs.
    """

    def __init__(self, roots: list[Path]) -> None:
        self.roots = tuple(dict.fromkeys(root.resolve() for root in roots))

    @property
    def first(self) -> Path:
        """The directory of new runs."""
        return self.roots[0]

    @property
    def state(self) -> Path:
        """The directory of the studio's own files."""
        return self.first / "studio"

    def holds(self, path: Path) -> bool:
        """Whether a path, after all links, is below an allowed directory."""
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(root) for root in self.roots)

    def inside(self, text: str) -> Path:
        """The absolute path that a person named.

        Raises:
            UsageError: if it is outside of all allowed directories.
        """
        path = self.first / text
        if "\0" in text or not self.holds(path):
            raise UsageError.of(
                f"{text!r} is outside of the studio's directories",
                why=f"the studio reads and writes only below {', '.join(map(str, self.roots))}",
                fix="start it with `--root DIR` for that directory, too, or choose another path",
            )
        return Path(os.path.normpath(path))

    def shown(self, path: Path) -> str:
        """A path as configs have it: relative to the first directory if it is below it."""
        return str(path.relative_to(self.first)) if path.is_relative_to(self.first) else str(path)

    def list(self, text: str) -> dict[str, Any]:
        """The directories and files at a path; an empty one: of the first directory.

        Raises:
            UsageError: if it is outside, or cannot be listed.
        """
        folder = self.inside(text or ".")
        try:
            items = sorted(os.scandir(folder), key=lambda item: item.name.lower())
        except OSError as error:
            raise UsageError.of(
                f"{text} cannot be listed", why=error.strerror or str(error), fix="choose a directory"
            ) from error
        visible = [item for item in items if not item.name.startswith(".") and self.holds(Path(item.path))]
        files = [item for item in visible if item.is_file()]
        parent = folder.parent if folder not in self.roots else None
        return {
            "path": self.shown(folder),
            "parent": None if parent is None else self.shown(parent),
            "roots": [self.shown(root) for root in self.roots],
            "folders": [self._entry(item) for item in visible if item.is_dir()][:_MOST_LISTED],
            "files": [{**self._entry(item), "bytes": item.stat().st_size} for item in files[:_MOST_LISTED]],
        }

    def _entry(self, item: "os.DirEntry[str]") -> dict[str, Any]:
        return {"name": item.name, "path": self.shown(Path(item.path))}

    async def take_upload(self, name: str, chunks: AsyncIterator[bytes], *, most: int = UPLOAD_BYTES) -> Path:
        """Writes an uploaded file, which appears under its name when it is whole.

        Args:
            name: of the file, without directories; a number is added if it exists.
            chunks: its contents.
            most: bytes that are taken.

        Raises:
            UsageError: if the name is not one of a file, or it has more bytes.
        """
        folder = self.state / "uploads"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            target = path_below(folder, name, parts=1)
        except ValueError as error:
            raise UsageError.of(str(error), fix="rename the file") from None
        partial = folder / f".{secrets.token_hex(8)}.part"
        size = 0
        try:
            with partial.open("xb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > most:
                        raise UsageError.of(
                            f"{name} has more than {show_bytes(most)}",
                            fix="copy it below one of the studio's directories instead",
                        )
                    file.write(chunk)
            return _linked(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def _linked(partial: Path, target: Path) -> Path:
    """Gives a file its name, or the name with a number: nothing is overwritten."""
    number = 1
    while True:
        path = target if number == 1 else target.with_name(f"{target.stem}-{number}{target.suffix}")
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            number += 1
        else:
            return path

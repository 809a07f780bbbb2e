"""Adapters that clients load and unload while the server runs, as with vLLM: what the requests
have, and the directories that the operator allows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from unisono.base.errors import UsageError
from unisono.front.serve.protocol import ApiError, StrictObject

MOST_ADAPTERS = 32
"""That are served at once, if some are loaded while the server runs."""
_MOST_BYTES = 2 << 30  # of the files of one
_MOST_FILES = 1_000
_ABSENT = "there is no such directory in the folders of --adapter-folders"
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class LoadRequest(StrictObject):
    """`POST /v1/load_lora_adapter`."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4_096)]


class UnloadRequest(StrictObject):
    """`POST /v1/unload_lora_adapter`; `lora_int_id` is a number of vLLM without a meaning here."""

    lora_name: _Name
    lora_int_id: int | None = None


@dataclass(frozen=True)
class AdapterFolders:
    """Directories below which adapters may be loaded; `paths` are real ones."""

    paths: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folders: Iterable[Path], *, has_keys: bool) -> "AdapterFolders":
        """Those of --adapter-folders.

        Raises:
            UsageError: if one is not a directory, or clients need no key.
        """
        paths = [path.expanduser() for path in folders]
        missing = next((path for path in paths if not path.is_dir()), None)
        if missing is not None:
            raise UsageError.of(
                f"{missing} is not a directory", where="--adapter-folders", fix="name directories that exist"
            )
        if paths and not has_keys:
            raise UsageError.of(
                "there is no key",
                where="--adapter-folders",
                why="every program of this machine could load adapters",
                fix="add --key-file FILE",
            )
        return cls(tuple(path.resolve() for path in paths))

    def find(self, lora_path: str) -> Path:
        """The real path of an adapter; a relative one is below one of the folders.

        Raises:
            ApiError: if it is not there, or has links that lead elsewhere, or too many bytes. A
                client learns nothing of what is outside the folders.
        """
        for folder in self.paths:
            try:
                path = (folder / lora_path).resolve(strict=True)
                if not self._allows(path) or not path.is_dir():
                    continue
                self._refuse_files(path)
            except (OSError, RuntimeError, ValueError):  # links in a circle, and a NUL in the name
                continue
            return path
        raise refusal(_ABSENT)

    def _allows(self, path: Path) -> bool:
        return any(path != folder and path.is_relative_to(folder) for folder in self.paths)

    def _refuse_files(self, directory: Path) -> None:
        size = 0
        for number, file in enumerate(directory.rglob("*")):
            if number >= _MOST_FILES:
                raise refusal(f"the directory has more than {_MOST_FILES:,} files")
            if not self._allows(file.resolve(strict=True)):
                raise refusal("the directory has links that lead out of the folders of --adapter-folders")
            size += file.stat().st_size if file.is_file() else 0
        if size > _MOST_BYTES:
            raise refusal(f"the directory has more than {_MOST_BYTES >> 30} GiB")


def refusal(message: str) -> ApiError:
    """The error for a directory that cannot be loaded."""
    return ApiError(400, message, param="lora_path", code="invalid_adapter")

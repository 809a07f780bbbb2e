"""Where logs come from: files, directories, stdin, also compressed; each is a name and a stream of bytes."""

import gzip
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from unisono.files import open_given

STDIN = "-"
MOST_FILES = 4096
"""Of a directory; more are some data set's, not a run's."""
_NOT_LOGS = frozenset(
    [".py", ".pyc", ".so", ".pt", ".pth", ".bin", ".safetensors", ".arrow", ".parquet", ".npy", ".npz", ".png", ".svg", ".jpg", ".zip", ".tar", ".whl", ".model", ".tiktoken", ".lock", ".distcp", ".idx"]
)  # fmt: skip
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Source:
    """A log.

    Attributes:
        name: as it is shown: the shortest end of the path that tells it from the others.
        path: the file; None: stdin.
    """

    name: str
    path: Path | None

    @property
    def size(self) -> int:
        """Bytes on the disk, 0 where nobody knows."""
        try:
            return self.path.stat().st_size if self.path else 0
        except OSError:
            return 0

    @property
    def is_pipe(self) -> bool:
        """Whether it is a pipe with a name: that of a process substitution, or of mkfifo."""
        try:
            return self.path is not None and stat.S_ISFIFO(self.path.stat().st_mode)
        except OSError:
            return False

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """A stream of its bytes, decompressed.

        Raises:
            OSError: if it cannot be read.
        """
        if self.path is None:
            yield sys.stdin.buffer
            return
        with open_given(self.path) as raw:
            if raw.peek(2)[:2] != _GZIP_MAGIC:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked  # type: ignore[misc]  # read(n) is all that is asked of it


def find_sources(paths: list[str]) -> list[Source]:
    """The logs below these paths, in the order of their names.

    Raises:
        FileNotFoundError: if a path does not exist.
    """
    found: dict[Path, None] = {}
    stdin = False
    for path in paths:
        if path == STDIN or _is_stdin(Path(path)):
            stdin = True
        else:
            found.update(dict.fromkeys(_files(Path(path))))
    files = list(found)
    sources = [Source(name, path) for name, path in zip(_short_names(files), files, strict=True)]
    return [*([Source("stdin", None)] if stdin else []), *sources]


def _is_stdin(path: Path) -> bool:
    """Whether a path that is no plain file is another name of stdin: /dev/stdin, /dev/tty."""
    try:
        found = path.stat()
        return not stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(0))
    except OSError:
        return False


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise FileNotFoundError(path)
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            one = Path(folder) / name
            if one.suffix.lower() not in _NOT_LOGS and one.is_file():
                count += 1
                if count > MOST_FILES:
                    return
                yield one


def _short_names(paths: list[Path]) -> list[str]:
    """For each path the fewest of its last parts that no other path ends in."""
    names = []
    for path in paths:
        parts = path.parts
        length = next(
            (
                length
                for length in range(1, len(parts) + 1)
                if sum(other.parts[-length:] == parts[-length:] for other in paths) == 1
            ),
            len(parts),
        )
        names.append("/".join(parts[-length:]).lstrip("/") or str(path))
    return names

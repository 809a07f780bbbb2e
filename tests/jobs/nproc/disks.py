"""Disks that tests can fill, take away from writers, or have hang; all of them real file
systems.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import need

_LIMIT_S = 30.0


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Disk:
    """A mounted file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / ".filler"

    def fill(self, *, leave: int) -> None:
        """Takes all room but so many bytes."""
        with self._filler.open("ab", buffering=0) as file:
            while (free := self.free()) > leave:
                file.write(bytes(min(free - leave, 1 << 16)))

    def make_room(self) -> None:
        self._filler.unlink()

    def free(self) -> int:
        return shutil.disk_usage(self.path).free

    def read_only(self, *, on: bool) -> None:
        """As after an error of the device; refused by the kernel as long as somebody has a file
        open for writing.
        """
        limit = time.monotonic() + _LIMIT_S
        words = ("mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.path))
        while subprocess.run(words, capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < limit, "it stays busy"

    def hang(self) -> None:
        """Whoever writes waits in the kernel, and not even SIGKILL ends it."""
        run("fsfreeze", "-f", str(self.path))

    def answer(self) -> None:
        """Ends that."""
        subprocess.run(("fsfreeze", "-u", str(self.path)), capture_output=True, check=False)


@contextlib.contextmanager
def in_memory(path: Path, *, size: int) -> Iterator[Disk]:
    """A small disk at `path`."""
    need("mount", root=True)
    path.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        run("umount", "-l", str(path))


@contextlib.contextmanager
def on_a_device(path: Path, image: Path, *, size: int) -> Iterator[Disk]:
    """A disk that can hang: ext4 on a loop device."""
    need("mount", "mkfs.ext4", "fsfreeze", root=True)
    path.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    run("mkfs.ext4", "-q", str(image))
    made = subprocess.run(
        ("mount", "-o", "loop", str(image), str(path)), capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"needs loop devices: {made.stderr.strip()}")
    shutil.rmtree(path / "lost+found")
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.answer()
        run("umount", "-l", str(path))

"""What happens to a run's output_dir: its disk is full, or read-only, or it is removed. Disks are mounted for the run's processes alone, and go with them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from unisono.drill.ground import Ground, needs_root

_BYTES = 160 << 20  # unisono keeps 64 MiB free
_CHUNK_BYTES = 1 << 16


class SmallDisk(Ground):
    """This machine, with a file system in memory where the results go."""

    def why_not(self) -> str:
        """Mounts need root, and a system that allows them."""
        missing = needs_root("mounts", "unshare", "mount")
        if missing:
            return missing
        words = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return f"nothing can be mounted here: {done.stderr.strip()}" if done.returncode else ""

    def prepare(self, folder: Path) -> None:
        """Makes the place at which it will be mounted."""
        super().prepare(folder)
        (folder / "disk").mkdir()

    def output_dir(self) -> Path:
        """On the small disk."""
        return self.folder / "disk" / "out"

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The front gets mounts of its own first."""
        del node
        mount = f'mount -t tmpfs -o size={_BYTES},mode=0700 tmpfs "$1"; shift; exec "$@"'
        return ["unshare", "--mount", "sh", "-ec", mount, "disk", str(self.folder / "disk"), *words]

    def started(self, pids: Sequence[int]) -> None:
        """Its mounts are seen through the front."""
        self._inside = Path(f"/proc/{pids[0]}/root{self.folder / 'disk'}")

    def strike(self) -> None:
        """Takes all room that there is."""
        with (self._inside / "filler").open("ab", buffering=0) as file:
            size = _CHUNK_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2


class ReadOnlyDisk(SmallDisk):
    """The same disk, on which from some moment on nothing can be made or removed. Without root: directories that lose their write permission."""

    def why_not(self) -> str:
        """Without root there is nothing to mount."""
        return (super().why_not() or needs_root("mounts", "nsenter")) if os.geteuid() == 0 else ""

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """On a disk of its own, as root."""
        return super().words(node, words) if os.geteuid() == 0 else list(words)

    def started(self, pids: Sequence[int]) -> None:
        """Its mounts are reached through the front."""
        super().started(pids)
        self._front = pids[0]

    def strike(self) -> None:
        """Puts a read-only mount of the disk over it, since the kernel refuses to remount one on which files are open for writing."""
        disk = str(self.folder / "disk")
        if os.geteuid() == 0:
            mount = 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"'
            words = ["nsenter", "--target", str(self._front), "--mount", "sh", "-ec", mount, "disk", disk]
            subprocess.run(words, check=True, capture_output=True)
            return
        for folder in (self.output_dir(), self.output_dir() / "checkpoints"):
            folder.chmod(0o500)

    def close(self) -> None:
        """Gives the permission back, so that it can be cleared away."""
        for folder in (self.output_dir(), self.output_dir() / "checkpoints"):
            if os.geteuid() != 0 and folder.exists():
                folder.chmod(0o700)


class RemovedOutput(Ground):
    """This machine, on which somebody clears the run's directory away."""

    def strike(self) -> None:
        """As `rm -rf` does. What the run makes in that moment may stay."""
        shutil.rmtree(self.output_dir(), ignore_errors=True)

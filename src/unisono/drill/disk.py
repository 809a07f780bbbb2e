"""A small disk for a run's output_dir, that is then full. It is mounted for the run's processes alone, and goes with them."""

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

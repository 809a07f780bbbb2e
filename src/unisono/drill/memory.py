"""A control group whose memory becomes too little for the run in it."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from unisono.drill.ground import Ground, needs_root
from unisono.facts.limits import cgroup_folders

_SPARE_BYTES = 64 << 20
_PREFIX = "unisono-drill-"
_FILES = (
    ("memory.max", "memory.current", "memory.swap.max"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ""),
)
_CLOSE_S = 5.0


class MemoryGroup(Ground):
    """This machine, with a control group for the run."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Path | None = None
        self._files = _FILES[0]

    def why_not(self) -> str:
        """Control groups are root's, and in containers often nobody's."""
        missing = needs_root("control groups")
        if missing:
            return missing
        self._make()
        made = self._group is not None
        self.close()
        return "" if made else "no control group with a limit of memory can be made here"

    def prepare(self, folder: Path) -> None:
        """Makes the group, still without a limit."""
        super().prepare(folder)
        self._make()

    def started(self, pids: Sequence[int]) -> None:
        """The front goes into the group; its ranks are born in it."""
        assert self._group is not None
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    def strike(self) -> None:
        """Limits the memory to little more than is in use."""
        assert self._group is not None
        limit, used, swap = self._files
        if swap:
            with contextlib.suppress(OSError):  # not every kernel counts it
                (self._group / swap).write_text("0")
        (self._group / limit).write_text(str(int((self._group / used).read_text()) + _SPARE_BYTES))

    def close(self) -> None:
        """Takes the group away; the kernel lets go of it a moment after its last process."""
        until = time.monotonic() + _CLOSE_S
        while self._group is not None and self._group.is_dir() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                self._group.rmdir()
                break
            time.sleep(0.02)
        self._group = None

    def _make(self) -> None:
        """In the first place where it can be had: version 2, then 1."""
        for folder in cgroup_folders("memory"):
            _sweep(folder)
            group = folder / f"{_PREFIX}{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            self._group = group
            for files in _FILES:
                if (group / files[0]).exists():
                    self._files = files
                    return
            self.close()


def _sweep(folder: Path) -> None:
    """Groups of drills that were killed."""
    for old in folder.glob(f"{_PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
            with contextlib.suppress(OSError):
                old.rmdir()

"""A Ray node with little memory: a control group, which Ray's memory monitor there takes for the
machine's.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from unisono.guard.facts.limits import CGROUP_ROOT, cgroup_folders

LIMIT_BYTES = 6_000_000_000
THRESHOLD = 0.5
"""From here on the monitor kills; the kernel would only at the limit."""
_HOG_BYTES = 3_400_000_000
_CLOSE_S = 10.0
_V1, _V2 = ("memory.limit_in_bytes", "memory"), ("memory.max", "")
_HOG = """
import sys, time
open(sys.argv[1], "w").write("0")
held = bytearray(int(sys.argv[2]))
held[::4096] = b"x" * len(held[::4096])
print("held", flush=True)
sys.stdin.read()
"""


class SmallMemory:
    """A control group with a limit.

    Attributes:
        group: its folder; None where none can be made here.
    """

    def __init__(self) -> None:
        self.group: Path | None = None
        self._under = ""
        self._hog: subprocess.Popen[bytes] | None = None
        for folder in cgroup_folders("memory"):
            group = folder / f"unisono-test-{os.getpid()}-{secrets.token_hex(3)}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if self._limited(group):
                    self.group = group
                    return
                group.rmdir()

    def before(self) -> list[str]:
        """Words in front of a command: it is in the group, and sees it in place of the machine's
        root group.
        """
        assert self.group is not None
        # `ip netns exec` gives a node a /sys of its own, in which no control group is mounted.
        there = CGROUP_ROOT / self._under
        script = [
            "set -e", f"mount -t tmpfs none {CGROUP_ROOT}", f"mkdir -p {there}",
            f"mount -t {'cgroup -o memory' if self._under else 'cgroup2'} none {there}",
            f"echo $$ > {self.group}/cgroup.procs", f"mount --bind {self.group} {there}", 'exec "$@"',
        ]  # fmt: skip
        return ["bash", "-c", "\n".join(script), "small"]

    def fill(self) -> None:
        """A process of nobody's takes most of it, and keeps it."""
        assert self.group is not None
        words = [sys.executable, "-c", _HOG, str(self.group / "cgroup.procs"), str(_HOG_BYTES)]
        self._hog = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def free(self) -> None:
        """It gives it back."""
        if self._hog is not None:
            self._hog.kill()
            self._hog.communicate()
            self._hog = None

    def close(self) -> None:
        """Removes the cgroup, which the kernel releases a moment after its last process."""
        self.free()
        until = time.monotonic() + _CLOSE_S
        while self.group is not None and self.group.is_dir() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                self.group.rmdir()
            time.sleep(0.05)

    def _limited(self, group: Path) -> bool:
        for name, under in (_V1, _V2):
            if (group / name).exists():
                (group / name).write_text(str(LIMIT_BYTES))
                self._under = under
                return True
        return False

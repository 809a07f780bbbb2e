"""What becomes of a process's memory when it crashes (Linux)."""

import resource
from dataclasses import dataclass
from pathlib import Path

_PATTERN = Path("/proc/sys/kernel/core_pattern")


@dataclass(frozen=True, slots=True)
class CoreDumps:
    """How a crash is written down.

    Attributes:
        limit_bytes: of one dump (ulimit -c); None: as large as the process.
        to_file: whether the kernel writes a file; else a program takes it, which has limits of its own.
        pattern: where to, as the kernel has it; relative: into the working directory.
    """

    limit_bytes: int | None
    to_file: bool
    pattern: str


def read_core_dumps(*, pattern: Path = _PATTERN) -> CoreDumps:
    """Looks once."""
    soft = resource.getrlimit(resource.RLIMIT_CORE)[0]
    try:
        text = pattern.read_text().strip()
    except OSError:
        text = ""
    return CoreDumps(None if soft == resource.RLIM_INFINITY else soft, not text.startswith("|"), text)

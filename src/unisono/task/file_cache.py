"""What the kernel has of a file in memory, for those who want to know what is on the disk."""

import contextlib
import os
from pathlib import Path


def forget_cached(file: Path, *, flush: bool = False) -> None:
    """Lets the kernel drop what it has of a file in memory: what is read then comes from the disk.

    Args:
        file: the file.
        flush: whether what is not on the disk yet is written first; else the kernel keeps it.

    Raises:
        OSError: if it cannot be opened or written.
    """
    fd = os.open(file, os.O_RDONLY)
    try:
        if flush:
            os.fsync(fd)
        with contextlib.suppress(OSError):  # a file system that keeps nothing, or will not let go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

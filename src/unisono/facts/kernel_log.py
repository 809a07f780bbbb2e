"""The kernel's log, where it may be read (dmesg(1), /dev/kmsg): the NVIDIA driver writes its Xid errors there."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 8 << 20
_RECORD_BYTES = 8192
_RECORD = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>[^\n]*)")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line, and how many seconds ago it was written."""

    text: str
    age_s: float | None = None


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> list[KernelLine] | None:
    """All that the kernel still has, the oldest first; None where this user may not read it, or there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return list(_lines(_records(fd)))
    except PermissionError:
        return None
    finally:
        os.close(fd)


def _records(fd: int) -> list[str]:
    """Each read gives one record; one that was overwritten meanwhile is EPIPE, and the end is EAGAIN."""
    found: list[str] = []
    size = 0
    while size < _MOST_BYTES:
        try:
            data = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue
        if not data:
            break
        size += len(data)
        found.append(data.decode("utf-8", "replace"))
    return found


def _lines(records: list[str]) -> list[KernelLine]:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None
    found = []
    for record in records:
        matched = _RECORD.match(record)
        if matched:
            age_s = None if now_s is None else max(0.0, now_s - int(matched["us"]) / 1e6)
            found.append(KernelLine(matched["text"], age_s))
    return found

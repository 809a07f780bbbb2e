"""How a process ended that is somebody else's child."""

import fcntl
import os
import struct
from pathlib import Path

_INFO = struct.Struct(
    "=QQ11Ii"
)  # mask, cgroup, then pid, tgid, ppid and eight of user and group; the exit status
_GET_INFO = (
    (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
)  # PIDFD_GET_INFO, _IOWR(0xFF, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT; since Linux 6.15


def exit_status(pidfd: int, pid: int) -> int | None:
    """As a return code: negative for the signal that ended it. None where that cannot be known: its parent was quicker than we.

    Args:
        pidfd: of the process; it has ended.
        pid: of the same.
    """
    status = _by_pidfd(pidfd)
    if status is None:  # its parent has not taken it yet, or does just now: then the descriptor has it
        status = _by_proc(pid)
    if status is None:
        status = _by_pidfd(pidfd)
    return os.waitstatus_to_exitcode(status) if status is not None else None


def _by_pidfd(pidfd: int) -> int | None:
    """Kernels since 6.15 keep it as long as the descriptor is open, also after the parent has taken it."""
    asked = bytearray(_INFO.pack(_INFO_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, asked, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(asked)
    return int(status) if mask & _INFO_EXIT else None


def _by_proc(pid: int) -> int | None:
    """Until the parent has taken it: the last field of /proc/PID/stat, which is shown to its own user."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return int(fields[49]) if fields[0] == "Z" and len(fields) > 49 else None

"""A file system of FUSE that nobody serves.

As long as its device is open, who asks for anything in it waits in the kernel; from then on whoever
asks gets an error.
"""

import ctypes
import os
import stat
from pathlib import Path

DETACH = 2


def why_unavailable() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "needs root"
    return "" if Path("/dev/fuse").exists() else "needs /dev/fuse"


def mount(folder: Path, *, user: int = 0) -> int:
    """Mounts one; gives its device.

    Args:
        folder: where.
        user: whose it is; others, root included, are denied whatever they ask.

    Raises:
        OSError: if the system does not want it.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode={stat.S_IFDIR:o},user_id={user},group_id=0".encode()
    if _libc().mount(b"unserved", os.fsencode(folder), b"fuse.test", 0, options) != 0:
        number = ctypes.get_errno()
        os.close(device)
        raise OSError(number, os.strerror(number), str(folder))
    return device


def unmount(folder: Path) -> None:
    """Takes it out of the way at once, also where somebody waits in it."""
    _libc().umount2(os.fsencode(folder), DETACH)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

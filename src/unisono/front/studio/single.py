"""One studio for each directory: two would both work through its queue."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from unisono.base.errors import UsageError
from unisono.base.files import make_private_dir


@contextlib.contextmanager
def only_server(root: Path) -> Iterator[None]:
    """Holds the lock of the studio in a directory.

    Raises:
        UsageError: if a studio that runs has it.
    """
    folder = root / "studio"
    make_private_dir(folder)
    fd = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            raise UsageError.of(
                f"a studio is running in {root} already",
                where="--root",
                why=f"its process is {holder}; two would both work through the queue of runs",
                fix=f"use its page, or end it with `kill {holder}`",
            ) from None
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(fd)

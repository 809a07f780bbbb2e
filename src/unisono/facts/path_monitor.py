"""Monitors whether paths still lead to the same files. Runs in a child process, since storage can hang.

Run by path, stdlib only: python path_monitor.py PATH … It ends with its stdin. A line of JSON on stdout for each change: what is at each path,
`[device, inode]` or null, and where that is now which was there at the beginning, or null.
"""

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.2
Identity = tuple[int, int]
"""Device and inode."""


class PathState(NamedTuple):
    """State of a path.

    Attributes:
        identity: None for nothing.
        now_at: another path, at which that is now which was here at the beginning; None where it is removed, or that is not known.
    """

    identity: Identity | None
    now_at: str | None


class PathMonitor:
    """Checks paths several times per second until closed. A state seen only once is not reported."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""

    def poll(self) -> list[PathState] | None:
        """The state of the paths, if it has changed since the last call; else None. Never blocks."""
        assert self._process.stdout is not None
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not lines:
            return None
        return [
            PathState(tuple(identity) if identity else None, now_at)
            for identity, now_at in json.loads(lines[-1])
        ]

    def close(self) -> None:
        """Kills the child; one that hangs in the kernel is abandoned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        threading.Thread(target=self._process.wait, name="reap", daemon=True).start()


def identity_of(path: Path | str) -> Identity | None:
    """What is at a path; None for nothing.

    Raises:
        OSError: if that cannot be said.
    """
    try:
        found = Path(path).stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    return found.st_dev, found.st_ino


def main(paths: list[str]) -> None:
    """Watches until stdin ends."""
    held = [_open_path(path) for path in paths]
    reported, last = None, None
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        try:
            seen = [identity_of(path) for path in paths]
        except OSError:  # a network disk that is away for a moment says nothing of what is there
            continue
        if seen == last and seen != reported:
            reported = seen
            found = [
                (identity, _current_path(fd, path))
                for identity, fd, path in zip(seen, held, paths, strict=True)
            ]
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
        last = seen


def _open_path(path: str) -> int | None:
    """Keeps the inode from being given to something new, and can be asked where it is."""
    with contextlib.suppress(OSError):
        return os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    return None


def _current_path(fd: int | None, path: str) -> str | None:
    if fd is None:
        return None
    with contextlib.suppress(OSError):
        now, own = Path(f"/proc/self/fd/{fd}").readlink(), os.fstat(fd)
        if now != Path(path).resolve() and identity_of(now) == (own.st_dev, own.st_ino):
            return str(now)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])

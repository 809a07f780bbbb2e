"""Child processes of a front that touch storage, since storage can hang.

Run by path, stdlib only.

    python path_probes.py storage FOLDER [NAME-OF-A-FILE-TO-LOOK-FOR PATIENCE_S]

tests a folder's storage: a line of JSON a finding on stdout, each as soon as it is known.

    python path_probes.py watch PATH …

monitors whether paths still lead to the same files, and ends with its stdin: a line of JSON on
stdout for each change: what is at each path, `[device, inode]` or null, and where that is now which
was there at the beginning, or null.
"""

import contextlib
import errno
import json
import os
import resource
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TRIED_BYTES = 1 << 20
_NETWORK_TYPES = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "orangefs",
    "pvfs2",
    "wekafs",
    "panfs",
    "9p",
    "virtiofs",
    "ocfs2",
    "gfs2",
)


def try_storage(argv: list[str]) -> None:
    """Reports in this order: file system, free bytes, whether the file is there, whether the folder
    is writable.
    """
    report(file_system=file_system_of(Path(argv[0])))
    folder = Path(argv[0]).resolve()  # from here on the storage is touched
    kind = file_system_of(folder)
    report(file_system=kind)
    existing = nearest_folder(folder)
    if existing is None:
        report(writable=False, trouble=f"{folder} is below something that is not a directory")
        return
    stat = os.statvfs(existing)
    report(free_bytes=stat.f_bavail * stat.f_frsize)
    if len(argv) > 1:
        report(shared=wait_for_file(folder, argv[1], patience_s=float(argv[2]) if is_network(kind) else 0.0))
    try:
        try_writing(existing)
    except OSError as error:
        report(writable=False, trouble=f"{error.strerror or error} ({existing}){limit_that_was_met(error)}")
    else:
        report(writable=True)


def limit_that_was_met(error: OSError) -> str:
    """A note for a write that was refused by a limit of the process, not by the file system."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno != errno.EFBIG or limit == resource.RLIM_INFINITY:
        return ""
    return f": the file size limit is {limit} bytes, `ulimit -f unlimited` raises it"


def report(**finding: object) -> None:
    """Prints a finding immediately, since later ones may never come."""
    sys.stdout.write(json.dumps(finding) + "\n")
    sys.stdout.flush()


def nearest_folder(path: Path) -> Path | None:
    """The directory itself, or the nearest one above that exists; None where a file is in the
    way.
    """
    for candidate in (path, *path.parents):
        if candidate.is_dir():
            return candidate
        if candidate.exists():
            return None
    return None


def try_writing(folder: Path) -> None:
    """Writes, syncs, renames, reads back and removes a file.

    Raises:
        OSError: of the file system, or if the read-back differs.
    """
    first = folder / f".unisono-probe-{os.urandom(8).hex()}"
    second = first.with_suffix(".renamed")
    content = os.urandom(4096) * (_TRIED_BYTES // 4096)
    try:
        with first.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        first.replace(second)
        if second.read_bytes() != content:
            raise OSError(None, "read-back differs from what was written")
    finally:
        for file_name in (first, second):
            with contextlib.suppress(OSError):
                file_name.unlink()


def wait_for_file(folder: Path, name: str, *, patience_s: float) -> bool:
    """Whether a file with this name, which the head has left, is in the folder.

    Network file systems cache directories for seconds, so the file is looked for repeatedly.
    """
    limit = time.monotonic() + patience_s
    while not _listed(folder, name):
        if time.monotonic() >= limit:
            return False
        report(looked=name)
        time.sleep(0.2)
    return True


def _listed(folder: Path, name: str) -> bool:
    try:
        return name in os.listdir(folder)  # noqa: PTH208 - reading the folder refreshes what was kept of it, asking for the file does not
    except OSError:
        return False


def file_system_of(path: Path, *, table: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds a path, as `ext4` or `nfs4`; empty if unknown.

    Touches no storage.
    """
    wanted = os.path.abspath(path)  # noqa: PTH100 - resolving links would touch what may hang
    best, kind = "", ""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or not rest:
            continue
        point = _unescaped(fields[4])
        inside = point == "/" or wanted == point or wanted.startswith(point + "/")
        if inside and len(point) >= len(best):  # of several on one point the last one counts
            best, kind = point, rest[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system type belongs to several machines."""
    return kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in ("fuse.fuseblk", "fuse.lxcfs"))


def _unescaped(point: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point


_POLL_S = 0.2
Identity = tuple[int, int]
"""Device and inode."""


class PathState(NamedTuple):
    """State of a path.

    Attributes:
        identity: None for nothing.
        now_at: another path, at which that is now which was here at the beginning; None where it is
            removed, or that is not known.
    """

    identity: Identity | None
    now_at: str | None


class PathMonitor:
    """Checks paths several times per second until closed.

    A state seen only once is not reported.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        import subprocess  # with `secrets` half of the time that the child took to start, which needs neither

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "watch", *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""

    def poll(self) -> list[PathState] | None:
        """The state of the paths, if it has changed since the last call; else None.

        Never blocks.
        """
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
        import threading

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


def watch_paths(paths: list[str]) -> None:
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
    {"storage": try_storage, "watch": watch_paths}[sys.argv[1]](sys.argv[2:])

"""A child process of a front that tries storage, since storage can hang. Run by path, stdlib only.

    python path_probes.py FOLDER [NAME-OF-A-FILE-TO-LOOK-FOR PATIENCE_S]

tests a folder's storage: a line of JSON a finding on stdout, each as soon as it is known.
"""

import contextlib
import errno
import json
import os
import resource
import sys
import time
from pathlib import Path

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
        # Reading the folder refreshes the cache of its entries; a stat of the file does not.
        return name in os.listdir(folder)  # noqa: PTH208
    except OSError:
        return False


def file_system_of(path: Path, *, table: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds a path, as `ext4` or `nfs4`; empty if unknown.

    Touches no storage.
    """
    target = os.path.abspath(path)  # noqa: PTH100 - resolving links would touch what may hang
    best, kind = "", ""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, type_fields = before.split(), after.split()
        if len(fields) < 5 or not type_fields:
            continue
        point = _unescaped(fields[4])
        inside = point == "/" or target == point or target.startswith(point + "/")
        if inside and len(point) >= len(best):  # of several on one point the last one counts
            best, kind = point, type_fields[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system type belongs to several machines."""
    return kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in ("fuse.fuseblk", "fuse.lxcfs"))


def _unescaped(point: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point


Identity = tuple[int, int]
"""Device and inode."""


def identity_of(path: Path | str) -> Identity | None:
    """What is at a path; None for nothing.

    Raises:
        OSError: if that cannot be said.
    """
    try:
        status = Path(path).stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    try_storage(sys.argv[1:])

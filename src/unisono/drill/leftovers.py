"""Finds leftovers of a run on its machine: processes, ports, shared memory, temporary files."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LEFTOVER_S = 5.0
"""Time for a run's processes and files to disappear after its end."""
_LISTEN_STATE = "0A"
_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to


@dataclass
class Traces:
    """Traces of a run, recorded while it runs, to find leftovers afterwards.

    Its processes are those with a working directory inside the drill's folder, as all ranks and tasks of a front.

    Attributes:
        ports: ports on which its processes have listened, by the socket's inode.
    """

    folder: Path
    temporary: Path
    ports: dict[str, int] = field(default_factory=dict)
    _shm: set[str] = field(default_factory=lambda: set(_shared_memory()))

    def note(self) -> None:
        """Records ports of running processes; called during training."""
        for pid in processes_in(self.folder):
            self.ports |= _listening(pid)

    def left_behind(self, *, patience_s: float = LEFTOVER_S) -> list[str]:
        """Leftovers as text, after waiting for them to disappear."""
        until = time.monotonic() + patience_s
        while (found := self._look()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _look(self) -> list[str]:
        found = [f"process {pid}: {_command(pid)}" for pid in processes_in(self.folder)]
        open_now = _listening_sockets(Path("/proc/net"))
        found += [f"port {port}" for inode, port in sorted(self.ports.items()) if inode in open_now]
        new = [name for name in _shared_memory() if name not in self._shm]
        if new:  # another program's is open in one of its processes
            used = _open_in_shared_memory()
            found += [str(_SHM / name) for name in new if name not in used]
        found += [str(path) for path in sorted(self.temporary.iterdir())] if self.temporary.is_dir() else []
        return found


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is inside a folder; those of other users are not visible."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        where = _target(entry / "cwd")
        if where and Path(where).is_relative_to(folder) and _state(entry) not in ("Z", ""):
            found.append(int(entry.name))
    return found


def _listening(pid: int) -> dict[str, int]:
    """Ports on which a process listens, in its network namespace."""
    table = _listening_sockets(Path("/proc", str(pid), "net"))
    found = {}
    for link in _entries(Path("/proc", str(pid), "fd")):
        inode = _target(link).removeprefix("socket:[").removesuffix("]")
        if inode in table:
            found[inode] = table[inode]
    return found


def _listening_sockets(net: Path) -> dict[str, int]:
    """Listening TCP sockets of a network namespace: port by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (net / name).read_text().splitlines()[1:]
        except OSError:  # the process is gone, or there is no such protocol
            continue
        for fields in map(str.split, lines):
            if len(fields) > 9 and fields[3] == _LISTEN_STATE:
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def _shared_memory() -> list[str]:
    """Names in /dev/shm, without folders of `unisono run`, which other runs on the machine create and remove."""
    return [path.name for path in _entries(_SHM) if not path.name.startswith(f"unisono-{os.getuid()}-")]


def _open_in_shared_memory() -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        for link in (*_entries(entry / "fd"), *_entries(entry / "map_files")):
            where = Path(_target(link))
            if where.parent == _SHM:
                found.add(where.name)
    return found


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:  # gone, or another user's
        return


def _target(link: Path) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a Path would read `socket:[1]` as a relative path
    except OSError:
        return ""


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""

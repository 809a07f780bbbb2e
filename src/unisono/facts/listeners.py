"""Which process listens on a port of this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens: its id, and how it was started."""

    pid: int
    command: str


def who_listens(port: int, proc: Path = Path("/proc")) -> Listener | None:
    """The process that listens on a TCP port, or None where nobody does or it cannot be seen (another user's)."""
    inodes = _inodes(port, proc)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder / "fd", wanted):
            return Listener(int(folder.name), _command(folder))
    return None


def _inodes(port: int, proc: Path) -> set[str]:
    """Of the sockets that listen on it."""
    found = set()
    for table in (proc / "net" / "tcp", proc / "net" / "tcp6"):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _holds(folder: Path, wanted: set[str]) -> bool:
    try:
        return any(_target(entry) in wanted for entry in folder.iterdir())
    except OSError:
        return False  # it has ended meanwhile, or belongs to somebody else


def _target(link: Path) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a Path would read `socket:[1]` as a relative path
    except OSError:
        return ""


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""

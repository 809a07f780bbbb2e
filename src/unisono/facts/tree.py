"""The processes below one, and what their environments say."""

import os
from collections.abc import Sequence
from pathlib import Path


def processes_below(pid: int) -> list[tuple[int, int]]:
    """(process, its parent) of all processes below one, parents first. One reading of /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = _read(Path(entry.path, "stat"))
            if stat:
                children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry.name))
    found: list[tuple[int, int]] = []
    todo = [pid]
    while todo:
        parent = todo.pop(0)
        for child in sorted(children.get(parent, ())):
            found.append((child, parent))
            todo.append(child)
    return found


def variables_of(pid: int, names: Sequence[str]) -> dict[str, str]:
    """Some variables with which a process of this user was started; nothing of one that is gone, or another's."""
    wanted = {name.encode() for name in names}
    found = {}
    for item in _read(Path(f"/proc/{pid}/environ")).split(b"\0"):
        name, equals, value = item.partition(b"=")
        if equals and name in wanted:
            found[name.decode()] = value.decode("utf-8", "replace")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""

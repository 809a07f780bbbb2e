"""Where this process's control group keeps its files: version 2, then 1; its own folder, then those above it."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, *, root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Every folder whose limits hold for this process: of version 2, then of version 1's `controller`.

    Inside a container the path that the kernel tells is often not mounted, while its root is: such folders are still given,
    and reading from them fails.
    """
    inside = _paths(own)
    yield from _upwards(root, inside.get("", ""))
    for names, path in inside.items():
        if controller in names.split(","):
            yield from _upwards(root / controller, path)


def _paths(own: Path) -> dict[str, str]:
    """The process's path by the names of the controllers; version 2 has no names."""
    found = {"": ""}
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found[controllers] = path.strip("/")
    except (OSError, ValueError):
        return {"": ""}
    return found


def _upwards(root: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])

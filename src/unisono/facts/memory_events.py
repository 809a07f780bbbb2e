"""How often the kernel has killed for memory in this process's cgroup."""

from pathlib import Path


def oom_kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The cgroup's count of out-of-memory kills, or None where it cannot be read."""
    for path in _places(root, own):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _places(root: Path, own: Path) -> list[Path]:
    """Where the count may stand: cgroup 2, then 1; inside a container the path told is often not mounted, its root is."""
    inside = {"": "", "memory": ""}
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside[controllers] = path.lstrip("/")
    except (OSError, ValueError):
        inside = {"": "", "memory": ""}
    second, first = root / "memory.events", root / "memory" / "memory.oom_control"
    return [
        root / inside[""] / second.name,
        second,
        first.parent / inside["memory"] / first.name,
        first,
    ]

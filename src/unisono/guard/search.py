"""Ranks that are found by their environment: launchers give each its number there. One reading of /proc."""

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.facts.processes import processes_below, variables_of
from unisono.integrations.border import Registration, start_of

_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)


@dataclass(frozen=True, slots=True)
class Found:
    """One process that its environment calls a rank.

    Attributes:
        registration: who it is.
        launcher: the process that has started it.
    """

    registration: Registration
    launcher: int


@dataclass(frozen=True)
class Search:
    """The processes below one, as they are at one moment.

    Attributes:
        parents: of each.
        said: which rank of how many a process is, by its environment. What a rank starts itself has the same one.
        found: the ranks: of processes that say the same the first ancestor.
    """

    parents: Mapping[int, int]
    said: Mapping[int, tuple[int, int]]
    found: tuple[Found, ...]

    def is_below(self, pid: int, other: int) -> bool:
        """Whether a process was started by another, or by what that has started."""
        while pid in self.parents:
            pid = self.parents[pid]
            if pid == other:
                return True
        return False

    def launcher_of(self, pid: int) -> int | None:
        """The process that has started a rank, perhaps by way of a shell; None where the rank is not there."""
        parent = self.parents.get(pid)
        while parent is not None and parent in self.said and self.said[parent] == self.said.get(pid):
            parent = self.parents.get(parent)
        return parent


def search(root: int, host: str) -> Search:
    """Looks at all processes below one.

    Args:
        root: the process.
        host: this node's name.
    """
    parents: dict[int, int] = {}
    said: dict[int, tuple[int, int]] = {}
    found: list[Found] = []
    for pid, parent in processes_below(root):
        parents[pid] = parent
        variables = variables_of(pid, _VARIABLES)
        try:
            rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
            local_rank = int(variables["LOCAL_RANK"])
            local_world_size = int(variables.get("LOCAL_WORLD_SIZE") or 1)
            attempt = int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0)
            restarts = int(variables.get("TORCHELASTIC_MAX_RESTARTS") or 0)
        except (KeyError, ValueError):
            continue
        said[pid] = (rank, world_size)
        started = start_of(pid)
        if said.get(parent) == (rank, world_size) or not 0 <= rank < world_size or started is None:
            continue
        registration = Registration(
            pid, started, rank, local_rank, world_size, local_world_size, host, attempt=attempt, sees=(), restarts=restarts,
        )  # fmt: skip
        found.append(Found(registration, parent))
    return Search(parents, said, tuple(found))

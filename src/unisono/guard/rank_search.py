"""Finds the ranks among the descendants of a process, by their environment, and which launcher started each."""

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
class FoundRank:
    """A process that is a rank by its environment.

    Attributes:
        registration: its identity.
        launcher: the process that started it.
    """

    registration: Registration
    launcher: int


@dataclass(frozen=True)
class Search:
    """A snapshot of the descendants of a process.

    Attributes:
        parents: of each.
        said: which rank of how many a process is, by its environment. What a rank starts itself has the same one.
        found: the ranks: of processes that say the same the first ancestor.
    """

    parents: Mapping[int, int]
    claims: Mapping[int, tuple[int, int]]
    found: tuple[FoundRank, ...]

    def is_below(self, pid: int, other: int) -> bool:
        """Whether a process is a descendant of `other`."""
        while pid in self.parents:
            pid = self.parents[pid]
            if pid == other:
                return True
        return False

    def launcher_of(self, pid: int) -> int | None:
        """The process that started a rank, possibly through a shell; None if the rank is gone."""
        parent = self.parents.get(pid)
        while parent is not None and parent in self.claims and self.claims[parent] == self.claims.get(pid):
            parent = self.parents.get(parent)
        return parent


def search(root: int, host: str) -> Search:
    """Finds the ranks among all descendants of a process.

    Args:
        root: the process.
        host: this node's name.
    """
    parents: dict[int, int] = {}
    claims: dict[int, tuple[int, int]] = {}
    found: list[FoundRank] = []
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
        claims[pid] = (rank, world_size)
        started = start_of(pid)
        if claims.get(parent) == (rank, world_size) or not 0 <= rank < world_size or started is None:
            continue
        registration = Registration(
            pid,
            started,
            rank,
            local_rank,
            world_size,
            local_world_size,
            host,
            attempt=attempt,
            sees=(),
            restarts=restarts,
        )
        found.append(FoundRank(registration, parent))
    return Search(parents, claims, tuple(found))

"""What monitors and verdicts need to know of a job and of the ranks of one node, for `train` and for `run`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from unisono.events import Message
from unisono.plan import NodePlace, RankPlace
from unisono.rundir import RunDir
from unisono.watch import BeatMemory


class Job(Protocol):
    """The ranks and nodes of a job, e.g. a RunPlan."""

    @property
    def ranks(self) -> Sequence[RankPlace]:
        """All ranks, by rank."""
        ...

    @property
    def nodes(self) -> Sequence[NodePlace]:
        """All nodes that take part."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole job; 0 if unknown."""
        ...

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        """The ranks of one node."""
        ...


class NodeRanks(Protocol):
    """The ranks of this node, as a monitor sees them, e.g. LocalRanks."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Their places."""
        ...

    @property
    def run(self) -> RunDir:
        """The directory of their logs."""
        ...

    @property
    def beats(self) -> Mapping[int, BeatMemory]:
        """Their heartbeats, by rank; without ranks that have none."""
        ...

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended."""
        ...

    def pid(self, rank: int) -> int | None:
        """The pid of a rank's process while it lives."""
        ...

    def final_message(self, rank: int) -> Message | None:
        """The message `result`, `refused` or `crashed` of a rank, once it has arrived."""
        ...

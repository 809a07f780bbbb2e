"""What watching and judging need to know of a job and of the ranks of one node: of our own runs, and of other people's programs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from unisono.events import Message
from unisono.plan import NodePlace, RankPlace
from unisono.rundir import RunDir
from unisono.watch import BeatMemory


class Job(Protocol):
    """Who takes part; a RunPlan is one."""

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
        """Of the whole job; 0 where that is not known."""
        ...

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        """The ranks of one node."""
        ...


class RanksHere(Protocol):
    """The ranks of this node, as what watches them sees them; LocalRanks are such."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Who they are."""
        ...

    @property
    def run(self) -> RunDir:
        """Where their logs are."""
        ...

    @property
    def beats(self) -> Mapping[int, BeatMemory]:
        """Their signs of life, by rank; of a rank that leaves none there is nothing."""
        ...

    @property
    def all_ended(self) -> bool:
        """Whether none of them is left."""
        ...

    def pid(self, rank: int) -> int | None:
        """Of a rank's process while it lives."""
        ...

    def last_word(self, rank: int) -> Message | None:
        """`result`, `refused` or `crashed` of a rank, once it has been heard."""
        ...

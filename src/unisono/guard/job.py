"""A guarded program's ranks, as what judges them wants a job. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.plan import NodePlace, RankPlace


@dataclass(frozen=True)
class ProgramJob:
    """Who takes part, as far as it is known; ranks that have not been heard of are there without a place."""

    nodes: Sequence[NodePlace]
    ranks: Sequence[RankPlace]
    total_steps: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        """The ranks of one node."""
        return [place for place in self.ranks if place.node_rank == node_rank]

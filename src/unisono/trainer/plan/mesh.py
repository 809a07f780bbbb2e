"""The mesh of a run's ranks: named axes, a rank's coordinates, and what happens over which axis.

Data parallelism (`dp`) is the only axis so far. Strategies are compared by name in this module
alone; everything else asks the mesh.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

Axis = Literal["dp"]
Strategy = Literal["single", "ddp", "fsdp"]
"""The name of a mesh in plan.json: one rank, replicas, or shards."""


@dataclass(frozen=True)
class Mesh:
    """The arrangement of all ranks.

    Attributes:
        axes: the size of each axis, the outermost first: ranks are numbered so that the coordinate
            of the last axis changes fastest.
        shards_weights: whether each rank of `dp` has a shard of every weight and of the optimizer's
            state; else all have the full ones.
    """

    axes: Mapping[Axis, int]
    shards_weights: bool = False

    @classmethod
    def of(cls, strategy: str, world_size: int) -> Self:
        """The mesh of a plan."""
        return cls({"dp": world_size}, shards_weights=strategy == "fsdp")

    @property
    def strategy(self) -> Strategy:
        """Its name in plan.json."""
        if self.world_size == 1:
            return "single"
        return "fsdp" if self.shards_weights else "ddp"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The coordinate of a rank on each axis."""
        coordinates: dict[Axis, int] = {}
        for axis, size in reversed(list(self.axes.items())):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def ranks_of(self, axis: Axis) -> list[list[int]]:
        """The ranks along an axis, by their coordinate: a list for each combination of the other
        coordinates.
        """
        stride = math.prod(list(self.axes.values())[list(self.axes).index(axis) + 1 :])
        firsts = (rank for rank in range(self.world_size) if self.coordinates(rank)[axis] == 0)
        return [[first + i * stride for i in range(self.axes[axis])] for first in firsts]

    # ---- Over which axes

    @property
    def dp_size(self) -> int:
        """The number of shares into which a step's batch is dealt."""
        return self.axes["dp"]

    def dp_rank(self, rank: int) -> int:
        """The share of a step's batch that a rank takes."""
        return self.coordinates(rank)["dp"]

    @property
    def gradient_axes(self) -> tuple[Axis, ...]:
        """The axes over which gradients, losses and counts are summed; empty for one rank."""
        return ("dp",) if self.dp_size > 1 else ()

    @property
    def norm_axes(self) -> tuple[Axis, ...]:
        """The axes over which squared norms of gradients are summed; empty if each rank has the
        full gradients.
        """
        return self.gradient_axes if self.shards_weights else ()

    # ---- Who has what

    @property
    def holders(self) -> list[list[int]]:
        """For each part of the training state, the ranks that hold it, bit-identical."""
        if self.shards_weights:
            return [[rank] for rank in range(self.world_size)]
        return self.ranks_of("dp")

    @property
    def checkpoint_writers(self) -> list[int]:
        """The rank that writes each part of a checkpoint."""
        return [ranks[0] for ranks in self.holders]

    @property
    def weight_shards(self) -> int:
        """The number of ranks among which weights and the optimizer's state are divided."""
        return len(self.holders)

    @property
    def has_replicas(self) -> bool:
        """Whether some ranks must have equal weights, which digests can compare."""
        return self.weight_shards < self.world_size

    @property
    def forwards_together(self) -> bool:
        """Whether a forward pass needs all ranks, each of which has a part of the weights."""
        return self.shards_weights


def meshes_of(strategy: str, world_size: int) -> list[Mesh]:
    """The meshes that a config's `parallel.strategy` allows for a number of ranks, in the order in
    which they are tried; none if a single rank is required and there are several.
    """
    replicas, shards = Mesh.of("ddp", world_size), Mesh.of("fsdp", world_size)
    if world_size == 1:
        return [replicas]
    return {"auto": [replicas, shards], "ddp": [replicas], "fsdp": [shards]}.get(strategy, [])


def needs_several_ranks(strategy: str) -> bool:
    """Whether a config's `parallel.strategy` has an effect with several ranks only."""
    return strategy in ("ddp", "fsdp")

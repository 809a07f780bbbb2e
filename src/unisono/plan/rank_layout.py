"""Which rank runs where: from what every node offers to the plan's nodes and ranks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.plan import DeviceChoice, NodePlace, RankPlace


@dataclass(frozen=True)
class NodeOffer:
    """What one node brings to the plan.

    Attributes:
        node_rank: of the node.
        host: its name.
        address: where the others reach it.
        devices: one for each rank, by local rank.
        nproc_origin: where their number came from.
        threads: that each rank may have, and `threads_origin` where that came from.
        shares_output: whether its output_dir is the head's.
    """

    node_rank: int
    host: str
    address: str
    devices: Sequence[DeviceChoice]
    nproc_origin: str
    threads: int
    threads_origin: str
    shares_output: bool = True


@dataclass(frozen=True)
class Layout:
    """Nodes and ranks of a job, as the plan has them."""

    nodes: list[NodePlace]
    ranks: list[RankPlace]
    store_host: str
    threads: int
    threads_origin: str
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return len(self.ranks)


def lay_out(offers: Sequence[NodeOffer]) -> Layout:
    """Ranks node after node, in the order of node ranks; threads as the poorest node has them, the same on all.

    Replicas round alike only where they add in the same order, and that depends on the number of threads.
    """
    ordered = sorted(offers, key=lambda offer: offer.node_rank)
    nodes = [
        NodePlace(
            node_rank=offer.node_rank, host=offer.host, address=offer.address, nproc=len(offer.devices),
            nproc_origin=offer.nproc_origin, shares_output=offer.shares_output,
        )
        for offer in ordered
    ]  # fmt: skip
    pairs = [(offer, local_rank) for offer in ordered for local_rank in range(len(offer.devices))]
    ranks = [
        RankPlace(
            rank=rank, node_rank=offer.node_rank, local_rank=local_rank, host=offer.host, device=offer.devices[local_rank]
        )
        for rank, (offer, local_rank) in enumerate(pairs)
    ]  # fmt: skip
    poorest = min(ordered, key=lambda offer: offer.threads)
    origin = poorest.threads_origin
    if len({offer.threads for offer in ordered}) > 1:
        origin = f"{origin} of node {poorest.node_rank} ({poorest.host}), which has the fewest"
    return Layout(nodes, ranks, ordered[0].address, poorest.threads, origin)


def threads_of(*, cores: int, nproc: int, declared: int | None) -> tuple[int, str]:
    """Threads of each rank of a node, and where that comes from; part of what makes a run repeatable."""
    if declared:
        return declared, "OMP_NUM_THREADS"
    if nproc == 1:
        return cores, "the cores that this process may use"
    return max(1, cores // nproc), f"{cores} cores for {nproc} ranks"

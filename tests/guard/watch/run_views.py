"""Makes pictures of runs for the tests of the judge."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.watch.views import (
    Beat,
    Collective,
    Look,
    NodeView,
    PhaseTimes,
    ProcessView,
    RankView,
    RunView,
)

CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=1 << 30, bfloat16=False)
QUICK = PhaseTimes(count=100, total_s=10.0, longest_s=0.3)
UNSEEN = PhaseTimes(count=0, total_s=0.0, longest_s=0.0)


def places(world: int, *, per_node: int = 8) -> dict[int, RankPlace]:
    """Ranks, some to a node; the nodes are a, b, c …"""
    return {
        rank: RankPlace(
            rank=rank, node_rank=rank // per_node, local_rank=rank % per_node, host=chr(ord("a") + rank // per_node), device=CPU
        )
        for rank in range(world)
    }  # fmt: skip


def beat(phase: str = "compute", *, step: int = 12, comm: int = 40, kind: str = "all_reduce", elements: int = 1000,
         times: PhaseTimes = QUICK, done: int = 0, total: int = 0) -> Beat:  # fmt: skip
    """A record; the rank is in the middle of training unless said otherwise."""
    return Beat(
        version=1000, at_ns=1, phase=phase, step=step, micro=1, comm=comm, kind=kind, elements=elements, done=done, total=total,
        digest=7, shares_s=(0.0, 0.0, 0.0, 0.0), pulse_ns=1, answered=0, times=times,
    )  # fmt: skip


def view(rank: int, phase: str = "compute", idle_s: float = 0.0, *, pulse_idle_s: float = 0.0, state: str = "S", waits_in: str = "",
         node_rank: int = 0, children: str = "", reported_result: bool = False, has_ended: bool = False, **of_beat: Any) -> RankView:  # fmt: skip
    """A rank as its front sees it."""
    process = ProcessView(state=state, waits_in=waits_in, children=children)
    found = beat(phase)
    return RankView(
        rank=rank, node_rank=node_rank, beat=replace(found, **of_beat), idle_s=idle_s, pulse_idle_s=pulse_idle_s, process=process,
        has_ended=has_ended, reported_result=reported_result,
    )  # fmt: skip


def run_view(views: Sequence[RankView], *, looks: Sequence[Look] = (), nodes: Sequence[NodeView] = (), per_node: int = 8,
            world: int | None = None) -> RunView:  # fmt: skip
    """A run; all ranks of it have been heard of unless `world` says that there are more."""
    seen: Mapping[int, RankView] = {one.rank: one for one in views}
    return RunView(
        places(world or len(views), per_node=per_node), seen, {node.node_rank: node for node in nodes},
        {look.rank: look for look in looks}, 100,
    )  # fmt: skip


def look(
    rank: int,
    *stack: str,
    name: str = "",
    number: int = 0,
    completed: int | None = None,
    sizes: str = "[[1000]]",
) -> Look:
    """What was gathered of a rank; a collective if it has a name."""
    begun = Collective("0", number, name, sizes) if name else None
    return Look(rank, stack=stack, how="faulthandler", begun=begun, completed=completed)

"""The environment of each rank: who it is among the others, and through which interface it talks to them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from unisono.facts.network import is_loopback
from unisono.files import make_private_dir
from unisono.launch.command import child_environment
from unisono.plan import RunPlan
from unisono.rundir import RunDir

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ABOUT_COMMUNICATION = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_")
DEBUG_COMM = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""What --debug-comm sets for processes that talk to each other."""
_RECORDED = "200"
"""Collectives that torch's flight recorder keeps. Without the variable gloo's keeps one. On or off is 2 µs of CPU time for a collective, and
how many it keeps costs nothing (torch 2.13)."""


def misleading(leftovers: Iterable[str], *, world_size: int) -> list[str]:
    """The variables of other launchers that ranks are started without; several ranks keep what is about communication."""
    if world_size == 1:
        return list(leftovers)
    return [name for name in leftovers if not name.startswith(_ABOUT_COMMUNICATION)]


class HasAddresses(Protocol):
    """A network interface, as `facts.network` finds it or a report has it."""

    @property
    def name(self) -> str:
        """As the system calls it."""

    @property
    def addresses(self) -> Sequence[str]:
        """Without their prefix lengths."""

    @property
    def loopback(self) -> bool:
        """Whether it leads back to this machine."""


def interface_name(interfaces: Iterable[HasAddresses], address: str) -> str | None:
    """The interface that has the address; None where it cannot be said, and the libraries choose.

    127.0.0.2 and its like are in no list, and are the loopback's.
    """
    known = list(interfaces)
    found = next((one.name for one in known if address in one.addresses), None)
    if found is None and is_loopback(address):
        return next((one.name for one in known if one.loopback), None)
    return found


def rank_environments(
    plan: RunPlan, node_rank: int, *, variables: Mapping[str, str], interface: str | None, debug_comm: bool
) -> list[dict[str, str]]:
    """The environment of every rank of a node, by local rank. Where libraries are to write files, their folder is made.

    Args:
        plan: who is where.
        node_rank: of this node.
        variables: of other launchers, as this node has them; what would mislead goes.
        interface: the one that has the address by which the other nodes reach this one; what the user has set stands.
        debug_comm: whether collectives are checked and the libraries tell what they do, NCCL in a file of each rank in evidence/; slow.
    """
    without = misleading(variables, world_size=plan.world_size)
    places = plan.on_node(node_rank)
    found = []
    for place in places:
        environment = child_environment(threads=plan.threads, without=without, device=place.device)
        if plan.world_size > 1:
            environment |= {
                "RANK": str(place.rank),
                "LOCAL_RANK": str(place.local_rank),
                "WORLD_SIZE": str(plan.world_size),
                "LOCAL_WORLD_SIZE": str(len(places)),
            }
            for name in INTERFACE_VARIABLES if interface else ():
                environment.setdefault(name, str(interface))
            environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)
            if debug_comm:
                environment |= DEBUG_COMM | _nccl_file(plan, place.rank)
        found.append(environment)
    return found


def _nccl_file(plan: RunPlan, rank: int) -> dict[str, str]:
    folder = RunDir(Path(plan.output_dir)).evidence
    try:
        make_private_dir(folder)
    except OSError:
        return {}  # NCCL tells it in the rank's log, then
    return {"NCCL_DEBUG_FILE": str(folder / f"nccl-rank-{rank:05d}.log")}

"""The environment of each rank of a node."""

from collections.abc import Mapping
from pathlib import Path

from unisono.base.files import make_private_dir
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import (
    DEBUG_COMM,
    INTERFACE_VARIABLES,
    child_environment,
    misleading_variables,
)
from unisono.trainer.plan import RunPlan

_RECORDED_COLLECTIVES = "200"
"""Collectives that torch's flight recorder keeps. Without the variable, gloo's keeps one. Recording
costs 2 µs of CPU time per collective, whatever their number (torch 2.13).
"""


def rank_environments(
    plan: RunPlan, node_rank: int, *, variables: Mapping[str, str], interface: str | None, debug_comm: bool
) -> list[dict[str, str]]:
    """The environment of every rank of a node, by local rank.

    Makes the folder for files that libraries write.

    Args:
        plan: places of all ranks.
        variables: of other launchers on this node; misleading ones are removed.
        interface: that has the address at which the other nodes reach this one; a value set by the
            user has priority.
        debug_comm: whether collectives are checked and the libraries log what they do, NCCL to one
            file per rank in evidence/; slow.
    """
    without = misleading_variables(variables, world_size=plan.world_size)
    places = plan.on_node(node_rank)
    environments = []
    for place in places:
        environment = child_environment(threads=plan.threads, without=without, device=place.device)
        if place.device.kind == "cuda" and plan.config.deterministic:
            environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses cuBLAS
        if plan.world_size > 1:
            environment |= {
                "RANK": str(place.rank),
                "LOCAL_RANK": str(place.local_rank),
                "WORLD_SIZE": str(plan.world_size),
                "LOCAL_WORLD_SIZE": str(len(places)),
            }
            for name in INTERFACE_VARIABLES if interface else ():
                environment.setdefault(name, str(interface))
            environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
            if debug_comm:
                environment |= DEBUG_COMM | _nccl_file(plan, place.rank)
        environments.append(environment)
    return environments


def _nccl_file(plan: RunPlan, rank: int) -> dict[str, str]:
    folder = RunDir(Path(plan.output_dir)).evidence
    try:
        make_private_dir(folder)
    except OSError:
        return {}  # NCCL writes to the rank's log then
    return {"NCCL_DEBUG_FILE": str(folder / f"nccl-rank-{rank:05d}.log")}

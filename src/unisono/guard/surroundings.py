"""The environment of a guarded program: what its launcher is to find there, and no secret of ours. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.guard.asked import RunAsked, RunShape
from unisono.integrations.injection import injected, why_deaf

_OURS = ("UNISONO_TOKEN", "UNISONO_GUARD")


@dataclass(frozen=True)
class Surroundings:
    """What the program is started with.

    Attributes:
        environment: all of it.
        notes: what was set that a person may want to know.
    """

    environment: dict[str, str]
    notes: tuple[str, ...] = ()


def surroundings_of(
    asked: RunAsked, shape: RunShape, environment: Mapping[str, str], *, guard_file: Path, store: tuple[str, int] | None
) -> Surroundings:  # fmt: skip
    """The program's environment.

    Args:
        asked: our options.
        shape: of the job.
        environment: of this process.
        guard_file: of the border.
        store: of several nodes: where torch's store will be, on node 0.
    """
    found = {name: value for name, value in environment.items() if name not in _OURS}
    notes: list[str] = []
    deaf = why_deaf(asked.words)
    if deaf is not None:
        notes.append(f"{deaf}: of its ranks only deaths are seen")
    found = injected(found, guard_file)
    topology = shape.topology
    if asked.devices is not None:
        found["CUDA_VISIBLE_DEVICES"] = asked.devices
    if asked.nproc is not None:
        found |= {"NPROC_PER_NODE": str(asked.nproc), "PET_NPROC_PER_NODE": str(asked.nproc)}
    if asked.debug_comm:
        found |= {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}
    if topology.nodes == 1 or store is None:
        return Surroundings(found, tuple(notes))
    host, port = store
    place = {"NNODES": str(topology.nodes), "NODE_RANK": str(topology.node_rank)}
    found |= place | {"PET_NNODES": str(topology.nodes)}
    if shape.own_rendezvous:
        found["PET_NODE_RANK"] = str(
            topology.node_rank
        )  # our rendezvous knows it, and torchrun would warn that it does not
    else:
        found |= {
            "MASTER_ADDR": host, "MASTER_PORT": str(port), "PET_MASTER_ADDR": host, "PET_MASTER_PORT": str(port),
            "PET_RDZV_BACKEND": "unisono", "PET_RDZV_ENDPOINT": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "PET_RDZV_CONF": f"rank={topology.node_rank}",
        }  # fmt: skip
    if shape.command.kind == "llamafactory" and found.get("FORCE_TORCHRUN", "") not in ("1", "true", "True"):
        found["FORCE_TORCHRUN"] = "1"
        notes.append(
            "FORCE_TORCHRUN=1 is set: with one device LLaMA-Factory would train on each node by itself"
        )
    return Surroundings(found, tuple(notes))

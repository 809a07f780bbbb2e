"""Reports for the tests: healthy ones, of which a test changes one thing."""

from typing import Any

from unisono.guard.agree.reports import (
    Device,
    DialReport,
    FileDigest,
    Interface,
    NodeReport,
    OutputFacts,
    RankReport,
)
from unisono.guard.facts.limits import SystemLimits

GIB = 2**30


def device(index: int, *, host: str = "a", name: str = "NVIDIA H100", gib: int = 80) -> Device:
    """A free accelerator with a UUID of its own."""
    return Device(
        index=index,
        uuid=f"GPU-{host}-{index}",
        name=name,
        memory_bytes=gib * GIB,
        memory_free_bytes=gib * GIB,
    )


def interfaces(address: str, *, loopback: bool = True) -> list[Interface]:
    """An eth0 with this address, and lo."""
    lo = Interface(name="lo", addresses=["127.0.0.1"], mtu=65536, up=True, loopback=True, kind="loopback")
    eth = Interface(name="eth0", addresses=[address], mtu=1500, up=True, loopback=False, kind="ethernet")
    return [eth, lo] if loopback else [eth]


def node(rank: int, host: str | None = None, **changes: Any) -> NodeReport:
    """A healthy CPU node of three."""
    host = host or (chr(ord("a") + rank) if rank < 26 else f"n{rank}")
    address = f"10.{rank >> 16}.{rank >> 8 & 255}.{(rank & 255)}"
    values: dict[str, Any] = {
        "node_rank": rank,
        "host": host,
        "address": address,
        "pid": 4000 + rank,
        "nodes": 3,
        "nproc": 2,
        "nproc_declared": False,
        "nproc_origin": "1 on a CPU",
        "device_kind": "cpu",
        "chosen": [],
        "visible": [],
        "physical": [],
        "visible_variable": None,
        "variables": {"NCCL_DEBUG": "WARN"},
        "versions": {
            "unisono": "0.4.0",
            "python": "3.12.3",
            "torch": "2.13.0+cpu",
            "transformers": "5.1.0",
            "peft": "0.21.0",
        },
        "environment_digest": "e" * 16,
        "packages": {"numpy": "2.1.0", "torch": "2.13.0+cpu"},
        "code": {"unisono/trainer/training/loop.py": "c" * 32},
        "config": {"optim.lr": 2e-4, "batch.global": 16, "deterministic": False, "objective": "sft"},
        "data_files": [FileDigest(label="train[0]: rows.jsonl", bytes=1204, digest="d" * 32)],
        "tokenizer_files": [FileDigest(label="tokenizer.json", bytes=700, digest="t" * 32)],
        "model_files": [FileDigest(label="model.safetensors", bytes=90_000, digest="m" * 32)],
        "output": OutputFacts(
            path="runs/x", writable=True, shared=True, free_bytes=500 * GIB, file_system="ext4"
        ),
        "limits": SystemLimits(
            cores=8,
            memory_bytes=64 * GIB,
            shm_bytes=32 * GIB,
            shm_free_bytes=32 * GIB,
            open_files=65536,
            locked_memory_bytes=None,
            stack_bytes=8 * 2**20,
            processes=None,
        ),
        "interfaces": interfaces(address),
        "host_addresses": [address],
        "head_addresses": ["10.0.0.0"],
        "clock_offset_s": 0.0,
        "probe_ports": [40001],
    }
    return NodeReport(**{**values, **changes})


def gpu_node(rank: int, gpus: int = 2, *, visible: str | None = None, **changes: Any) -> NodeReport:
    """A node with accelerators, as many ranks as are visible, and NCCL."""
    host = changes.get("host") or chr(ord("a") + rank)
    physical = [device(index, host=host) for index in range(gpus)]
    shown = physical if visible is None else [physical[int(word)] for word in visible.split(",") if word]
    values: dict[str, Any] = {
        "device_kind": "cuda",
        "physical": physical,
        "visible": shown,
        "chosen": shown,
        "nproc": len(shown),
        "nproc_origin": f"{len(shown)} visible accelerators",
        "visible_variable": visible,
        "versions": {**node(rank).versions, "torch": "2.13.0+cu126", "cuda": "12.6", "nccl": "2.28.3"},
    }
    return node(rank, **{**values, **changes})


def nodes(number: int = 3, **changes: Any) -> list[NodeReport]:
    """Equal, healthy nodes."""
    return [node(rank, nodes=number, **changes) for rank in range(number)]


def changed(reports: list[NodeReport], rank: int, **changes: Any) -> list[NodeReport]:
    """The same reports, one of them with other values."""
    return [report.model_copy(update=changes) if report.node_rank == rank else report for report in reports]


def rank(number: int, *, per_node: int = 2, world: int = 4, **changes: Any) -> RankReport:
    """A healthy rank."""
    place = number // per_node
    values: dict[str, Any] = {
        "rank": number,
        "local_rank": number % per_node,
        "node_rank": place,
        "world_size": world,
        "host": chr(ord("a") + place),
        "pid": 5000 + number,
        "device_kind": "cpu",
        "device_uuid": None,
        "sequences": 896,
        "rows_digest": "r" * 32,
        "order_digest": "o" * 32,
        "total_steps": 168,
        "tokens": 90_000,
        "loss_tokens": 40_000,
        "parameters_digest": "p" * 32,
        "trainable_parameters": 205_000,
        "trained_values_digest": "v" * 32,
        "frozen_values_digest": "f" * 32,
        "tokenizer_digest": "k" * 32,
        "dtype": "float32",
        "strategy": "ddp",
        "seed": 0,
        "threads": 1,
        "resume_step": 0,
        "torch_version": "2.13.0+cpu",
        "collective_backend": "gloo",
    }
    return RankReport(**{**values, **changes})


def ranks(number: int = 4, *, per_node: int = 2) -> list[RankReport]:
    """Equal, healthy ranks."""
    return [rank(index, per_node=per_node, world=number) for index in range(number)]


def reached(
    source: int, target: int, outcome: str = "ok", *, port: int = 40001, **changes: Any
) -> DialReport:
    """One dial."""
    values: dict[str, Any] = {
        "source": source,
        "target": target,
        "address": f"10.0.0.{target}",
        "port": port,
        "outcome": outcome,
        "largest_bytes": 2**20 if outcome == "ok" else 0,
        "tried_bytes": [1, 1400, 9000, 2**20],
        "rtt_s": 0.0004 if outcome == "ok" else None,
    }
    return DialReport(**{**values, **changes})

"""What a node looks at again before its ranks are started again: the old ranks, storage, the checkpoint, devices, memory."""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.agree.display import name_node
from unisono.agree.reports import Device, Interface, Limits, NodeReport, OutputFacts
from unisono.causes import Evidence, Verdict, find_cause
from unisono.checkpoint.manifest import MANIFEST
from unisono.checkpoint.retention import max_without_permanent
from unisono.config import LoadedConfig
from unisono.errors import Disagreed
from unisono.facts import read_machine
from unisono.facts.limits import read_limits
from unisono.facts.machine import Gpu
from unisono.facts.orphans import wait_until_gone
from unisono.facts.processes import stuck_threads
from unisono.files import read_bytes
from unisono.launch.asked import TrainRequest
from unisono.launch.device import visible_gpus
from unisono.launch.node_report import look_at_output
from unisono.launch.nodes.party import Standing
from unisono.launch.planning import Here
from unisono.rundir import RunDir

_GONE_S = 3.0  # they were killed; what a rank had forked ends a moment later
_SEEN_S = 6.0  # a network file system may show a new directory so much later
_POLL_S = 0.1


def question_of(checkpoint: Path | None) -> dict[str, Any]:
    """What all nodes are asked to see: the checkpoint that the ranks will go on from, if there is one."""
    if checkpoint is None:
        return {}
    return {"checkpoint": checkpoint.name, "manifest": _digest(checkpoint)}


def look_again(
    request: TrainRequest,
    loaded: LoadedConfig,
    here: Here,
    first: NodeReport,
    standing: Standing,
    question: Mapping[str, Any],
) -> NodeReport:
    """This node's report with all that may have changed while ranks ran.

    Args:
        request: for the probes.
        loaded: the config, its paths absolute.
        here: machine and environment.
        first: this node's report before the first start.
        standing: where it stands at the channel now.
        question: of `question_of`, from the head.

    Raises:
        Disagreed: if old ranks still live, or the checkpoint is not seen where it was to be.
    """
    who = name_node(first.node_rank, first.host)
    refuse_old_ranks(who, first.host)
    output = look_at_output(loaded, standing)
    if first.node_rank != 0 and first.output.shared and output.writable is not False:
        _see_checkpoint(RunDir(Path(loaded.config.output_dir)), question, who=who, host=first.host)
    machine = read_machine(request.probes.devices)
    chosen = {device.uuid for device in first.chosen}
    copies = max_without_permanent(
        loaded.config.checkpoint.keep, best=loaded.config.checkpoint.best is not None
    )
    reserved = dict(first.reserved)
    if "disk_bytes" in reserved:  # most of them are there already
        reserved["disk_bytes"] //= copies
    return first.model_copy(
        update={
            "address": standing.address,
            "probe_ports": list(standing.probe_ports),
            "clock_offset_s": standing.clock_offset_s,
            "output": OutputFacts(**asdict(output)),
            "limits": Limits(**asdict(read_limits())),
            "interfaces": [Interface(**asdict(one)) for one in request.probes.network.interfaces()],
            "chosen": [_device(gpu) for gpu in machine.gpus if gpu.uuid in chosen],
            "visible": [_device(gpu) for gpu in visible_gpus(machine.gpus, here.environment.visible_devices)],
            "physical": [_device(gpu) for gpu in machine.gpus],
            "device_note": machine.gpu_note,
            "reserved": reserved,
        }
    )


def refuse_old_ranks(who: str, host: str) -> None:
    """Sees that nothing of the ranks that this front has started lives any more: it would hold devices, memory and files.

    Raises:
        Disagreed: stale_process, with the pids and what they wait in.
    """
    left = wait_until_gone(os.getpid(), limit_s=_GONE_S)
    if not left:
        return
    shown = ", ".join(map(str, left[:8]))
    waits = tuple(
        Evidence(where=f"{who}, pid {pid}", text=str(one))
        for pid in left[:4]
        for one in stuck_threads(pid)[:1]
    )
    raise _refusal(
        "stale_process", f"{who}: ranks of the start before still live {_GONE_S:g} s after they were killed: pid {shown}",
        host=host, evidence=waits,
    )  # fmt: skip


def _see_checkpoint(run: RunDir, question: Mapping[str, Any], *, who: str, host: str) -> None:
    name = str(question.get("checkpoint") or "")
    if not name or Path(name).name != name:
        return
    path, limit = run.checkpoints / name, time.monotonic() + _SEEN_S
    while (found := _digest(path)) != question.get("manifest"):
        if time.monotonic() > limit:
            what = f"{path} is another one than on the head" if found else f"{path} is not there"
            raise _refusal(
                "checkpoint_not_shared", f"{who} does not see the checkpoint that the ranks are to go on from: {what}", host=host,
                evidence=(Evidence(where=who, text=f"looked for it {_SEEN_S:g} s; before the first start this was the head's output_dir"),),
            )  # fmt: skip
        time.sleep(_POLL_S)


def _digest(checkpoint: Path) -> str:
    """Of its manifest, which has the digests of all files; empty where it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(checkpoint / MANIFEST)).hexdigest()
    except OSError:
        return ""


def _refusal(cause: str, summary: str, *, host: str, evidence: tuple[Evidence, ...]) -> Disagreed:
    known = find_cause(cause)
    verdict = Verdict(
        cause=cause, when="before", summary=summary, hosts=(host,), phase="agree.again", evidence=evidence,
        fix=known.remedy if known else (),
    )  # fmt: skip
    return Disagreed.of(summary, where=host, fix="; ".join(verdict.fix), verdict=verdict)


def _device(gpu: Gpu) -> Device:
    return Device(
        index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_bytes,
        memory_free_bytes=gpu.memory_free_bytes, bus_id=gpu.bus_id, numa_node=gpu.numa_node,
    )  # fmt: skip

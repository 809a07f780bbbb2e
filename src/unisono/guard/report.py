"""What a node brings to the table before somebody else's program is started: as for our own runs, without config and files."""

import hashlib
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from unisono.agree.compare import keyed_arguments
from unisono.agree.reports import Device, Interface, Limits, NodeReport, OutputFacts
from unisono.facts import Environment, Machine, Probes
from unisono.facts.environment import read_nccl_files
from unisono.facts.limits import read_limits
from unisono.facts.machine import Gpu
from unisono.facts.probes import SystemClock
from unisono.facts.redaction import redact
from unisono.facts.versions import code_digests, decisive_versions, versions_digest
from unisono.guard.asked import RunAsked, RunShape
from unisono.guard.command import comparable
from unisono.launch.device import visible_gpus
from unisono.launch.nodes.party import Show, Standing

_MOST_BYTES = 64 << 20


def make_report(
    asked: RunAsked,
    shape: RunShape,
    standing: Standing,
    *,
    machine: Machine,
    environment: Environment,
    probes: Probes,
    output_dir: Path,
    show: Show | None = None,
) -> NodeReport:
    """This node's report.

    Args:
        asked: the command.
        shape: of the job, as this node knows it.
        standing: what the channel has told.
        machine: this one.
        environment: of this process, and of the program.
        probes: network, clock and packages.
        output_dir: of this node.
        show: for what a person should know; not used.
    """
    del show
    topology = shape.topology
    ours = runs_in_our_environment(asked.words)
    packages = probes.packages() if ours else {}
    named = asked.devices if asked.devices is not None else environment.visible_devices
    visible = visible_gpus(machine.gpus, named)
    addresses = (
        [probes.network.resolve(name) for name in (machine.host, topology.head_host)]
        if topology.nodes > 1
        else [[], []]
    )
    return NodeReport(
        node_rank=topology.node_rank, host=machine.host, address=standing.address, pid=os.getpid(), nodes=topology.nodes,
        nproc=topology.nproc, nproc_declared=topology.nproc_declared, nproc_origin=topology.nproc_origin,
        device_kind="cuda" if visible else "cpu", chosen=[_device(gpu) for gpu in visible[: topology.nproc]],
        visible=[_device(gpu) for gpu in visible], physical=[_device(gpu) for gpu in machine.gpus],
        visible_variable=named, device_note=machine.gpu_note, variables=environment.variables,
        nccl_files=read_nccl_files(named=environment.variables.get("NCCL_CONF_FILE")),
        versions=decisive_versions(packages), environment_digest=versions_digest(packages) if packages else "", packages=packages,
        code={**code_digests(), **_script(shape)}, config=_words(asked, shape), data_files=[], tokenizer_files=[], model_files=[],
        output=OutputFacts(path=str(output_dir), writable=None, shared=None, free_bytes=None),
        limits=Limits(**asdict(read_limits())), interfaces=[Interface(**asdict(one)) for one in probes.network.interfaces()],
        host_addresses=addresses[0], head_addresses=addresses[1],
        clock_offset_s=None if standing.clock_offset_s is None else standing.clock_offset_s + probes.clock.wall() - SystemClock().wall(),
        probe_ports=list(standing.probe_ports),
    )  # fmt: skip


def runs_in_our_environment(words: tuple[str, ...]) -> bool:
    """Whether a program is of the Python environment that unisono is in: of another one we know no versions."""
    found = shutil.which(words[0]) if words else None
    return found is None or Path(found).parent == Path(sys.executable).parent


def _words(asked: RunAsked, shape: RunShape) -> dict[str, str]:
    """The command without what says which node it is, without secrets and without the way to files that every node may keep elsewhere."""
    words = keyed_arguments(comparable(shape.command))
    found = {
        key: redact(f"{key}={value}").removeprefix(f"{key}=") for key, value in words.items()
    }  # some secrets only their name gives away
    if asked.uneven:
        found["--uneven"] = "given"
    return found


def _script(shape: RunShape) -> dict[str, str]:
    """The digest of the script, if it is a file of a size that is one."""
    path = Path(shape.command.script or "/")
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    except OSError:
        pass  # the program itself will say so
    return {}


def _device(gpu: Gpu) -> Device:
    return Device(
        index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_bytes, memory_free_bytes=gpu.memory_free_bytes,
        bus_id=gpu.bus_id, numa_node=gpu.numa_node,
    )  # fmt: skip

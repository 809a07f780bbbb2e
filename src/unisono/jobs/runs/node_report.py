"""Makes this node's report: all that its front knows before anything imports torch.

Secrets never enter it.
"""

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.files import path_below
from unisono.base.messages import Show
from unisono.base.text import is_secret
from unisono.guard.agree.reports import (
    FileDigest,
    Interface,
    NodeReport,
    OutputFacts,
    name_node,
    reported_device,
)
from unisono.guard.facts import Probes
from unisono.guard.facts.environment import code_digests, decisive_versions, read_nccl_files, versions_digest
from unisono.guard.facts.limits import SystemLimits, read_limits
from unisono.guard.facts.machine import read_machine
from unisono.guard.facts.processes import stuck_threads, wait_until_ended
from unisono.guard.facts.storage import StorageFacts, is_nonce, probe_storage
from unisono.guard.places.placement import visible_gpus
from unisono.guard.rendezvous.party import NONCE_FILE, ChannelFacts, MakeReport
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.node_messages import CheckpointIdentity
from unisono.guard.supervise.task_process import run_request
from unisono.jobs.runs.planning import LocalNode
from unisono.jobs.runs.train_request import TrainRequest, named_code_digests
from unisono.trainer.checkpoint.manifest import manifest_digest
from unisono.trainer.checkpoint.retention import max_without_permanent
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.config.data_sections import sources_of
from unisono.trainer.config.own_code import own_code_of, put_path
from unisono.trainer.config.sections import NamesFile, lf_name, path_keys
from unisono.trainer.plan.task_requests import ContentsRequest, InputDigests

_LOOPBACK = "127.0.0.1"
_GIB = 1 << 30
_MIB = 1 << 20
_CHECKPOINT_BYTES = 12  # of each trained parameter: itself and two moments, in float32


def look_at_files(
    loaded: LoadedConfig, local_node: LocalNode, *, programs: Programs | None = None, show: Show | None = None
) -> InputDigests:
    """The contents of the run's files, read by a separate task; if that fails, the reason: then
    they are UNKNOWN and nothing is refused here.

    Call it from a thread that lives as long as the task: the kernel ends the task with it.
    """
    request = ContentsRequest(loaded.config, local_node.environment.cache_dir)
    try:
        return run_request(request, on_message=show, programs=programs)
    except UnisonoError as error:
        return {"note": error.problems[0].what}


def look_at_output(loaded: LoadedConfig, channel: ChannelFacts) -> StorageFacts:
    """Whether this node can write into its output_dir, and whether it is the head's."""
    name = str(channel.welcome.get(NONCE_FILE) or "")
    return probe_storage(Path(loaded.config.output_dir), nonce=name if is_nonce(name) else None)


def make_node_report(
    *,
    loaded: LoadedConfig,
    local_node: LocalNode,
    channel: ChannelFacts,
    files: InputDigests,
    output: StorageFacts,
    probes: Probes,
) -> NodeReport:
    """This node's report.

    Args:
        loaded: the config, its paths absolute.
        local_node: machine, environment, and this node's part of the job.
        channel: what the channel knows: address, clock, ports.
        files: of `look_at_files`.
        output: of `look_at_output`.
        probes: network, clock and packages.
    """
    machine, environment, topology = local_node.machine, local_node.environment, local_node.topology
    packages = probes.packages()
    limits = read_limits()
    addresses: list[str] = []
    head: list[str] = []
    if (
        topology.nodes > 1
    ):  # a job of one node has no addresses to resolve, and a resolver that hangs would cost three seconds
        addresses, head = _resolved(probes, machine.host, topology.head_host)
    threads, threads_origin = local_node.threads
    return NodeReport(
        node_rank=topology.node_rank,
        host=machine.host,
        address=channel.address,
        pid=os.getpid(),
        nodes=topology.nodes,
        nproc=topology.nproc,
        nproc_declared=topology.nproc_declared,
        nproc_origin=topology.nproc_origin,
        device_kind=local_node.devices[0].kind,
        chosen=[
            reported_device(gpu)
            for place in local_node.devices
            for gpu in machine.gpus
            if gpu.uuid == place.uuid
        ],
        places=local_node.devices,
        threads=threads,
        threads_origin=threads_origin,
        visible=[reported_device(gpu) for gpu in visible_gpus(machine.gpus, environment.visible_devices)],
        physical=[reported_device(gpu) for gpu in machine.gpus],
        visible_variable=environment.visible_devices,
        device_note=machine.gpu_note,
        variables=environment.variables,
        nccl_files=read_nccl_files(named=environment.variables.get("NCCL_CONF_FILE")),
        versions=decisive_versions(packages),
        environment_digest=versions_digest(packages),
        packages=packages,
        code={**code_digests(), **files.get("code", {}), **named_code_digests(loaded.config)},
        config=flat_config(loaded.config),
        data_files=_digests(files.get("data_files", [])),
        tokenizer_files=_digests(files.get("tokenizer_files", [])),
        model_files=_digests(files.get("model_files", [])),
        files_note=str(files.get("note", "")),
        output=OutputFacts(**asdict(output)),
        limits=limits,
        interfaces=[Interface(**asdict(one)) for one in probes.network.interfaces()],
        host_addresses=addresses,
        head_addresses=head,
        clock_offset_s=_offset(channel.clock_offset_s, probes),
        probe_ports=list(channel.probe_ports),
        reserved=reserve(limits, nproc=topology.nproc, disk_bytes=checkpoints_bytes(loaded.config, files)),
    )


def report_maker(request: TrainRequest, loaded: LoadedConfig, local_node: LocalNode) -> MakeReport:
    """The function that makes this node's report once the channel has given address, clock and
    ports.
    """

    def make(channel: ChannelFacts, show: Show) -> NodeReport:
        return make_node_report(
            loaded=loaded,
            local_node=local_node,
            channel=channel,
            files=look_at_files(loaded, local_node, programs=request.programs, show=show),
            output=look_at_output(loaded, channel),
            probes=request.probes,
        )

    return make


def report_alone(request: TrainRequest, loaded: LoadedConfig, local_node: LocalNode) -> NodeReport:
    """The report of the only node of a job of several ranks: its settings, limits and devices are
    checked without its files.
    """
    channel = ChannelFacts(_LOOPBACK, {}, 0.0, [])
    return make_node_report(
        loaded=loaded,
        local_node=local_node,
        channel=channel,
        files={},
        output=look_at_output(loaded, channel),
        probes=request.probes,
    )


def _is_path(mark: NamesFile | None, value: Any) -> bool:
    """Whether a value names files; a template of LLaMA-Factory, an absent adapter and `reference:
    auto` name none.
    """
    if mark is None or (isinstance(value, str) and lf_name(value) is not None):
        return False
    return not (mark.shows_absence and value in (mark.besides, None, []))


def flat_config(config: RunConfig) -> dict[str, object]:
    """The config without paths, flat: `optim.lr` → 0.0002.

    What files hold is compared by their contents, not by their names.
    """
    body = config.model_dump(mode="json", by_alias=True)
    for role in ("train", "eval"):
        sections = [section for key, section in sources_of(config.data) if key.split(".")[1] == role]
        if role == "train" or isinstance(config.data.eval, list):
            # One that is only a path means the same as a section with the defaults.
            body["data"][role] = {
                str(i): section.model_dump(mode="json", exclude={"path"})
                for i, section in enumerate(sections)
            }
        elif sections:
            body["data"][role] = "a file"
    for code in own_code_of(config):
        put_path(body, code, code.path.name)
    marks = path_keys(RunConfig)
    del marks["data.train"], marks["data.eval"]  # they are described above
    return {
        key: value
        for key, value in _flattened(body).items()
        if not _is_path(marks.get(key), value) and not is_secret(value)
    }


def reserve(limits: SystemLimits, *, nproc: int, disk_bytes: int | None) -> dict[str, int]:
    """The settings that the plan leaves to the system on this node, with a rule for each.

    memory_bytes: a tenth of what is free, at least 1 GiB: the page cache, other programs, and the
    kernel's own. shm_bytes: a tenth of what is free in /dev/shm, at least 64 MiB: NCCL and data
    loaders of others. cores: one, where there are more cores than ranks: for the front, the system,
    and who looks at the machine. disk_bytes: the space that all checkpoints of the run will take;
    omitted if it is unknown.

    Args:
        disk_bytes: of `checkpoints_bytes`.
    """
    kept = {
        "memory_bytes": max(_GIB, limits.memory_bytes // 10),
        "cores": 1 if limits.cores > nproc else 0,
    }
    if limits.shm_free_bytes is not None:
        kept["shm_bytes"] = max(64 * _MIB, limits.shm_free_bytes // 10)
    if disk_bytes is not None:
        kept["disk_bytes"] = disk_bytes
    return kept


def checkpoints_bytes(config: RunConfig, files: InputDigests) -> int | None:
    """The maximum disk space of the checkpoints that exist at the same time, see
    `max_without_permanent`; None where the model's size is not known yet.

    A checkpoint holds the trained parameters and AdamW's two moments in float32: 12 bytes each.
    """
    parameters, in_and_out = files.get("parameters"), files.get("linear_in_out")
    if not isinstance(parameters, int) or not isinstance(in_and_out, int):
        return None
    trained = parameters if config.adapter is None else config.adapter.rank * in_and_out
    copies = max_without_permanent(config.checkpoint.keep, best=config.checkpoint.best is not None)
    return trained * _CHECKPOINT_BYTES * copies


def _resolved(probes: Probes, *names: str) -> list[list[str]]:
    """Resolves names in parallel: each may take three seconds."""
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(probes.network.resolve, names))


def _offset(measured: float | None, probes: Probes) -> float | None:
    """The channel measures with the system's clock; a test's clock that is off counts on top of
    it.
    """
    return None if measured is None else measured + probes.clock.wall() - time.time()


def _digests(files: Iterable[Mapping[str, str | int]]) -> list[FileDigest]:
    return [FileDigest.model_validate(value) for value in files]


def _flattened(body: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in body.items():
        if isinstance(value, dict) and value:
            flat |= _flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


_GONE_S = 3.0  # they were killed; what a rank had forked ends a moment later
_SEEN_S = 6.0  # a network file system may show a new directory so much later
_POLL_S = 0.1


def checkpoint_identity(checkpoint: Path | None) -> CheckpointIdentity | None:
    """The checkpoint to resume from, as all nodes must see it; None if there is none."""
    if checkpoint is None:
        return None
    return CheckpointIdentity(checkpoint.name, manifest_digest(checkpoint))


def look_again(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    first: NodeReport,
    channel: ChannelFacts,
    checkpoint: CheckpointIdentity | None,
) -> NodeReport:
    """This node's report with all that may have changed while ranks ran.

    Args:
        loaded: the config, its paths absolute.
        first: this node's report before the first start.
        channel: where it stands at the channel now.
        checkpoint: to resume from, as the head sees it.

    Raises:
        Disagreed: if old ranks still live, or the checkpoint is not seen where it was to be.
    """
    who = name_node(first.node_rank, first.host)
    refuse_old_ranks(who, first.host)
    output = look_at_output(loaded, channel)
    sees_output = first.node_rank != 0 and first.output.shared and output.writable is not False
    if checkpoint is not None and sees_output:
        _see_checkpoint(RunDir(Path(loaded.config.output_dir)), checkpoint, who=who, host=first.host)
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
            "address": channel.address,
            "probe_ports": list(channel.probe_ports),
            "clock_offset_s": channel.clock_offset_s,
            "output": OutputFacts(**asdict(output)),
            "limits": read_limits(),
            "interfaces": [Interface(**asdict(one)) for one in request.probes.network.interfaces()],
            "chosen": [reported_device(gpu) for gpu in machine.gpus if gpu.uuid in chosen],
            "visible": [
                reported_device(gpu)
                for gpu in visible_gpus(machine.gpus, local_node.environment.visible_devices)
            ],
            "physical": [reported_device(gpu) for gpu in machine.gpus],
            "device_note": machine.gpu_note,
            "reserved": reserved,
        }
    )


def refuse_old_ranks(who: str, host: str) -> None:
    """Sees that nothing of the ranks that this front has started lives any more: it would hold
    devices, memory and files.

    Raises:
        Disagreed: stale_process, with the pids and what they wait in.
    """
    left = wait_until_ended(os.getpid(), limit_s=_GONE_S)
    if not left:
        return
    shown = ", ".join(map(str, left[:8]))
    waits = tuple(
        Evidence(where=f"{who}, pid {pid}", text=str(one))
        for pid in left[:4]
        for one in stuck_threads(pid)[:1]
    )
    raise _refusal(
        "stale_process",
        f"{who}: ranks of the start before are still alive {_GONE_S:g} s after they were killed: pid {shown}",
        host=host,
        evidence=waits,
    )


def _see_checkpoint(run: RunDir, checkpoint: CheckpointIdentity, *, who: str, host: str) -> None:
    try:
        path = path_below(run.checkpoints, checkpoint.name, parts=1)
    except ValueError:  # not the name of a checkpoint
        return
    limit = time.monotonic() + _SEEN_S
    while (digest := manifest_digest(path)) != checkpoint.manifest:
        if time.monotonic() > limit:
            what = f"{path} differs from the head's" if digest else f"{path} is not there"
            raise _refusal(
                "checkpoint_not_shared",
                f"{who} does not see the checkpoint to resume from: {what}",
                host=host,
                evidence=(
                    Evidence(
                        where=who,
                        text=f"looked for it {_SEEN_S:g} s; before the first start this was the head's output_dir",
                    ),
                ),
            )
        time.sleep(_POLL_S)


def _refusal(cause: str, summary: str, *, host: str, evidence: tuple[Evidence, ...]) -> Disagreed:
    known = find_cause(cause)
    verdict = Verdict(
        cause=cause,
        when="before",
        summary=summary,
        hosts=(host,),
        phase="agree.again",
        evidence=evidence,
        fix=known.remedy if known else (),
    )
    return Disagreed.of(summary, where=host, fix="; ".join(verdict.fix), verdict=verdict)

"""The place of this front in a job that ssh or Slurm has laid out, and its report to the meeting
before the program starts.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from unisono.base.messages import Show
from unisono.base.text import redact
from unisono.guard.agree.compare import keyed_arguments
from unisono.guard.agree.reports import Interface, NodeReport, OutputFacts, reported_device
from unisono.guard.facts import Environment, Machine, Probes, SystemClock
from unisono.guard.facts.environment import code_digests, decisive_versions, read_nccl_files, versions_digest
from unisono.guard.facts.limits import read_limits
from unisono.guard.facts.network import NetworkProbe
from unisono.guard.places.placement import usable_accelerators, visible_gpus
from unisono.guard.places.topology import Accelerators, Topology, refuse_lone_node
from unisono.guard.programs.launcher_facts import Command, comparable, read_command
from unisono.guard.programs.program_request import RunRequest, RunShape, read_shape
from unisono.guard.rendezvous.head_address import is_this_machine
from unisono.guard.rendezvous.party import ChannelFacts, Token, make_token, read_token, watch_lifeline
from unisono.guard.rendezvous.remote_fronts import RemoteCommand, find_head, placed_by_slurm, token_of_step

_MOST_BYTES = 64 << 20
_ALL_DEVICES = ("llamafactory", "accelerate", "deepspeed")


def find_shape(
    request: RunRequest,
    machine: Machine,
    environment: Environment,
    variables: Mapping[str, str],
    network: NetworkProbe,
) -> RunShape:
    """The job of a command line, with `--hosts` and the place given by a Slurm step.

    Args:
        variables: all environment variables.

    Raises:
        UsageError: as in `read_shape`, or if a host has no route.
    """
    command = read_command(request.words)
    visible = request.devices if request.devices is not None else environment.visible_devices
    shape = read_shape(
        request,
        command,
        variables,
        (
            usable_accelerators(machine, requested="auto", visible=visible)
            if _starts_rank_per_device(command)
            else Accelerators(0)
        ),
        is_local=lambda host: is_this_machine(host, network),
        placed=placed_by_slurm(environment.slurm_step, network),
    )
    if request.launcher is not None and request.launcher.expects_nodes:
        refuse_lone_node(request.nodes, shape.topology)
    return replace(shape, topology=find_head(shape.topology, network))


def _starts_rank_per_device(command: Command) -> bool:
    """Whether the program starts one rank per device unless it is given a number."""
    nproc = command.option("nproc_per_node")
    return command.kind in _ALL_DEVICES or (nproc is not None and nproc.text in ("gpu", "auto"))


def describe_shape(shape: RunShape) -> list[str]:
    """How the command line was read; empty for one node."""
    topology = shape.topology
    if topology.nodes == 1:
        return []
    origins = topology.origins
    return [
        f"{topology.nodes} nodes ({origins.get('nodes', '?')}), this is node {topology.node_rank}"
        f" ({origins.get('node_rank', '--hosts' if topology.hosts else '?')}), head"
        f" {topology.head_host}{f':{topology.head_port}' if topology.head_port else ''}"
        f" ({origins.get('head', '?')}), {topology.nproc} rank{'' if topology.nproc == 1 else 's'} here"
        f" ({topology.nproc_origin})"
    ]


def find_token(
    request: RunRequest, topology: Topology, environment: Environment, given: str | None
) -> Token | None:
    """The job's token; None for one node.

    A front that was started over SSH ends with the process that started it.

    Raises:
        UsageError: if there are several nodes and no token, or its file is not private.
    """
    if topology.hosts and request.token_file is None and given is None:
        return make_token()
    token = read_token(request.token_file, given or token_of_step(environment), nodes=topology.nodes)
    if token is not None and token.from_stdin:
        watch_lifeline()
    return token


def program_environment(request: RunRequest, variables: Mapping[str, str]) -> dict[str, str]:
    """The program's environment.

    SSH gives a front a bare PATH, so the directory of its Python, with torchrun etc., is added.
    """
    if not request.from_stdin:
        return dict(variables)
    path = [str(Path(sys.executable).parent), *filter(None, [variables.get("PATH")])]
    return {**variables, "PATH": os.pathsep.join(path)}


def remote_run(request: RunRequest, output_dir: Path) -> RemoteCommand:
    """This `unisono run` for a different node, with the same output directory."""
    return RemoteCommand(
        ("run",),
        {
            "--join-timeout": f"{request.join_timeout_s:g}",
            "--nproc": request.nproc,
            "--devices": request.devices,
            "--output-dir": output_dir,
            "--uneven": request.uneven or None,
            "--debug-comm": request.debug_comm or None,
        },
        ("--", *request.words),
        request.ssh,
    )


def make_report(
    request: RunRequest,
    shape: RunShape,
    channel: ChannelFacts,
    *,
    machine: Machine,
    environment: Environment,
    probes: Probes,
    output_dir: Path,
    show: Show | None = None,
) -> NodeReport:
    """This node's report.

    Args:
        shape: of the job, as this node knows it.
        environment: of this process and of the program.
        probes: network, clock and packages.
        show: not used.
    """
    del show
    topology = shape.topology
    is_own_environment = runs_in_our_environment(request.words)
    packages = probes.packages() if is_own_environment else {}
    named = request.devices if request.devices is not None else environment.visible_devices
    visible = visible_gpus(machine.gpus, named)
    addresses = (
        [probes.network.resolve(name) for name in (machine.host, topology.head_host)]
        if topology.nodes > 1
        else [[], []]
    )
    return NodeReport(
        node_rank=topology.node_rank,
        host=machine.host,
        address=channel.address,
        pid=os.getpid(),
        nodes=topology.nodes,
        nproc=topology.nproc,
        nproc_declared=topology.nproc_declared,
        nproc_origin=topology.nproc_origin,
        device_kind="cuda" if visible else "cpu",
        chosen=[reported_device(gpu) for gpu in visible[: topology.nproc]],
        visible=[reported_device(gpu) for gpu in visible],
        physical=[reported_device(gpu) for gpu in machine.gpus],
        visible_variable=named,
        device_note=machine.gpu_note,
        variables=environment.variables,
        nccl_files=read_nccl_files(named=environment.variables.get("NCCL_CONF_FILE")),
        versions=decisive_versions(packages),
        environment_digest=versions_digest(packages) if packages else "",
        packages=packages,
        code={**code_digests(), **_script(shape)},
        config=_words(request, shape),
        data_files=[],
        tokenizer_files=[],
        model_files=[],
        output=OutputFacts(path=str(output_dir), writable=None, shared=None, free_bytes=None),
        limits=read_limits(),
        interfaces=[Interface(**asdict(one)) for one in probes.network.interfaces()],
        host_addresses=addresses[0],
        head_addresses=addresses[1],
        clock_offset_s=(
            None
            if channel.clock_offset_s is None
            else channel.clock_offset_s + probes.clock.wall() - SystemClock().wall()
        ),
        probe_ports=list(channel.probe_ports),
    )


def runs_in_our_environment(words: tuple[str, ...]) -> bool:
    """Whether a program runs in unisono's Python environment: only of that one the versions are
    known.
    """
    program = shutil.which(words[0]) if words else None
    return program is None or Path(program).parent == Path(sys.executable).parent


def _words(request: RunRequest, shape: RunShape) -> dict[str, object]:
    """The command without node-specific options, secrets, and directories that may differ between
    nodes.
    """
    words = keyed_arguments(comparable(shape.command))
    given: dict[str, object] = {
        key: redact(f"{key}={value}").removeprefix(f"{key}=") for key, value in words.items()
    }  # some secrets are recognized only by their name
    if request.uneven:
        given["--uneven"] = "given"
    return given


def _script(shape: RunShape) -> dict[str, str]:
    """The digest of the script, if it is a file of reasonable size."""
    path = Path(shape.command.script or "/")
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    except OSError:
        pass  # the program itself will report it
    return {}

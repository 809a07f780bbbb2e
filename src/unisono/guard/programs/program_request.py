"""The job by our options, the program's arguments, and the environment, in this order;
contradictions are refused.

Pure.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from unisono.base.errors import Problem, UsageError
from unisono.guard.integrations.inside import injected, why_unguardable
from unisono.guard.places.topology import (
    DEFAULT_PORT,
    Accelerators,
    Placed,
    Topology,
    TopologyRequest,
    parse_head,
    parse_hosts,
    read_topology,
)
from unisono.guard.programs.launcher_facts import Command, LauncherSettings, Setting, read_job
from unisono.guard.programs.program_end import GRACE_S

_VARIABLES = {"nodes": "NNODES", "node_rank": "NODE_RANK", "nproc": "NPROC_PER_NODE", "head": "MASTER_ADDR"}


class ProgramLauncher(Protocol):
    """A launcher, as far as `unisono run` can use it."""

    @property
    def expects_nodes(self) -> bool:
        """Whether the job has several nodes."""
        ...

    def check_program(self, program: str, *, several: bool) -> None:
        """Checks that `unisono run` can start a program with it.

        Args:
            program: its command line.
            several: whether several nodes are requested.

        Raises:
            UsageError: if it cannot, with the command to type.
        """
        ...


@dataclass(frozen=True)
class RunRequest:
    """Options of `unisono run`.

    Attributes:
        words: the program, after `--`.
        nproc: `--nproc`.
        nodes: `--nodes`.
        node_rank: `--node-rank`.
        head: `--head`.
        token_file: `--token-file`.
        join_timeout_s: `--join-timeout`, seconds.
        grace_s: `--grace`: how long the program has to end after a signal, seconds.
        idle_limit_s: `--idle-limit`: how long all ranks may be idle, seconds; 0: no limit.
        output_dir: `--output-dir`; empty: `runs/run-<UTC time>-<pid>`.
        uneven: `--uneven`: nodes may have unequal numbers of ranks.
        debug_comm: `--debug-comm`.
        json: `--json`.
        devices: `--devices`, as typed: visible to the program.
        hosts: `--hosts`, as typed: this machine and those to start over SSH, separated by commas.
        ssh: the SSH command with options; tests use their own port and keys.
        launcher: `--launcher`: what starts the fronts; None: not given.
    """

    words: tuple[str, ...]
    nproc: int | None = None
    nodes: str | None = None
    node_rank: int | None = None
    head: str | None = None
    token_file: str | None = None
    join_timeout_s: float = 300.0
    grace_s: float = GRACE_S
    idle_limit_s: float = 1800.0
    output_dir: str = ""
    uneven: bool = False
    debug_comm: bool = False
    json: bool = False
    devices: str | None = None
    hosts: str | None = None
    ssh: tuple[str, ...] = ("ssh",)
    launcher: ProgramLauncher | None = None

    @property
    def from_stdin(self) -> bool:
        """Whether stdin belongs to the process that started this front over SSH, and not to the
        program.
        """
        return self.token_file == "-"  # noqa: S105 - not a secret


@dataclass(frozen=True)
class RunShape:
    """The job, as this node knows it.

    Attributes:
        topology: nodes, which one this is, the head, ranks here.
        job: by the command line and the environment alone.
        own_rendezvous: whether the program's ranks meet at a port of their own; then ours is a
            different one.
        notes: to show before the start.
    """

    topology: Topology
    command: Command
    job: LauncherSettings
    own_rendezvous: bool
    notes: tuple[str, ...] = field(default=())


def read_shape(
    request: RunRequest,
    command: Command,
    variables: Mapping[str, str],
    accelerators: Accelerators,
    *,
    is_local: Callable[[str], bool] = lambda _host: False,
    placed: Placed | None = None,
) -> RunShape:
    """The job of a command line.

    Args:
        accelerators: that the program would see here.
        is_local: whether a host of `--hosts` is this machine.
        placed: by a scheduler that started one front on each node.

    Raises:
        UsageError: if two sources contradict each other, or something is missing or cannot be read.
    """
    job = read_job(command, variables)
    _refuse_contradictions(request, job, variables)
    _refuse_elastic(request, job)
    starts_ranks = (
        command.kind in ("accelerate", "deepspeed")
        or job.backend is not None
        or "standalone" in command.options
    )
    merged, origins = _merged(job)
    try:
        topology = read_topology(
            TopologyRequest(
                nproc=request.nproc,
                nodes=request.nodes,
                node_rank=request.node_rank,
                head=request.head,
                hosts=parse_hosts(request.hosts),
                command="unisono run",
            ),
            merged,
            replace(accelerators, count=0) if request.nproc is not None or job.nproc else accelerators,
            is_local=is_local,
            placed=placed,
        )
    except UsageError as error:
        raise UsageError(*(_in_its_words(problem, origins) for problem in error.problems)) from error
    _refuse_other_hosts(request, job, topology, variables)
    topology = replace(
        topology,
        origins={k: _origin_shown(v, origins) for k, v in topology.origins.items()},
        nproc_origin=origins.get(topology.nproc_origin, topology.nproc_origin),
        nproc_declared=topology.nproc_declared and not _is_automatic(job, request),
    )
    topology, notes = _ports(request, job, topology, starts_ranks=starts_ranks)
    return RunShape(topology, command, job, starts_ranks, notes)


def _origin_shown(origin: str, origins: Mapping[str, str]) -> str:
    """The origin of a value, possibly two names, in the program's own terms."""
    return ", ".join(origins.get(name, name) for name in origin.split(", "))


def _is_automatic(job: LauncherSettings, request: RunRequest) -> bool:
    return request.nproc is None and job.nproc is not None and not job.nproc.text.isdigit()


def _merged(job: LauncherSettings) -> tuple[dict[str, str], dict[str, str]]:
    """The program's values under the names that read_topology knows, and their real origins."""
    values = {
        "NNODES": job.nodes,
        "NODE_RANK": job.node_rank,
        "NPROC_PER_NODE": job.nproc,
        "MASTER_ADDR": job.host,
        "MASTER_PORT": job.port,
    }
    declared = {name: value for name, value in values.items() if value is not None}
    if "MASTER_PORT" in declared and declared["MASTER_PORT"].text == "0":  # means any port
        del declared["MASTER_PORT"]
    merged = {name: value.text for name, value in declared.items()}
    if job.nodes is not None and ":" in job.nodes.text:
        merged["NNODES"] = job.nodes.text.rpartition(":")[2]
    if job.nproc is not None and job.nproc.text in ("cpu", "xpu"):
        merged["NPROC_PER_NODE"] = "auto"
    return merged, {name: value.origin for name, value in declared.items()}


def _in_its_words(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the program's own option instead of the variable that carried its value."""
    texts = {name: getattr(problem, name) for name in ("what", "where", "why", "fix")}
    for variable, origin in origins.items():
        texts = {name: text.replace(variable, origin) for name, text in texts.items()}
    return Problem(**texts)


def _refuse_contradictions(request: RunRequest, job: LauncherSettings, variables: Mapping[str, str]) -> None:
    """Refuses an option of ours that contradicts the program's argument.

    Variables have lower priority than both.
    """
    host, port = parse_head(request.head, "--head") if request.head is not None else (None, None)
    pairs: list[tuple[str, object, Setting | None]] = [
        ("--nodes", request.nodes, job.nodes),
        ("--node-rank", request.node_rank, job.node_rank),
        ("--nproc", request.nproc, job.nproc),
        ("--head", host, job.host),
    ]
    problems = []
    for option, value, program_value in pairs:
        if (
            value is None
            or program_value is None
            or program_value.origin in variables
            or _is_same(str(value), program_value.text)
        ):
            continue
        problems.append(
            Problem(
                f"{option} {value} and {program_value.origin} {program_value.text} contradict each other",
                where="command line",
                why="the program would follow its own argument",
                fix=f"pass one of them, or the same value in both: {option} {program_value.text}",
            )
        )
    del port
    if problems:
        raise UsageError(*problems)


def refuse_launcher(request: RunRequest) -> None:
    """Refuses launchers that `run` does not have: under Ray, Slurm and the like each node runs its
    own `unisono run`.

    Raises:
        UsageError: if `--launcher` is not supported, or contradicts the other options.
    """
    if request.launcher is not None:
        several = request.hosts is not None or request.nodes not in (None, "1")
        request.launcher.check_program(shlex.join(request.words), several=several)


def _refuse_other_hosts(
    request: RunRequest, job: LauncherSettings, topology: Topology, variables: Mapping[str, str]
) -> None:
    """Refuses arguments of the program that conflict with `--hosts`, where one command line is for
    all nodes.
    """
    if request.hosts is None:
        return
    rank, nodes = job.node_rank, job.nodes
    if rank is not None and rank.origin not in variables:
        raise UsageError.of(
            f"--hosts starts the same program on every node, but {rank.origin} {rank.text} selects one node",
            where="command line",
            fix=f"omit {rank.origin}: it is set on every node",
        )
    if nodes is not None and nodes.origin not in variables and not _is_same(str(topology.nodes), nodes.text):
        raise UsageError.of(
            f"--hosts makes {topology.nodes} nodes with this one, but {nodes.origin} is {nodes.text}",
            where="command line",
            fix=f"omit {nodes.origin}, or name as many hosts",
        )


def _is_same(value: str, program_value: str) -> bool:
    if not program_value[:1].isdigit() and program_value in ("auto", "gpu", "cpu", "xpu"):
        return True  # not a number
    spans = {value, f"{value}:{value}"}
    return program_value in spans or (
        program_value.isdigit() and value.isdigit() and int(program_value) == int(value)
    )


def _refuse_elastic(request: RunRequest, job: LauncherSettings) -> None:
    """Refuses a range of nodes: a job whose number of nodes may change cannot be compared."""
    for text, origin in (
        (request.nodes, "--nodes"),
        (job.nodes.text, job.nodes.origin) if job.nodes else (None, ""),
    ):
        low, colon, high = (text or "").partition(":")
        if colon and low != high:
            raise UsageError.of(
                f"{origin} {text}: `run` needs a fixed number of nodes",
                where="command line",
                why="all nodes compare their settings before the start, and must know the number of nodes",
                fix=f"{origin} {high}",
            )


def _ports(
    request: RunRequest, job: LauncherSettings, topology: Topology, *, starts_ranks: bool
) -> tuple[Topology, tuple[str, ...]]:
    """Chooses the port of the control channel: the head's, or the next one if the program listens
    there.
    """
    if topology.nodes == 1 or not starts_ranks:
        return topology, ()
    program_value = int(job.port.text) if job.port is not None and job.port.text.isdigit() else None
    if program_value is None or topology.head_port != program_value:
        return topology, ()
    origin = job.port.origin if job.port is not None else ""
    if (
        request.head is not None
        and parse_head(request.head, "--head")[1] == program_value
        and request.head.endswith(str(program_value))
    ):
        raise UsageError.of(
            f"--head {request.head} and {origin} {program_value} use the same port",
            where="command line",
            why="the fronts communicate over it before and during the program",
            fix=f"--head {topology.head_host}:{program_value + 1}",
        )
    port = program_value + 1 if program_value < 65_535 else DEFAULT_PORT
    note = f"the program uses port {program_value} itself ({origin}); the fronts use {port}"
    return replace(topology, head_port=port), (note,)


_OWN_VARIABLES = ("UNISONO_TOKEN", "UNISONO_GUARD")


@dataclass(frozen=True)
class ProgramEnvironment:
    """The environment that the program is started with.

    Attributes:
        environment: all variables.
        notes: about variables that were set, to show.
    """

    environment: dict[str, str]
    notes: tuple[str, ...] = ()


def build_environment(
    request: RunRequest,
    shape: RunShape,
    environment: Mapping[str, str],
    *,
    guard_file: Path,
    store: tuple[str, int] | None,
) -> ProgramEnvironment:
    """The program's environment.

    Args:
        guard_file: of the border.
        store: address of torch's store on node 0; None for one node.
    """
    variables = {name: value for name, value in environment.items() if name not in _OWN_VARIABLES}
    notes: list[str] = []
    unguardable = why_unguardable(request.words)
    if unguardable is not None:
        notes.append(f"{unguardable}: only deaths of its ranks are detected")
    variables = injected(variables, guard_file)
    topology = shape.topology
    if request.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = request.devices
    if request.nproc is not None:
        variables |= {"NPROC_PER_NODE": str(request.nproc), "PET_NPROC_PER_NODE": str(request.nproc)}
    if request.debug_comm:
        variables |= {
            "NCCL_DEBUG": "INFO",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "TORCH_CPP_LOG_LEVEL": "INFO",
        }
    if topology.nodes == 1 or store is None:
        return ProgramEnvironment(variables, tuple(notes))
    host, port = store
    node_variables = {"NNODES": str(topology.nodes), "NODE_RANK": str(topology.node_rank)}
    variables |= node_variables | {"PET_NNODES": str(topology.nodes)}
    if shape.own_rendezvous:
        variables["PET_NODE_RANK"] = str(
            topology.node_rank
        )  # our rendezvous knows it, and torchrun would warn that it does not
    else:
        variables |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "PET_MASTER_ADDR": host,
            "PET_MASTER_PORT": str(port),
            "PET_RDZV_BACKEND": "unisono",
            "PET_RDZV_ENDPOINT": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "PET_RDZV_CONF": f"rank={topology.node_rank}",
        }
    if shape.command.kind == "llamafactory" and variables.get("FORCE_TORCHRUN", "") not in (
        "1",
        "true",
        "True",
    ):
        variables["FORCE_TORCHRUN"] = "1"
        notes.append(
            "FORCE_TORCHRUN=1 is set: with one device, LLaMA-Factory would train on each node separately"
        )
    return ProgramEnvironment(variables, tuple(notes))

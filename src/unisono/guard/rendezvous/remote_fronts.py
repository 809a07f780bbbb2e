"""Fronts on other nodes: those of `--hosts`, started over SSH (each exits when its stdin closes),
and those started by srun.
"""

import contextlib
import hashlib
import hmac
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from unisono.base.causes import Evidence, Verdict
from unisono.base.causes.variables import find_variable
from unisono.base.errors import UnfitError, UsageError
from unisono.base.text import one_line
from unisono.base.user_key import user_key
from unisono.guard.agree.reports import name_node
from unisono.guard.facts import Environment
from unisono.guard.facts.network import NetworkProbe, is_loopback
from unisono.guard.facts.slurm import SlurmStep, hosts_of, node_states
from unisono.guard.places.topology import HOST_PATTERN, Placed, Topology
from unisono.guard.rendezvous.head_address import address_towards
from unisono.guard.supervise.child_process import option_args
from unisono.guard.supervise.task_process import tail_of

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_SSH_FAILED = 255
_TAIL_LINES = 6
_PLACEMENT_VARIABLES = (
    *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_", "RDZV_", "TORCHELASTIC_"),
    *("WORLD_SIZE", "LOCAL_", "GROUP_", "RANK"),
)
"""Variables that describe this node alone, by prefix: they are not forwarded to other nodes."""


@dataclass(frozen=True)
class RemoteCommand:
    """The command of the other nodes, without the options for their place in the job.

    Attributes:
        words: arguments of `unisono`: `train`, CONFIG, key=value …
        options: by name, as `option_args` takes them.
        tail: arguments after all options: `--` and a program.
        ssh: the client with its options; tests use their own port and keys.
    """

    words: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    tail: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)


@dataclass
class SshFront:
    """One front on a remote host.

    Attributes:
        host: as in `--hosts`.
    """

    node_rank: int
    host: str
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]

    @property
    def name(self) -> str:
        """The host without the user name."""
        return self.host.rpartition("@")[2]


@dataclass
class SshFronts:
    """The fronts that this node has started. As a context manager it ends all of them.

    Attributes:
        fronts: by node rank, from 1.
    """

    fronts: list[SshFront]
    logs: Path
    _folder: "tempfile.TemporaryDirectory[str] | None" = field(default=None, repr=False)

    def __enter__(self) -> "SshFronts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def failures(self) -> dict[int, Verdict]:
        """A verdict for each front that has exited, by node rank.

        It applies only if the node is not in the meeting.
        """
        return {
            front.node_rank: self._failure(front) for front in self.fronts if front.process.poll() is not None
        }

    def tail(self, node_rank: int) -> list[str]:
        """The last lines that a front printed."""
        front = next(front for front in self.fronts if front.node_rank == node_rank)
        lines = [one_line(line, limit=300) for line in tail_of(front.output).splitlines()]
        return [line for line in lines if line][-_TAIL_LINES:]

    def close(self, *, patience_s: float = 5.0) -> None:
        """Closes their stdin, on which they exit; waits a bounded time, then kills the local ssh
        clients.
        """
        for front in self.fronts:
            if front.process.stdin is not None:
                with contextlib.suppress(OSError):
                    front.process.stdin.close()
        limit = time.monotonic() + patience_s
        for front in self.fronts:
            try:
                front.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                front.process.kill()
                front.process.wait()
            front.output.close()
        self.fronts = []
        if self._folder is not None:
            self._folder.cleanup()

    def _failure(self, front: SshFront) -> Verdict:
        who = name_node(front.node_rank, front.name)
        tail = self.tail(front.node_rank)
        code = front.process.returncode
        if code == _SSH_FAILED:
            why, fix = (
                "ssh could not start it",
                f"ssh -o BatchMode=yes {front.host} true   # must work without a prompt",
            )
        elif code < 0:
            why, fix = f"its ssh client was killed by signal {-code}", "run the command again"
        else:
            why = f"its front exited with exit code {code} before it had joined the head"
            fix = f"check its output, and run the command on {front.host} yourself"
        last = f": {tail[-1]}" if tail else ""
        return Verdict(
            cause="node_missing",
            when="before",
            hosts=(front.name,),
            phase="agree.call",
            summary=f"{who} did not join: {why}{last}",
            fix=(fix,),
            evidence=tuple(Evidence(where=f"{who}, its output", text=line) for line in tail),
        )


def find_head(topology: Topology, network: NetworkProbe) -> Topology:
    """The topology with the head's address: with --hosts and without --head, this machine's source
    address towards the hosts.

    The system then chooses the port (0). A topology with an address, or without other nodes, is
    returned unchanged.

    Raises:
        UsageError: if a host cannot be resolved or reached, or the hosts need different addresses.
    """
    if not topology.hosts or topology.head_host:
        return topology
    towards = {host: address_towards(host, network) for host in topology.hosts}
    unresolved = [host for host, address in towards.items() if not address]
    if unresolved:
        raise UsageError.of(
            f"--hosts: {', '.join(unresolved)} cannot be resolved or reached from here",
            where="command line",
            fix="use names that `getent hosts NAME` resolves, or IP addresses",
        )
    addresses = sorted(set(towards.values()), key=lambda address: (is_loopback(address), address))
    if len(addresses) > 1:
        ways = ", ".join(f"{address} towards {host}" for host, address in towards.items())
        raise UsageError.of(
            "--hosts: this machine has different source addresses towards these hosts",
            where="command line",
            why=ways,
            fix=f"pass an address that all of them can reach: --head {addresses[0]}",
        )
    origins = {**topology.origins, "head": "this machine's source address towards --hosts"}
    return replace(topology, head_host=addresses[0], head_port=0, origins=origins)


def start_others(
    remote: RemoteCommand,
    topology: Topology,
    token: bytes,
    head: tuple[str, int],
    *,
    logs: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> SshFronts:
    """Starts a front on each host of the topology, in the same working directory with the same
    Python.

    Args:
        topology: of this node; its `hosts` are started.
        token: written to each front's stdin, which stays open as its lifeline.
        logs: a folder for their output (`HOST-front.log`); None: a private one that `close`
            removes.
        variables: of this node's environment (`Environment.variables`); those that must be equal on
            all nodes are forwarded.

    Raises:
        UsageError: if no ssh client is installed.
    """
    folder = tempfile.TemporaryDirectory(prefix="unisono-ssh-") if logs is None else None
    log_folder = Path(folder.name) if folder else logs
    assert log_folder is not None
    log_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    started = SshFronts([], log_folder, folder)
    carried = forwarded_variables(variables or {})
    try:
        for node_rank, host in enumerate(topology.hosts, start=1):
            command = remote_command(remote, topology, node_rank, head, variables=carried)
            started.fronts.append(_start(remote.ssh, node_rank, host, command, token, log_folder))
    except BaseException:  # a partial start leaves no front behind; raised again
        started.close()
        raise
    return started


def remote_command(
    remote: RemoteCommand,
    topology: Topology,
    node_rank: int,
    head: tuple[str, int],
    *,
    variables: Mapping[str, str] | None = None,
) -> str:
    """The remote shell's command: `cd DIR && exec PYTHON -m unisono train …`, every word quoted,
    without the token.
    """
    host, port = head
    placement = {
        "--nodes": topology.nodes,
        "--node-rank": node_rank,
        "--head": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "--token-file": "-",
    }
    options = option_args({**placement, **remote.options})
    words = [sys.executable, "-m", "unisono", *remote.words, *options, *remote.tail]
    setting = (
        ["env", *(f"{name}={value}" for name, value in sorted((variables or {}).items()))]
        if variables
        else []
    )
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*setting, *words])}"


def forwarded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of this node that must be equal on all nodes and do not describe this node
    alone.
    """
    forwarded = {}
    for name, value in variables.items():
        variable = find_variable(name)
        if variable is not None and variable.group == "equal" and not name.startswith(_PLACEMENT_VARIABLES):
            forwarded[name] = value
    return forwarded


def _start(ssh: Sequence[str], node_rank: int, host: str, command: str, token: bytes, logs: Path) -> SshFront:
    path = logs / f"{host.rpartition('@')[2].replace(':', '-')}-front.log"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    output = os.fdopen(fd, "ab", buffering=0)
    try:
        process = subprocess.Popen(
            [*ssh, *_OPTIONS, "--", host, command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise UsageError.of(
            f"--hosts needs {ssh[0]}, which cannot be started",
            where="this machine",
            why=error.strerror or str(error),
            fix=(
                "install an ssh client, or run the command on every node with --nodes, --node-rank and --head"
            ),
        ) from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has exited already: `failures` gives the reason
        process.stdin.write(token + b"\n")
        process.stdin.flush()
    return SshFront(node_rank, host, process, output)


_PORTS = range(20_000, 32_000)
"""Below the usual ephemeral ports; two jobs on one node use different ports."""
_EVIDENCE_S = 2.0  # a verdict does not wait longer for Slurm's node states
MAKE_ONE = 'UNISONO_TOKEN=$(python3 -c "import secrets; print(secrets.token_urlsafe(32))")'
"""A prefix for `srun`, which passes its environment to all tasks; the token is in no command
line.
"""


def placed_by_slurm(step: SlurmStep | None, network: NetworkProbe) -> Placed | None:
    """The place of this front in its step; None if it is alone, or outside a step."""
    if step is None or step.nodes == 1 or step.tasks != step.nodes:
        return None
    hosts = hosts_of(step.nodelist)
    if len(hosts) != step.nodes or not HOST_PATTERN.fullmatch(hosts[0]):
        return None
    port = _PORTS[(int(step.job) * 7 + int(step.step)) % len(_PORTS)]
    host, origin = hosts[0], "the first of SLURM_STEP_NODELIST"
    addresses = network.resolve(host)
    if not addresses or all(is_loopback(address) for address in addresses):
        address = _address_of(host)  # Slurm's node names may not resolve in the network
        if address and address != host:
            host, origin = address, f"NodeAddr of {hosts[0]}, {origin}"
    origins = {
        "nodes": f"SLURM_STEP_NUM_NODES of step {step.name}",
        "node_rank": "SLURM_NODEID",
        "head": f"{origin}; the port is the job's",
    }
    return Placed(step.nodes, step.node, host, port, origins)


def token_of_step(environment: Environment) -> str | None:
    """The token of a user's fronts in one step, if they share a home folder; None outside a step.

    It is derived from the user's key and the step's name, so nothing is written or transmitted.
    """
    step = environment.slurm_step
    if step is None or step.nodes == 1:
        return None
    try:
        key = user_key(environment.settings_dir)
    except UnfitError:
        # The folder is not writable: a token is required, as on nodes without a scheduler.
        return None
    text = f"unisono, token of Slurm step {step.name}, restart {step.restart}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def token_hint(environment: Environment) -> str:
    """A hint for nodes without a common key; empty outside a step."""
    if environment.slurm_step is None:
        return ""
    return (
        f"without UNISONO_TOKEN the step's nodes derive the token from {environment.settings_dir}, which"
        f" differs between nodes: {MAKE_ONE} srun …"
    )


def step_evidence(step: SlurmStep) -> tuple[Evidence, ...]:
    """Evidence for a verdict on a job in a Slurm step: the step, its nodes, and the nodes that
    Slurm reports as unusable.
    """
    hosts = hosts_of(step.nodelist)
    requeued = f", requeued {step.restart} times" if step.restart else ""
    evidence = [
        Evidence(
            where=f"Slurm job {step.job}, step {step.name}",
            text=f"nodes {','.join(hosts) or step.nodelist}{requeued}",
        )
    ]
    for node in node_states(step.nodelist, limit_s=_EVIDENCE_S):
        if not node.usable:
            number = f"node {hosts.index(node.name)} " if node.name in hosts else ""
            evidence.append(
                Evidence(
                    where=f"Slurm node {node.name}",
                    text=f"{number}({node.name}) is {node.description.partition(' is ')[2]}",
                )
            )
    return tuple(evidence)


def _address_of(node: str) -> str:
    """A node's NodeAddr from the controller; empty if unknown."""
    address = next((state.address for state in node_states(node)), "")
    return address if HOST_PATTERN.fullmatch(address) else ""

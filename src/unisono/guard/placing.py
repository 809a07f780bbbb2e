"""Where this front stands in a job that ssh or Slurm has laid out: the shape of it, the secret, and the same command for the other nodes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono.facts import Environment
from unisono.facts.network import NetworkProbe
from unisono.guard.asked import RunAsked, RunShape, read_shape
from unisono.guard.command import Command
from unisono.launch.nodes.address import is_this_machine
from unisono.launch.nodes.ssh import Remote, find_head
from unisono.launch.srun import placed_by_slurm, token_of_step
from unisono.launch.token import Token, make_token, read_token, watch_lifeline
from unisono.launch.topology import Accelerators, Topology, refuse_lone_node


def find_shape(
    asked: RunAsked,
    command: Command,
    environment: Environment,
    variables: Mapping[str, str],
    accelerators: Accelerators,
    network: NetworkProbe,
) -> RunShape:
    """The job of a command line, with `--hosts` and with the place that a Slurm step gives.

    Args:
        asked: our options.
        command: the program's.
        environment: of this process.
        variables: all of them.
        accelerators: that the program would see here.
        network: of this machine.

    Raises:
        UsageError: as `read_shape`, or if there is no way to a host.
    """
    shape = read_shape(
        asked, command, variables, accelerators,
        is_here=lambda host: is_this_machine(host, network), placed=placed_by_slurm(environment.slurm_step, network),
    )  # fmt: skip
    refuse_lone_node(asked.launcher, asked.nodes, shape.topology)
    return replace(shape, topology=find_head(shape.topology, network))


def find_token(
    asked: RunAsked, topology: Topology, environment: Environment, given: str | None
) -> Token | None:
    """The job's secret; None for one node. A front that was started over ssh ends with who started it.

    Raises:
        UsageError: if several nodes have none, or it is not private.
    """
    if topology.hosts and asked.token_file is None and given is None:
        return make_token()
    found = read_token(asked.token_file, given or token_of_step(environment), nodes=topology.nodes)
    if found is not None and found.from_stdin:
        watch_lifeline()
    return found


def with_our_programs(asked: RunAsked, variables: Mapping[str, str]) -> dict[str, str]:
    """The program's environment: ssh gives a front a bare PATH, and torchrun and its like are beside the python that was asked for."""
    if not asked.from_stdin:
        return dict(variables)
    path = [str(Path(sys.executable).parent), *filter(None, [variables.get("PATH")])]
    return {**variables, "PATH": os.pathsep.join(path)}


def remote_run(asked: RunAsked, output_dir: Path) -> Remote:
    """The same program under the same guard, on another node; its directory there has the same path."""
    return Remote(
        ("run",),
        {
            "--join-timeout": f"{asked.join_timeout_s:g}", "--nproc": asked.nproc, "--devices": asked.devices,
            "--output-dir": output_dir, "--uneven": asked.uneven or None, "--debug-comm": asked.debug_comm or None,
        },
        ("--", *asked.words),
        asked.ssh,
    )  # fmt: skip

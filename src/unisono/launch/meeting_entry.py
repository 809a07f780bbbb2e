"""This node's front on its way to the others: who it is, what it reports, and what it has prepared."""

from dataclasses import replace
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_nodes
from unisono.agree.reports import NodeReport
from unisono.agree.training import PreparedFacts
from unisono.causes import Verdict, find_cause
from unisono.config import LoadedConfig
from unisono.errors import Disagreed, UnfitError, UnisonoError, UsageError
from unisono.events import Show
from unisono.facts import Environment, read_machine
from unisono.facts.machine import Gpu
from unisono.launch.node_report import look_at_files, look_at_output, make_node_report
from unisono.launch.planning import LocalNode
from unisono.launch.train_request import TrainRequest
from unisono.plan import DataSummary, ModelFacts
from unisono.plan.topology import Accelerators, Topology, read_topology
from unisono.rendezvous.head_address import report_refusal
from unisono.rendezvous.party import ChannelFacts, MakeReport, Party, make_token, read_token, watch_lifeline
from unisono.rendezvous.remote_fronts import placed_by_slurm

_LOOPBACK = "127.0.0.1"


def party_of(request: TrainRequest, topology: Topology, *, host: str, token: str | None, show: Show) -> Party:
    """This node, as it comes to the meeting; where it was started by --hosts, it ends with who started it.

    Args:
        token: UNISONO_TOKEN, or None.

    Raises:
        UsageError: if there is no token, or it is not private.
    """
    if topology.hosts and request.token_file is None and token is None:
        secret = make_token()
    else:
        found = read_token(request.token_file, token, nodes=topology.nodes)
        assert found is not None, "several nodes have a token"
        secret = found
    if secret.from_stdin:
        watch_lifeline()
    return Party(
        topology=topology,
        token=secret.secret,
        host=host,
        show=show,
        join_timeout_s=request.join_timeout_s,
        programs=request.programs,
        network=request.probes.network,
        command=request.command,
    )


def report_early_refusal(
    request: TrainRequest, environment: Environment, error: UnisonoError, *, token: str | None, show: Show
) -> None:
    """Reports to the other nodes that this one does not start, even if its config could not be read."""
    without_ranks = replace(
        request.topology, nproc=1, devices=()
    )  # the number of its ranks does not matter now
    try:
        placed = placed_by_slurm(environment.slurm_step, request.probes.network)
        topology = read_topology(without_ranks, environment.leftovers, Accelerators(0), placed=placed)
        if topology.nodes == 1 or topology.hosts:
            return
        party = party_of(request, topology, host=read_machine(_no_devices).host, token=token, show=show)
    except UnisonoError:  # the address of the head is unknown, too: this node shows its own error, and the others report it missing
        return
    report_refusal(party, error)


def report_maker(request: TrainRequest, loaded: LoadedConfig, local_node: LocalNode) -> MakeReport:
    """The function that makes this node's report once the channel has given address, clock and ports."""

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


def look_alone(
    request: TrainRequest, loaded: LoadedConfig, local_node: LocalNode
) -> tuple[NodeReport, Agreement]:
    """The report of the only node of a job of several ranks, and what its settings, limits and devices are good for."""
    channel = ChannelFacts(_LOOPBACK, {}, 0.0, [])
    report = make_node_report(
        loaded=loaded,
        local_node=local_node,
        channel=channel,
        files={},
        output=look_at_output(loaded, channel),
        probes=request.probes,
    )
    return report, compare_nodes([report])


def refusal_alone(verdict: Verdict, *, again: bool = False) -> UnisonoError:
    """The error if the only node of a job is refused: there is no node to disagree with, so its exit code is 6 or 2, never 3.

    Args:
        again: before a restart: the request was valid at the first start, so the machine has changed.
    """
    known = find_cause(verdict.cause)
    is_unfit = again or (known is not None and known.exit_code == UnfitError.exit_code)
    return (UnfitError if is_unfit else UsageError).of(
        verdict.summary, where=verdict.phase or "", fix="; ".join(verdict.fix), verdict=verdict
    )


def is_about_nodes(error: UnisonoError) -> bool:
    """Whether it came of comparing nodes or ranks, be it a single node with what it needs; its verdict is then kept in the run's directory."""
    phase = (error.verdict.phase if error.verdict is not None else None) or ""
    return isinstance(error, Disagreed) or phase.startswith("agree.")


def prepared_facts(prepared: dict[str, Any]) -> PreparedFacts:
    """The part of the result of the task `prepare` that nodes compare."""
    return PreparedFacts.of(
        DataSummary.model_validate(prepared["data"]), ModelFacts.model_validate(prepared["model"])
    )


def _no_devices() -> tuple[list[Gpu], str]:
    """A probe that asks no driver: only the host's name is wanted."""
    return [], ""

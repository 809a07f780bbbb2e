"""This node's front on its way to the others: who it is, what it reports, and what it has prepared."""

from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_nodes
from unisono.agree.prepared import PreparedFacts
from unisono.agree.report import NodeReport
from unisono.config import LoadedConfig
from unisono.launch.asked import TrainRequest
from unisono.launch.node_report import look_at_files, look_at_output, make_node_report
from unisono.launch.nodes.party import MakeReport, Party, Show, Standing
from unisono.launch.planning import Here
from unisono.plan import DataSummary, ModelFacts

_LOOPBACK = "127.0.0.1"


def party_of(request: TrainRequest, here: Here, *, token: bytes, show: Show) -> Party:
    """This node, as it comes to the meeting."""
    return Party(
        topology=here.topology, token=token, host=here.machine.host, show=show, join_timeout_s=request.join_timeout_s,
        programs=request.programs, network=request.probes.network, command=request.command,
    )  # fmt: skip


def report_maker(request: TrainRequest, loaded: LoadedConfig, here: Here) -> MakeReport:
    """What makes this node's report once the channel has told where it stands."""

    def make(standing: Standing, show: Show) -> NodeReport:
        return make_node_report(
            loaded=loaded, here=here, standing=standing,
            files=look_at_files(loaded, here, programs=request.programs, show=show),
            output=look_at_output(loaded, standing), probes=request.probes,
        )  # fmt: skip

    return make


def look_alone(request: TrainRequest, loaded: LoadedConfig, here: Here) -> tuple[NodeReport, Agreement]:
    """The report of the only node of a job of several ranks, and what its settings, limits and devices are good for."""
    standing = Standing(_LOOPBACK, {}, 0.0, [])
    report = make_node_report(
        loaded=loaded, here=here, standing=standing, files={},
        output=look_at_output(loaded, standing), probes=request.probes,
    )  # fmt: skip
    return report, compare_nodes([report])


def interface_of(here: Here, request: TrainRequest, address: str) -> str | None:
    """The name of the interface that has the address; None where it cannot be said, and the libraries choose."""
    for interface in request.probes.network.interfaces():
        if address in interface.addresses:
            return interface.name
    return "lo" if address.startswith("127.") else None


def prepared_facts(prepared: dict[str, Any]) -> PreparedFacts:
    """What nodes compare of what the task `prepare` gave."""
    return PreparedFacts.of(
        DataSummary.model_validate(prepared["data"]), ModelFacts.model_validate(prepared["model"])
    )

"""What a node brings to the meeting, and what the channel tells it in return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.agree.reports import NodeReport
from unisono.events import Message
from unisono.facts.network import NetworkProbe, SystemNetwork
from unisono.launch.command import Programs
from unisono.launch.topology import Topology

Show = Callable[[Message], None]


@dataclass(frozen=True)
class Party:
    """This node, as it comes to the meeting.

    Attributes:
        topology: the shape of the job as this node knows it; `head_host` is set.
        token: the job's secret.
        host: this machine's name.
        show: sees notes and warnings; called from the caller's thread only.
        join_timeout_s: how long the nodes wait for each other.
        programs: what is started as task.
        network: resolves names.
        command: the command line, for the lines that a person is to type.
    """

    topology: Topology
    token: bytes = field(repr=False)
    host: str
    show: Show
    join_timeout_s: float = 300.0
    programs: Programs = field(default_factory=Programs)
    network: NetworkProbe = field(default_factory=SystemNetwork)
    command: str = "unisono train CONFIG"

    @property
    def label(self) -> str:
        """How this node is written."""
        return f"node {self.topology.node_rank} ({self.host})"

    @property
    def head(self) -> str:
        """HOST:PORT of the head, as it was asked for."""
        host, port = self.topology.head_host, self.topology.head_port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Standing:
    """What a node's report needs to know from the channel.

    Attributes:
        address: on which this node reaches the head, and is reached.
        welcome: what the head says to everybody who comes in.
        clock_offset_s: this node's wall clock minus the head's; None: not measured; 0.0 on the head.
        probe_ports: at which this node answers the dial matrix.
    """

    address: str
    welcome: dict[str, Any]
    clock_offset_s: float | None
    probe_ports: list[int]


MakeReport = Callable[[Standing, Show], NodeReport]
"""Makes this node's report. It runs in a thread of its own, since digests of large files take minutes; what it shows is
passed on. A UnisonoError that it raises is told to all nodes."""

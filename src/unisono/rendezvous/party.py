"""Types that both sides of a meeting share: the node, the facts of its channel, and background work while the front listens."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from unisono.agree.reports import NodeReport
from unisono.control.server import HeadServer
from unisono.events import Message, Show
from unisono.facts.network import NetworkProbe, SystemNetwork
from unisono.plan.topology import Topology
from unisono.supervise.child_process import Programs

NONCE_FILE = "nonce_file"
"""Where the head's welcome names the file that it left in its output_dir (`facts.storage.leave_nonce`)."""


@dataclass(frozen=True)
class Party:
    """This node, as it joins the meeting.

    Attributes:
        topology: the job's nodes and ranks as this node knows them; `head_host` is set.
        token: the job's secret.
        host: this machine's name.
        show: gets notes and warnings; called from the caller's thread only.
        join_timeout_s: how long the nodes wait for each other.
        programs: what is started as task.
        network: resolves names.
        command: the command line, for messages that quote it.
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
        """This node as it appears in messages."""
        return f"node {self.topology.node_rank} ({self.host})"

    @property
    def head(self) -> str:
        """HOST:PORT of the head, as given on the command line."""
        host, port = self.topology.head_host, self.topology.head_port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ChannelFacts:
    """What a node's report takes from the channel.

    Attributes:
        address: this node's own address in its connection to the head.
        welcome: the head's message to every node that joins.
        clock_offset_s: this node's wall clock minus the head's; None: not measured; 0.0 on the head.
        probe_ports: on which this node answers the dial matrix.
    """

    address: str
    welcome: dict[str, Any]
    clock_offset_s: float | None
    probe_ports: list[int]


MakeReport = Callable[[ChannelFacts, Show], NodeReport]
"""Makes this node's report. It runs in a background thread, since digests of large files take minutes; the messages it
shows are displayed. A UnisonoError that it raises is sent to all nodes."""


RestartQuestion = dict[str, Any]
"""What the head asks each node to check before a restart."""
MakeRestartReport = Callable[[ChannelFacts, RestartQuestion], NodeReport]
"""Makes a node's report before a restart; a UnisonoError says why the node cannot continue."""


def restart_report_kind(round_: object) -> str:
    """The kind of the message with a node's report in one round before a restart."""
    return f"here_again_{round_}"


Result = TypeVar("Result")


class HeadSide(Protocol):
    """What a network trial uses of the meeting at the head."""

    party: Party
    server: HeadServer
    run_nonce: str

    @property
    def reports(self) -> list[NodeReport]:
        """The reports of all nodes, by node rank."""
        ...

    def broadcast(self, message: Message) -> None:
        """Sends a message to all other nodes."""
        ...

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """The result of long work, done while the front listens to the nodes."""
        ...

    def gather(self, kind: str, *, timeout_s: float, what: str = "") -> dict[int, Message]:
        """One message of a kind from every other node, by node rank."""
        ...


class NodeSide(Protocol):
    """What a network trial uses of a member's connection."""

    party: Party
    welcome: dict[str, Any]

    def send(self, message: Message) -> None:
        """Sends a message to the head."""
        ...

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """The result of long work, done while the front listens to the head."""
        ...

    def wait_for(self, *kinds: str) -> Message:
        """The next message of one of these kinds."""
        ...


class BackgroundWork(Generic[Result]):
    """Work in a thread that starts at once. Its messages wait in `shown`, so that only the front's own thread displays them.

    The thread is a daemon: a front that exits does not wait for it, and a task that it started ends with the front.
    """

    def __init__(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outcome: list[Result] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), name="background", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def shown(self) -> list[Message]:
        """The messages of the work since the last call."""
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def result(self) -> Result:
        """The result of the work; raises what the work raised."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._outcome[0]

    def _run(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        try:
            self._outcome.append(work(self._messages.put))
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the front's thread
            self._error.append(error)

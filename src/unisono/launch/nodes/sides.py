"""The two sides of a meeting, as far as the trials of the network need them: `head.Meeting` and `agent.Attendance`."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from unisono.agree.reports import NodeReport
from unisono.control.server import HeadServer
from unisono.events import Message
from unisono.launch.nodes.party import Party, Show

Result = TypeVar("Result")


class HeadSide(Protocol):
    """Node 0's."""

    party: Party
    server: HeadServer
    run_nonce: str

    @property
    def reports(self) -> list[NodeReport]:
        """Of all nodes, by node rank."""
        ...

    def tell_all(self, message: Message) -> None:
        """Sends a message to all other nodes."""
        ...

    def aside(self, work: Callable[[Show], Result]) -> Result:
        """Does something that takes long, and listens to the nodes meanwhile."""
        ...

    def gather(self, kind: str, *, timeout_s: float, what: str = "") -> dict[int, Message]:
        """One message of a kind from every other node, by node rank."""
        ...


class NodeSide(Protocol):
    """Every other node's."""

    party: Party
    welcome: dict[str, Any]

    def send(self, message: Message) -> None:
        """Sends a message to the head."""
        ...

    def aside(self, work: Callable[[Show], Result]) -> Result:
        """Does something that takes long, and listens to the head meanwhile."""
        ...

    def wait_for(self, *kinds: str) -> Message:
        """The next message of one of these kinds."""
        ...

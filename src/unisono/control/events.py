"""What a front hears on the control channel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RejectedKind = Literal["token", "duplicate", "stale", "malformed", "late", "misfit", "left_out"]
"""token: the proof does not fit. duplicate: its rank is taken. stale: of another start of the job. malformed: not our
protocol, or too slow. late: it came after the last word, and was told it. misfit: it means another number of nodes.
left_out: the job goes on without its node."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has proven itself and is here. `address` is the one it calls from."""

    node_rank: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Said:
    """A node, or for others the head (0), has sent a message. Its texts are as the sender wrote them: see unisono.text."""

    node_rank: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a node, or to the head, is over. `clean`: it said goodbye, or has had the last word."""

    node_rank: int
    host: str
    why: str
    clean: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """Somebody called and is not let in; it changes nothing.

    Attributes:
        address: from where, `IP:port`.
        why: one line for people.
        kind: see RejectedKind.
        claims: the node rank that it says it has; for kinds token and malformed this is unproven.
        holder: who has that rank, where that is why; else empty.
    """

    address: str
    why: str
    kind: RejectedKind
    claims: int | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A file that a node sent is whole and on disk at the head, or it is not.

    Attributes:
        node_rank: who sent it.
        label: what it is, as the sender said.
        path: where it is; None if it did not arrive.
        bytes: its size.
        xxh3_128: its digest in hex, computed here over what arrived.
        seconds: from the offer to the end.
        error: why it did not arrive, for people; empty if it did.
    """

    node_rank: int
    label: dict[str, Any]
    path: Path | None
    bytes: int
    xxh3_128: str
    seconds: float
    error: str = ""


Event = Joined | Said | Left | Rejected | Arrived

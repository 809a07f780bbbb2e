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
    """The connection to a node, or to the head, is over.

    Attributes:
        node_rank: of the other side.
        host: of the other side.
        why: one line for people.
        clean: it said goodbye, or has had the last word.
        silent_s: seconds since the last sign of life, where that is long; else 0.
        is_cut: it was silent, and nothing that was sent was acknowledged either: the line, or either end of it, may be cut. False
            where the connection was closed, and where the other machine answers and only its process is silent.
        gave_up: the other side has ended it, since it heard nothing of this one. `why`, `silent_s` and `is_cut` are what it saw.
    """

    node_rank: int
    host: str
    why: str
    clean: bool
    silent_s: float = 0.0
    is_cut: bool = False
    gave_up: bool = False


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

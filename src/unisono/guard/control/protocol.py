"""The control protocol: frames on the wire, keys, and the handshake. Pure: no socket, no clock.

Each side begins with a preamble, then sends frames:

    frame = length of the body (4 bytes, big-endian) | MAC (32 bytes) | body
    MAC   = HMAC-SHA256(key, direction (1 byte) | sequence number (8 bytes; by direction) | body)
    body  = a JSON object with a field `t`, its type; or, only from an authenticated node to the
            head, a piece of a file: 0 (1 byte) | transfer (4) | offset (8) | bytes

A frame that was modified, dropped, repeated, or sent back to its sender fails its MAC check. The
handshake proves to both sides that the other one knows the job's token:

    node → head   preamble
    head → node   preamble, greeting: a nonce, the run's nonce, the epoch; nothing is proven yet
    node → head   hello: its own nonce, rank, number of nodes, run, epoch;
                  MAC by key(token, head's nonce)
    head → node   welcome, or refused with a reason; MAC by key(token, all of it)

Nonces are fresh for each connection, so a recorded exchange cannot be replayed. The head sends
nothing to a caller that does not begin with the preamble.
"""

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from unisono.base.files import parse_json

RejectedKind = Literal["token", "duplicate", "stale", "malformed", "late", "misfit", "left_out"]
"""token: the MAC does not match. duplicate: its rank is taken. stale: of a different start of the
job. malformed: invalid bytes, or too slow. late: it connected after the end of the run. misfit: it
expects a different number of nodes. left_out: the job continues without its node.
"""
PROTOCOL = 2
CALLS = b"unisono>"
"""First bytes of a node, followed by one byte: the protocol version."""
ANSWERS = b"unisono<"
"""First bytes of the head. Different from a node's, so that an echo service is not taken for a
head.
"""
PREAMBLE_BYTES = len(CALLS) + 1
LENGTH_BYTES = 4
MAC_BYTES = 32
UNPROVEN_BYTES = 4096
"""Maximum body size of an unauthenticated peer."""
PROVEN_BYTES = 8 << 20
"""Maximum body size of an authenticated peer."""

PIECE_BYTES = 512 << 10
"""Maximum piece of a file in one frame: 4 ms at 1 Gb/s, during which no other frame is received."""
_PIECE = b"\0"  # JSON cannot begin so
_PIECE_HEADER_BYTES = 13

TO_HEAD = b">"
TO_NODE = b"<"

Body = dict[str, object]


class Malformed(Exception):  # noqa: N818 - named for what the bytes are
    """Received bytes are invalid. The text says in one line what was received."""


class ForeignProtocol(Malformed):
    """The first bytes are of a different program."""


class DifferentVersion(Malformed):
    """The peer has a different protocol version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"speaks version {version} of the control protocol, this is version {PROTOCOL}")
        self.version = version


class Forged(Malformed):
    """A frame fails its MAC check: a different token, or frames were changed, repeated or dropped
    on the way.
    """


def preamble(side: bytes) -> bytes:
    """The first bytes of one side: CALLS or ANSWERS, and the version."""
    return side + bytes([PROTOCOL])


def encode(body: Mapping[str, object]) -> bytes:
    """The body's bytes.

    Raises:
        ValueError: if it is larger than a frame, or a value is not JSON (also TypeError).
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > PROVEN_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; {PROVEN_BYTES} is the maximum")
    return data


def decode(data: bytes) -> Body:
    """A body from its bytes.

    Raises:
        Malformed: if it is not a JSON object with a type.
    """
    try:
        body = parse_json(data)
    except ValueError as error:  # endless nesting is not a valid frame either
        raise Malformed("sent a frame that is not JSON") from error
    if not isinstance(body, dict) or not isinstance(body.get("t"), str):
        raise Malformed("sent a frame without a type")
    return body


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a file: number of the transfer on this connection, byte offset and content."""

    transfer: int
    offset: int
    data: bytes | memoryview


def encode_piece(piece: Piece) -> bytes:
    """The piece's bytes, as a frame's body."""
    assert len(piece.data) <= PIECE_BYTES
    return b"".join((_PIECE, piece.transfer.to_bytes(4, "big"), piece.offset.to_bytes(8, "big"), piece.data))


def decode_frame(data: bytes) -> Body | Piece:
    """A frame of an authenticated node: a body, or a piece of a file.

    Raises:
        Malformed: if it is neither, or the piece is empty or too large.
    """
    if not data.startswith(_PIECE):
        return decode(data)
    if not 0 < len(data) - _PIECE_HEADER_BYTES <= PIECE_BYTES:
        raise Malformed(
            f"sent a piece of {len(data) - _PIECE_HEADER_BYTES} bytes; {PIECE_BYTES} is the maximum"
        )
    numbers = data[1:_PIECE_HEADER_BYTES]
    content = memoryview(data)[_PIECE_HEADER_BYTES:]
    return Piece(int.from_bytes(numbers[:4], "big"), int.from_bytes(numbers[4:], "big"), content)


class FrameParser:
    """Parses bytes into (MAC, body) pairs. Holds at most one frame and one chunk in memory.

    Feed it, then take frames until there are none, then feed it again. Unusable after an exception.

    Args:
        side: the expected preamble; empty if already received.
        limit: maximum body size. May be changed between frames.
    """

    def __init__(self, side: bytes = b"", *, limit: int = UNPROVEN_BYTES) -> None:
        self._side = side
        self._buffer = bytearray()
        self.limit = limit

    @property
    def began(self) -> bool:
        """Whether the preamble has been received."""
        return not self._side

    @property
    def waiting_bytes(self) -> int:
        """Number of buffered bytes."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Adds received bytes.

        Raises:
            Malformed: as soon as they are invalid; a frame that is too large is not buffered.
        """
        self._buffer += data
        if self._side:
            self._begin()

    def take(self) -> tuple[bytes, bytes] | None:
        """The next frame's MAC and body, or None until more bytes arrive.

        Raises:
            Malformed: if the frame is larger than the limit.
        """
        if self._side or len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length > self.limit:
            self._buffer.clear()
            raise Malformed(f"sent a frame of {length} bytes where {self.limit} is the maximum")
        start = LENGTH_BYTES + MAC_BYTES
        if len(self._buffer) < start + length:
            return None
        with memoryview(self._buffer) as held:  # so that a body is copied once
            mac, body = bytes(held[LENGTH_BYTES:start]), bytes(held[start : start + length])
        del self._buffer[: start + length]
        return mac, body

    def _begin(self) -> None:
        seen = bytes(self._buffer[: len(self._side)])
        if seen != self._side[: len(seen)]:
            shown = repr(bytes(self._buffer[:24]))[2:-1]
            self._buffer.clear()
            raise ForeignProtocol(f"is not a control channel of unisono: it begins with `{shown}`")
        if len(self._buffer) < PREAMBLE_BYTES:
            return
        version = self._buffer[PREAMBLE_BYTES - 1]
        if version != PROTOCOL:
            self._buffer.clear()
            raise DifferentVersion(version)
        del self._buffer[:PREAMBLE_BYTES]
        self._side = b""


class Seal:
    """Creates and checks the MACs of one side of a connection; counts the frames of both
    directions.

    Args:
        key: shared by both ends. Empty: no authentication, for the one frame before there is a key.
        sends: TO_HEAD or TO_NODE.
    """

    def __init__(self, key: bytes, *, sends: bytes) -> None:
        self._key = key
        self._sends = sends
        self._receives = TO_NODE if sends == TO_HEAD else TO_HEAD
        self._sent = self._received = 0

    def close(self, body: bytes) -> bytes:
        """The complete frame of `body`."""
        mac = self._mac(self._sends, self._sent, body)
        self._sent += 1
        return len(body).to_bytes(LENGTH_BYTES, "big") + mac + body

    def open(self, frame: tuple[bytes, bytes]) -> Body:
        """The body of a frame, after the MAC check.

        Raises:
            Forged: if the check fails.
            Malformed: if it is authentic but not a valid body.
        """
        return decode(self.unseal(frame))

    def unseal(self, frame: tuple[bytes, bytes]) -> bytes:
        """The body's bytes of a frame, after the MAC check.

        Raises:
            Forged: if the check fails.
        """
        mac, body = frame
        if not hmac.compare_digest(mac, self._mac(self._receives, self._received, body)):
            raise Forged("sent a frame with a wrong MAC")
        self._received += 1
        return body

    def _mac(self, direction: bytes, sequence: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + sequence.to_bytes(8, "big") + body, "sha256")


TOKEN_BYTES = 32


def new_token() -> str:
    """A new random token for a job, as text."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def derive(token: bytes, purpose: str, *parts: str | int) -> bytes:
    """A key of 32 bytes for one purpose.

    It reveals neither the token nor keys of other purposes.

    Args:
        token: the job's secret, not empty.
        purpose: what the key is for, for example `control.session` or `rank`.
        parts: further inputs, e.g. a nonce or rank. Encoded as JSON, so that different lists never
            collide.
    """
    assert token, "a job of several nodes needs a token"
    return hmac.digest(token, json.dumps(["unisono", purpose, *parts]).encode(), "sha256")


_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_.@:-]{1,255}\Z")
_NONCE = re.compile(r"[0-9a-f]{32}\Z")
_RUN = re.compile(r"[A-Za-z0-9_.:-]{0,64}\Z")
_MAX_NODES = 1 << 20


def is_host_name(name: object) -> bool:
    """Whether a string is a valid host name of a peer."""
    return isinstance(name, str) and _HOST_NAME.match(name) is not None


def fresh_nonce() -> str:
    """16 random bytes in hex."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The head's first frame. Not authenticated itself, but all keys are derived from it."""

    nonce: str
    run: str
    epoch: int

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "greeting", **asdict(self)}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Parses a greeting.

        Raises:
            Malformed: if it is invalid.
        """
        nonce, run, epoch = body.get("nonce"), body.get("run"), body.get("epoch")
        if body["t"] != "greeting" or not _matches(_NONCE, nonce) or not _matches(_RUN, run):
            raise Malformed("sent an invalid greeting")
        return cls(str(nonce), str(run), _integer(epoch, 0, 1 << 31, "an epoch"))


@dataclass(frozen=True, slots=True)
class Hello:
    """A node's request to join.

    Attributes:
        nonce: random, for this connection.
        call: the same for all attempts of one process to join.
        nodes: number of nodes that it expects; 0: not checked.
        run: nonce of the start that it belongs to.
    """

    nonce: str
    call: str
    node_rank: int
    nodes: int
    host: str
    pid: int
    run: str
    epoch: int

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "hello", **asdict(self)}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Parses a hello.

        Raises:
            Malformed: if it is invalid.
        """
        if body["t"] != "hello" or not all(_matches(_NONCE, body.get(name)) for name in ("nonce", "call")):
            raise Malformed("sent an invalid hello")
        if not is_host_name(body.get("host")):
            raise Malformed("gives an invalid host name: allowed are letters, digits and _ . @ : -")
        if not _matches(_RUN, body.get("run")):
            raise Malformed("gives an invalid run")
        return cls(
            nonce=str(body["nonce"]),
            call=str(body["call"]),
            node_rank=_integer(body.get("node_rank"), -(1 << 31), 1 << 31, "a node rank"),
            nodes=_integer(body.get("nodes"), 0, _MAX_NODES, "a number of nodes"),
            host=str(body["host"]),
            pid=_integer(body.get("pid"), 0, 1 << 31, "a process id"),
            run=str(body["run"]),
            epoch=_integer(body.get("epoch"), 0, 1 << 31, "an epoch"),
        )


def claimed_identity(data: bytes) -> tuple[int | None, str]:
    """Rank and host that an unauthenticated hello claims; None and empty if it is invalid."""
    try:
        hello = Hello.from_body(decode(data))
    except Malformed:
        return None, ""
    return hello.node_rank, hello.host


def greeting_seal(*, sends: bytes) -> Seal:
    """The seal for the greeting, and for refusals to peers that could not check a MAC."""
    return Seal(b"", sends=sends)


def hello_seal(token: bytes, greeting: Greeting, *, sends: bytes) -> Seal:
    """The seal for the hello, bound to the greeting."""
    return Seal(derive(token, "control.hello", greeting.nonce), sends=sends)


def session_seal(token: bytes, greeting: Greeting, hello: Hello, *, sends: bytes) -> Seal:
    """The seal for everything else, bound to both nonces, run, epoch, rank, host and number of
    nodes.
    """
    parts = (greeting.nonce, hello.nonce, hello.run, hello.epoch, hello.node_rank, hello.nodes, hello.host)
    return Seal(derive(token, "control.session", *parts), sends=sends)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an authenticated caller is refused.

    `text` continues the sentence after `node R (HOST) `.
    """

    kind: RejectedKind
    text: str
    holder: str = ""

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "refused", **asdict(self)}


def refusal_of(
    hello: Hello, *, run: str, epoch: int, nodes: int, holder: str, settled: bool, left_out: str = ""
) -> Refusal | None:
    """The refusal of an authenticated caller; None: it is admitted.

    Args:
        run: nonce of this start.
        holder: the node that already has its rank, as text; empty: none.
        settled: whether the last message was sent.
        left_out: why the job continues without its node; empty: it does not.
    """
    if hello.run != run:
        return Refusal(
            "stale", f"belongs to a different start of the job (run {hello.run or '?'}, this is {run})"
        )
    if hello.epoch != epoch:
        age = "an earlier" if hello.epoch < epoch else "a later"
        return Refusal("stale", f"belongs to {age} epoch of the run ({hello.epoch}, this is {epoch})")
    if hello.nodes not in (0, nodes):
        return Refusal("misfit", f"expects {hello.nodes} nodes, the head expects {nodes}")
    if not 0 <= hello.node_rank < nodes:
        return Refusal("misfit", f"has no valid rank for {nodes} nodes: ranks are 0 to {nodes - 1}")
    if settled:
        return Refusal("late", "connected after the end of the run")
    if left_out:
        return Refusal("left_out", left_out)
    if holder:
        return Refusal("duplicate", f"has a duplicate rank: {holder} has it already", holder)
    return None


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _integer(value: Any, least: int, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Malformed(f"gives {what} that is not valid")
    return value

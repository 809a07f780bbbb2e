"""The control protocol: frames on the wire, keys, and the handshake. Pure: no socket, no clock.

Each side begins with a preamble, then sends frames:

    frame = length of the body (4 bytes, big-endian) | MAC (32 bytes) | body (a JSON object with a field `t`, its type)
    MAC   = HMAC-SHA256(key, direction (1 byte) | sequence number in that direction (8 bytes) | body)
    body  = or, only from an authenticated node to the head, a piece of a file: 0 (1 byte) | transfer (4) | offset (8) | bytes

A frame that was modified, dropped, repeated, or sent back to its sender fails its MAC check. The handshake proves to both
sides that the other one knows the job's token:

    node → head   preamble
    head → node   preamble, greeting: a nonce, the run's nonce, the epoch          nothing is proven yet
    node → head   hello: its own nonce, rank, number of nodes, run, epoch          MAC by key(token, head's nonce)
    head → node   welcome, or refused with a reason                                MAC by key(token, all of it)

Nonces are fresh for each connection, so a recorded exchange cannot be replayed. The head sends nothing to a caller that
does not begin with the preamble.
"""

import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Self

from unisono.control.events import RejectedKind
from unisono.files import parse_json

PROTOCOL = 2
CALLS = b"unisono>"
"""How a node begins, followed by one byte: the protocol's version."""
ANSWERS = b"unisono<"
"""How the head begins. Not what nodes send, so an echo is no head."""
PREAMBLE_BYTES = len(CALLS) + 1
LENGTH_BYTES = 4
MAC_BYTES = 32
UNPROVEN_BYTES = 4096
"""The largest body of a peer that has proven nothing."""
PROVEN_BYTES = 8 << 20
"""The largest body of a peer that knows the job's secret."""

PIECE_BYTES = 512 << 10
"""The most of a file that goes in one frame: at 1 Gb/s, 4 ms in which nothing else is heard."""
_PIECE = b"\0"  # JSON cannot begin so
_PIECE_HEADER_BYTES = 13

TO_HEAD = b">"
TO_NODE = b"<"

Body = dict[str, Any]


class Malformed(Exception):  # noqa: N818 - named for what the bytes are
    """What came is not our protocol. The text says, on one line, what came instead."""


class ForeignProtocol(Malformed):
    """The first bytes are not ours: another program."""


class DifferentVersion(Malformed):
    """It is ours, of another version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"speaks version {version} of the control protocol, this is version {PROTOCOL}")
        self.version = version


class Forged(Malformed):
    """A frame does not fit its MAC: another secret, or somebody between has changed, repeated or dropped frames."""


def preamble(side: bytes) -> bytes:
    """The first bytes of one side: CALLS or ANSWERS, and our version."""
    return side + bytes([PROTOCOL])


def encode(body: Body) -> bytes:
    """The body's bytes.

    Raises:
        ValueError: if it is larger than a frame may be; also for values that JSON does not have (TypeError too).
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > PROVEN_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; {PROVEN_BYTES} is the most")
    return data


def decode(data: bytes) -> Body:
    """The body of its bytes.

    Raises:
        Malformed: if it is no JSON object with a type.
    """
    try:
        body = parse_json(data)
    except ValueError as error:  # nesting without end is no frame either
        raise Malformed("sent a frame that is no JSON") from error
    if not isinstance(body, dict) or not isinstance(body.get("t"), str):
        raise Malformed("sent a frame without a type")
    return body


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: of which transfer on this connection, at which byte it begins, and its content."""

    transfer: int
    offset: int
    data: bytes | memoryview


def encode_piece(piece: Piece) -> bytes:
    """The piece's bytes, as a frame's body."""
    assert len(piece.data) <= PIECE_BYTES
    return b"".join((_PIECE, piece.transfer.to_bytes(4, "big"), piece.offset.to_bytes(8, "big"), piece.data))


def decode_frame(data: bytes) -> Body | Piece:
    """What a proven node may send: a body, or a piece of a file.

    Raises:
        Malformed: if it is neither, or the piece is empty or larger than one may be.
    """
    if not data.startswith(_PIECE):
        return decode(data)
    if not 0 < len(data) - _PIECE_HEADER_BYTES <= PIECE_BYTES:
        raise Malformed(f"sent a piece of {len(data) - _PIECE_HEADER_BYTES} bytes; {PIECE_BYTES} is the most")
    numbers = data[1:_PIECE_HEADER_BYTES]
    content = memoryview(data)[_PIECE_HEADER_BYTES:]
    return Piece(int.from_bytes(numbers[:4], "big"), int.from_bytes(numbers[4:], "big"), content)


class FrameParser:
    """Takes bytes in any pieces and gives (MAC, body) pairs. Holds at most one frame and one piece in memory.

    Feed it, then take frames until there are none, then feed it again. After an exception it is of no more use.

    Args:
        side: the preamble that must come first; empty where it has been seen.
        limit: the largest body that is accepted. May be changed between frames.
    """

    def __init__(self, side: bytes = b"", *, limit: int = UNPROVEN_BYTES) -> None:
        self._side = side
        self._buffer = bytearray()
        self.limit = limit

    @property
    def began(self) -> bool:
        """Whether the preamble has been seen."""
        return not self._side

    @property
    def waiting_bytes(self) -> int:
        """How many bytes it holds."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Takes bytes.

        Raises:
            Malformed: as soon as they cannot become what is expected; nothing is kept for a frame that is too large.
        """
        self._buffer += data
        if self._side:
            self._begin()

    def take(self) -> tuple[bytes, bytes] | None:
        """The next frame's MAC and body, or None until more bytes have come.

        Raises:
            Malformed: if the frame is larger than the limit.
        """
        if self._side or len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length > self.limit:
            self._buffer.clear()
            raise Malformed(f"sent a frame of {length} bytes where {self.limit} is the most")
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
            raise ForeignProtocol(f"is no control channel of unisono: it begins with `{shown}`")
        if len(self._buffer) < PREAMBLE_BYTES:
            return
        version = self._buffer[PREAMBLE_BYTES - 1]
        if version != PROTOCOL:
            self._buffer.clear()
            raise DifferentVersion(version)
        del self._buffer[:PREAMBLE_BYTES]
        self._side = b""


class Seal:
    """Writes and checks the MACs of one side of one connection; counts the frames of both directions.

    Args:
        key: the key that both ends have. Empty: no proof, for the one frame that comes before there is a key.
        sends: TO_HEAD or TO_NODE.
    """

    def __init__(self, key: bytes, *, sends: bytes) -> None:
        self._key = key
        self._sends = sends
        self._hears = TO_NODE if sends == TO_HEAD else TO_HEAD
        self._sent = self._heard = 0

    def close(self, body: bytes) -> bytes:
        """The whole frame around `body`."""
        mac = self._mac(self._sends, self._sent, body)
        self._sent += 1
        return len(body).to_bytes(LENGTH_BYTES, "big") + mac + body

    def open(self, frame: tuple[bytes, bytes]) -> Body:
        """The body of a frame that fits.

        Raises:
            Forged: if it does not fit.
            Malformed: if it fits and is no body.
        """
        return decode(self.unseal(frame))

    def unseal(self, frame: tuple[bytes, bytes]) -> bytes:
        """The body's bytes of a frame that fits.

        Raises:
            Forged: if it does not fit.
        """
        mac, body = frame
        if not hmac.compare_digest(mac, self._mac(self._hears, self._heard, body)):
            raise Forged("sent a frame whose proof does not fit")
        self._heard += 1
        return body

    def _mac(self, direction: bytes, sequence: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + sequence.to_bytes(8, "big") + body, "sha256")


TOKEN_BYTES = 32


def new_token() -> str:
    """A fresh secret for a job, as text that fits a file or an environment variable."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def derive(token: bytes, purpose: str, *parts: str | int) -> bytes:
    """A key of 32 bytes for `purpose` alone. Whoever has it learns neither the token nor the key of another purpose.

    Args:
        token: the job's secret, not empty.
        purpose: what the key is for, for example `control.session` or `rank`.
        parts: what it is bound to as well: a nonce, a rank. They are written as JSON, so no two lists read the same.
    """
    assert token, "a job of several nodes has a token"
    return hmac.digest(token, json.dumps(["unisono", purpose, *parts]).encode(), "sha256")


_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_.@:-]{1,255}\Z")
_NONCE = re.compile(r"[0-9a-f]{32}\Z")
_RUN = re.compile(r"[A-Za-z0-9_.:-]{0,64}\Z")
_MAX_NODES = 1 << 20


def is_host_name(name: object) -> bool:
    """Whether a peer may be called so (DESIGN B8)."""
    return isinstance(name, str) and _HOST_NAME.match(name) is not None


def fresh_nonce() -> str:
    """16 random bytes in hex."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The head's first words. Not proven: they count only through the keys that are made with them."""

    nonce: str
    run: str
    epoch: int

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "greeting", **asdict(self)}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Reads a greeting.

        Raises:
            Malformed: if it is none.
        """
        nonce, run, epoch = body.get("nonce"), body.get("run"), body.get("epoch")
        if body["t"] != "greeting" or not _matches(_NONCE, nonce) or not _matches(_RUN, run):
            raise Malformed("sent no greeting")
        return cls(str(nonce), str(run), _integer(epoch, 0, 1 << 31, "an epoch"))


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls.

    Attributes:
        nonce: fresh for this connection.
        call: the same for all attempts of one process to join.
        nodes: how many it expects; 0: it does not say.
        run: the nonce of the start that it belongs to.
        epoch: of that start.
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
        """Reads a hello.

        Raises:
            Malformed: if it is none, or holds what no node of ours would send.
        """
        if body["t"] != "hello" or not all(_matches(_NONCE, body.get(name)) for name in ("nonce", "call")):
            raise Malformed("sent no hello")
        if not is_host_name(body.get("host")):
            raise Malformed("gives a host name that is none: allowed are letters, digits and _ . @ : -")
        if not _matches(_RUN, body.get("run")):
            raise Malformed("gives a run that is none")
        return cls(
            nonce=body["nonce"],
            call=body["call"],
            node_rank=_integer(body.get("node_rank"), -(1 << 31), 1 << 31, "a node rank"),
            nodes=_integer(body.get("nodes"), 0, _MAX_NODES, "a number of nodes"),
            host=body["host"],
            pid=_integer(body.get("pid"), 0, 1 << 31, "a process id"),
            run=body["run"],
            epoch=_integer(body.get("epoch"), 0, 1 << 31, "an epoch"),
        )


def claimed_identity(data: bytes) -> tuple[int | None, str]:
    """The rank and the host that an unproven hello claims; None and empty where it says nothing usable."""
    try:
        hello = Hello.from_body(decode(data))
    except Malformed:
        return None, ""
    return hello.node_rank, hello.host


def greeting_seal(*, sends: bytes) -> Seal:
    """For the greeting, and for refusing somebody who could not check a proof."""
    return Seal(b"", sends=sends)


def hello_seal(token: bytes, greeting: Greeting, *, sends: bytes) -> Seal:
    """For the hello: it fits only this greeting."""
    return Seal(derive(token, "control.hello", greeting.nonce), sends=sends)


def session_seal(token: bytes, greeting: Greeting, hello: Hello, *, sends: bytes) -> Seal:
    """For all that follows: bound to both nonces, the run, the epoch, the rank and the number of nodes."""
    parts = (greeting.nonce, hello.nonce, hello.run, hello.epoch, hello.node_rank, hello.nodes, hello.host)
    return Seal(derive(token, "control.session", *parts), sends=sends)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a proven caller is not let in. `text` goes on from `node R (HOST) `."""

    kind: RejectedKind
    text: str
    holder: str = ""

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "refused", **asdict(self)}


def refusal_of(
    hello: Hello, *, run: str, epoch: int, nodes: int, holder: str, settled: bool, left_out: str = ""
) -> Refusal | None:
    """Whether a proven caller may come in, and if not, why.

    Args:
        hello: who calls.
        run: the nonce of this start.
        epoch: of this start.
        nodes: how many the head expects.
        holder: who has its rank already, for people; empty: nobody.
        settled: whether the last word has been said.
        left_out: why the job goes on without its node; empty: it does not.
    """
    if hello.run != run:
        return Refusal(
            "stale", f"belongs to another start of the job (run {hello.run or '?'}, this is {run})"
        )
    if hello.epoch != epoch:
        age = "an earlier" if hello.epoch < epoch else "a later"
        return Refusal("stale", f"belongs to {age} epoch of the run ({hello.epoch}, this is {epoch})")
    if hello.nodes not in (0, nodes):
        return Refusal("misfit", f"expects {hello.nodes} nodes, the head expects {nodes}")
    if not 0 <= hello.node_rank < nodes:
        return Refusal("misfit", f"is none of the {nodes} nodes: ranks go from 0 to {nodes - 1}")
    if settled:
        return Refusal("late", "came after the last word")
    if left_out:
        return Refusal("left_out", left_out)
    if holder:
        return Refusal("duplicate", f"is here already: {holder} has this rank", holder)
    return None


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _integer(value: Any, least: int, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Malformed(f"gives {what} that is none")
    return value

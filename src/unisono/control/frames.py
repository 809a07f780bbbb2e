"""The bytes on the wire: a preamble, then frames. Pure: no socket, no clock.

    frame = length of the body (4 bytes, big-endian) | MAC (32 bytes) | body (a JSON object with a field `t`, its type)
    MAC   = HMAC-SHA256(key, direction (1 byte) | sequence in that direction (8 bytes) | body)
    body  = or, from a proven node to the head only, a piece of a file: 0 (1 byte) | transfer (4) | offset (8) | bytes

A frame that was changed, left out, repeated, or sent back to its sender does not fit its MAC.
"""

import hmac
import json
from dataclasses import dataclass
from typing import Any

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


class Foreign(Malformed):
    """The first bytes are not ours: another program."""


class OtherProtocol(Malformed):
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


def decode_any(data: bytes) -> Body | Piece:
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
            raise Foreign(f"is no control channel of unisono: it begins with `{shown}`")
        if len(self._buffer) < PREAMBLE_BYTES:
            return
        version = self._buffer[PREAMBLE_BYTES - 1]
        if version != PROTOCOL:
            self._buffer.clear()
            raise OtherProtocol(version)
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

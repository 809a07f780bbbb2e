"""What is known of a file before it comes: its size, its digest, and what its sender says that it is. Pure."""

import re
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from unisono.control.frames import Body, Malformed

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST_ID = (1 << 32) - 1


Buffer = bytes | memoryview


class Refused(Exception):  # noqa: N818 - named for what happened to the offer
    """A file is not taken. The text says why, for people."""


@dataclass(frozen=True, slots=True)
class Content:
    """Size and XXH3-128 digest (hex) of a file or buffer."""

    bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, data: Buffer) -> Self:
        """Of what is in memory."""
        return cls(memoryview(data).nbytes, xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class Offer:
    """A node would send this.

    Attributes:
        node_rank: who.
        host: its name.
        transfer: the number of the transfer on its connection.
        content: size and digest.
        label: what it is. `kind` is a str; the rest is for the rule of that kind to check.
    """

    node_rank: int
    host: str
    transfer: int
    content: Content
    label: dict[str, Any]

    def to_body(self) -> Body:
        """A frame's body; who sends it stands in the connection."""
        size, digest = self.content.bytes, self.content.xxh3_128
        return {"t": "offer", "id": self.transfer, "bytes": size, "xxh3_128": digest, "label": self.label}

    @classmethod
    def from_body(cls, body: Body, *, node_rank: int, host: str) -> Self:
        """Reads an offer.

        Raises:
            Malformed: if it is none.
        """
        match body:
            case {
                "t": "offer", "id": int() as number, "bytes": int() as size, "xxh3_128": str() as digest,
                "label": {"kind": str(), **_rest} as label,
            } if 0 <= number <= _MOST_ID and 0 <= size < 1 << 63 and _DIGEST.fullmatch(digest):  # fmt: skip
                return cls(node_rank, host, number, Content(size, digest), label)
        raise Malformed("sent an offer of a file that is none")

"""One connection at the head, in the channel's thread: from its first byte through its proof to its end."""

import asyncio
import time
from typing import Any, Protocol

from unisono.control.connection import SUSPECT_S, Connection
from unisono.control.events import Rejected, RejectedKind
from unisono.control.frames import (
    ANSWERS,
    CALLS,
    PROVEN_BYTES,
    TO_NODE,
    UNPROVEN_BYTES,
    Body,
    Forged,
    FrameParser,
    Malformed,
    OtherProtocol,
    Piece,
    decode_any,
    encode,
    preamble,
)
from unisono.control.handshake import (
    Greeting,
    Hello,
    Refusal,
    claims,
    fresh_nonce,
    greeting_seal,
    hello_seal,
    session_seal,
)

PROOF_S = 3.0
"""How long a caller may take until it has proven itself."""


class Door(Protocol):
    """What a caller finds: the head."""

    token: bytes
    run: str
    epoch: int
    closing: bool

    def came(self, caller: "Caller") -> None:
        """A connection has been made."""

    def judge(self, hello: Hello) -> Refusal | None:
        """Whether a proven caller may come in."""

    def admit(self, caller: "Caller", hello: Hello) -> None:
        """Takes a proven caller in."""

    def turn_away(self, caller: "Caller", event: Rejected) -> None:
        """Somebody is not let in."""

    def said(self, node_rank: int, message: dict[str, Any]) -> None:
        """A node has said something."""

    def transfers(self, caller: "Caller", item: Body | Piece) -> None:
        """A node sends a file: an offer, a piece, the end of it."""

    def dismiss(self, caller: "Caller") -> None:
        """A node has the last word."""

    def left(self, caller: "Caller", why: str) -> None:
        """A connection is over."""


class Caller(Connection):
    """A connection at the head, from its first byte to its end."""

    def __init__(self, head: Door) -> None:
        super().__init__(FrameParser(CALLS, limit=UNPROVEN_BYTES))
        self.hello: Hello | None = None
        """Who it is, once it has proven it and was let in."""
        self.goodbye = False
        self.acknowledged = 0
        self._head = head
        self._greeting: Greeting | None = None
        self._done = False
        self._came = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    def ip(self) -> str:
        """The address it calls from."""
        return self.address.rpartition(":")[0].strip("[]")

    def holder(self) -> str:
        """Who it is, for people."""
        assert self.hello is not None
        now = time.monotonic()
        silent_s = now - self.heard
        silent = f", silent for {silent_s:.0f} s" if silent_s > SUSPECT_S else ""
        return f"{self.hello.host} ({self.ip()}, process {self.hello.pid}, here for {now - self._came:.0f} s{silent})"

    def is_same_call(self, hello: Hello) -> bool:
        """Whether that is the same process, which did not hear our welcome in time and calls again."""
        return self.hello is not None and (self.hello.call, self.hello.host) == (hello.call, hello.host)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has accepted it."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            PROOF_S, self.give_up, "malformed", f"has proven nothing in {PROOF_S:.0f} s"
        )
        self._head.came(self)

    def data_received(self, data: bytes) -> None:
        """Asyncio has bytes; after the preamble comes our greeting."""
        super().data_received(data)
        if self._greeting is None and self.parser.began and not self._ending:
            self._greet()

    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A frame: the hello, or what a node says."""
        if self.hello is None:
            self._prove(frame)
        else:
            assert self.seal is not None
            self._hear(decode_any(self.seal.unseal(frame)))

    def malformed(self, error: Malformed) -> None:
        """What came is not our protocol."""
        if isinstance(error, OtherProtocol) and self.transport is not None:
            self.transport.write(preamble(ANSWERS))  # so that the other version can say so, too
        if self.hello is None:
            self.give_up("malformed", str(error))
        else:
            self.abort(f"it {error}")

    def over(self, why: str) -> None:
        """It is gone."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.hello is None and not self._done and not self._head.closing:
            self._reject("malformed", "hung up before it had proven anything")
        self._head.left(self, why)

    def give_up(
        self, kind: RejectedKind, why: str, *, node_rank: int | None = None, holder: str = ""
    ) -> None:
        """Lets it in no more, and tells the front."""
        self._reject(kind, why, node_rank=node_rank, holder=holder)
        self.end(why)

    def _reject(
        self, kind: RejectedKind, why: str, *, node_rank: int | None = None, holder: str = ""
    ) -> None:
        if not self._done:
            self._done = True
            self._head.turn_away(self, Rejected(self.address, why, kind, node_rank, holder))

    def _greet(self) -> None:
        assert self.transport is not None
        self._greeting = Greeting(fresh_nonce(), self._head.run, self._head.epoch)
        self.transport.write(preamble(ANSWERS))
        self.seal = greeting_seal(sends=TO_NODE)
        self.write(encode(self._greeting.to_body()))

    def _prove(self, frame: tuple[bytes, bytes]) -> None:
        if self._greeting is None:
            raise Malformed("did not wait for the greeting")
        node_rank, host = claims(frame[1])
        name = "" if node_rank is None else f"node {node_rank}" + (f" ({host})" if host else "")
        try:
            body = hello_seal(self._head.token, self._greeting, sends=TO_NODE).open(frame)
        except Forged:
            refusal = Refusal("token", "does not know the job's token")
            self.write(encode(refusal.to_body()))  # without proof: it could not check one
            self.give_up("token", f"{name or 'somebody'} {refusal.text}", node_rank=node_rank)
            return
        self._let_in(Hello.from_body(body), self._greeting)

    def _let_in(self, hello: Hello, greeting: Greeting) -> None:
        self.seal = session_seal(self._head.token, greeting, hello, sends=TO_NODE)
        refusal = self._head.judge(hello)
        if refusal is not None and refusal.kind != "late":
            self.write(encode(refusal.to_body()))
            why = f"node {hello.node_rank} ({hello.host}) {refusal.text}"
            self.give_up(refusal.kind, why, node_rank=hello.node_rank, holder=refusal.holder)
            return
        assert self._deadline is not None
        self._deadline.cancel()
        self.hello = hello
        self._done = True
        self.parser.limit = PROVEN_BYTES
        self._head.admit(self, hello)

    def _hear(self, body: Body | Piece) -> None:
        assert self.hello is not None
        match body:
            case Piece() | {"t": "offer" | "sent" | "withdraw", "id": int()}:
                self._head.transfers(self, body)
            case {"t": "ping"}:
                pass
            case {"t": "say", "m": dict() as message}:
                self._head.said(self.hello.node_rank, message)
            case {"t": "clock"}:
                self.write(encode({"t": "clock", "wall": time.time()}))
            case {"t": "ack", "n": int() as number}:
                self.acknowledged = number
                self._head.dismiss(self)
            case {"t": "bye"}:
                self.other_gave_up(body)
                self.goodbye = not self.gave_up
                self.end(self.silence.why if self.silence is not None else "")
            case _:
                raise Malformed("sent a frame of an unknown type")

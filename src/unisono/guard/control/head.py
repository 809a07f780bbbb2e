"""The head's state and its end of each connection, in the channel's thread."""

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from unisono.guard.control.connection import (
    BYE,
    SUSPECT_S,
    ChannelEvent,
    Connection,
    Heartbeats,
    Inbox,
    Joined,
    Left,
    NodeMessage,
    Rejected,
)
from unisono.guard.control.protocol import (
    ANSWERS,
    CALLS,
    PROVEN_BYTES,
    TO_NODE,
    UNPROVEN_BYTES,
    Body,
    DifferentVersion,
    Forged,
    FrameParser,
    Greeting,
    Hello,
    Malformed,
    Piece,
    Refusal,
    RejectedKind,
    claimed_identity,
    decode_frame,
    encode,
    fresh_nonce,
    greeting_seal,
    hello_seal,
    preamble,
    refusal_of,
    session_seal,
)

SPARE_CONNECTIONS = 64
"""Connections that are allowed beyond one per node; above that the oldest unauthenticated one is
dropped.
"""
_SAME_REJECTION_S = 10.0
_MAX_REJECTIONS = 256


class FileSink(Protocol):
    """Receives files that nodes send. Runs in the channel's thread, so it must not block."""

    def receive(self, caller: "IncomingConnection", item: Body | Piece) -> None:
        """An offer, a piece, or the end of a file.

        Raises Malformed for anything that a valid node never sends.
        """

    def drop(self, caller: "IncomingConnection") -> None:
        """The connection has ended."""


class Head:
    """State of the head. Methods run in the channel's thread only."""

    def __init__(
        self,
        *,
        token: bytes,
        nodes: int,
        host: str,
        welcome: Mapping[str, object],
        run: str,
        epoch: int,
        inbox: Inbox[ChannelEvent],
    ) -> None:
        self.token = token
        self.nodes = nodes
        self.run = run
        self.epoch = epoch
        self.welcome = welcome
        self.inbox = inbox
        self.members: dict[int, IncomingConnection] = {}
        self.late: set[IncomingConnection] = set()
        self.unproven: dict[IncomingConnection, None] = {}  # in the order of their coming
        self.open: set[IncomingConnection] = (
            set()
        )  # all of these, and those whose last bytes are on their way
        self.last_body: bytes | None = None
        self.last_number = (
            0  # how many last words there have been: an acknowledgement says which one it means
        )
        self.file_sink: FileSink | None = None
        self.left_out: dict[int, str] = {}  # nodes that may not come in any more, and why
        self.closing = False
        self.empty = asyncio.Event()
        self._own_name = f"the head itself ({host})"
        self._rejections: dict[tuple[str, RejectedKind, int | None], float] = {}
        self._pulse = Heartbeats()

    def start(self) -> None:
        """Starts the heartbeats."""
        self._pulse.start(self.present)

    def present(self) -> list["IncomingConnection"]:
        """All authenticated connections."""
        return [*self.members.values(), *self.late]

    def on_connected(self, caller: "IncomingConnection") -> None:
        """A new connection, not yet authenticated."""
        self.unproven[caller] = None
        self.open.add(caller)
        if len(self.unproven) + len(self.members) + len(self.late) > self.nodes + SPARE_CONNECTIONS:
            oldest = next(iter(self.unproven))
            oldest.give_up("malformed", "did not authenticate and was dropped: too many connections at once")

    def refusal_of(self, hello: Hello) -> Refusal | None:
        """Why this authenticated caller is refused; None: it is admitted."""
        member = self.members.get(hello.node_rank)
        if member is not None and member.is_same_call(hello):
            member = None
        holder = member.holder() if member else self._own_name if hello.node_rank == 0 else ""
        return refusal_of(
            hello,
            run=self.run,
            epoch=self.epoch,
            nodes=self.nodes,
            holder=holder,
            settled=self.last_body is not None,
            left_out=self.left_out.get(hello.node_rank, ""),
        )

    def admit(self, caller: "IncomingConnection", hello: Hello) -> None:
        """Admits an authenticated caller.

        There is no await between the decision and this, so a rank is never given twice.
        """
        self.unproven.pop(caller, None)
        welcome = {"t": "welcome", "run_nonce": self.run, "epoch": self.epoch, "wall": time.time()}
        caller.write(encode({**welcome, "welcome": self.welcome}))
        if self.last_body is None:
            earlier = self.members.get(hello.node_rank)
            self.members[hello.node_rank] = caller
            if earlier is not None:
                earlier.abort("it has connected again")
                return
            self.inbox.put(Joined(hello.node_rank, hello.host, caller.ip()))
            return
        self.late.add(caller)
        self.turn_away(
            caller,
            Rejected(
                caller.address,
                f"node {hello.node_rank} ({hello.host}) connected after the end of the run",
                "late",
                hello.node_rank,
            ),
        )
        caller.write(self.last_body)

    def left(self, caller: "IncomingConnection", why: str) -> None:
        """A connection has ended."""
        self.open.discard(caller)
        self.unproven.pop(caller, None)
        self.late.discard(caller)
        if self.file_sink is not None:
            self.file_sink.drop(caller)
        hello = caller.hello
        if hello is not None and self.members.get(hello.node_rank) is caller:
            del self.members[hello.node_rank]
            clean = caller.goodbye or self.acknowledged(caller)
            why = why or (
                "it closed the connection"
                if clean
                else "its unisono process ended without closing the connection"
            )
            is_cut = caller.silence is not None and caller.silence.is_cut
            self.inbox.put(
                Left(hello.node_rank, hello.host, why, clean, caller.quiet_s, is_cut, caller.gave_up)
            )
        self.look_whether_empty()

    def turn_away(self, caller: "IncomingConnection", event: Rejected) -> None:
        """Reports a rejection to the front; for unauthenticated callers at a limited rate, so that
        memory is bounded.
        """
        self.unproven.pop(caller, None)
        if event.kind in ("token", "malformed") and not self._is_new(caller, event):
            return
        self.inbox.put(event)

    def _is_new(self, caller: "IncomingConnection", event: Rejected) -> bool:
        """Whether this rejection was not reported in the last seconds, and the limit is not
        reached.
        """
        now = time.monotonic()
        recent = {key: at for key, at in self._rejections.items() if now - at < _SAME_REJECTION_S}
        key = (caller.ip(), event.kind, event.claims)
        is_new = key not in recent and len(recent) < _MAX_REJECTIONS
        self._rejections = {**recent, key: now} if is_new else recent
        return is_new

    def on_message(self, node_rank: int, message: Body) -> None:
        """A message of a node."""
        self.inbox.put(NodeMessage(node_rank, message))

    def transfers(self, caller: "IncomingConnection", item: Body | Piece) -> None:
        """A frame of a file transfer of a node."""
        if self.file_sink is not None:
            self.file_sink.receive(caller, item)
        elif isinstance(item, dict) and item["t"] == "offer":
            caller.write(
                encode({"t": "done", "id": item["id"], "why": "the head is not accepting files now"})
            )

    def leave_out(self, node_rank: int, why: str) -> None:
        """Stops admitting a node. A connected one stays until it disconnects."""
        self.left_out[node_rank] = why

    def send(self, node_rank: int, body: bytes) -> None:
        """Sends to one node if it is connected."""
        if node_rank in self.members:
            self.members[node_rank].write(body)

    def broadcast(self, body: bytes) -> None:
        """Sends to all connected nodes."""
        for member in list(self.members.values()):
            member.write(body)

    def send_last(self, message: Mapping[str, object]) -> None:
        """Sends the last message to all connected nodes; nodes that connect later receive it in
        `admit`.
        """
        self.last_number += 1
        self.last_body = encode({"t": "last", "n": self.last_number, "m": message})
        for caller in self.present():
            caller.write(self.last_body)

    def acknowledged(self, caller: "IncomingConnection") -> bool:
        """Whether it has acknowledged the last message."""
        return self.last_body is not None and caller.acknowledged == self.last_number

    def close(self) -> None:
        """Says goodbye to every node that has the last message, or to all at once if there is
        none.
        """
        self.closing = True
        for caller in self.present():
            self.dismiss(caller)
        self.look_whether_empty()

    def dismiss(self, caller: "IncomingConnection") -> None:
        """Says goodbye to a node once it has the last message. The node then closes."""
        if self.closing and (self.last_body is None or self.acknowledged(caller)):
            caller.write(BYE)

    def look_whether_empty(self) -> None:
        """Sets `empty` when all nodes have left after `close`."""
        if self.closing and not self.members and not self.late:
            self.empty.set()

    def stop(self) -> None:
        """Aborts all remaining connections."""
        self._pulse.stop()
        for caller in list(self.open):
            caller.abort("the head has closed")


PROOF_S = 3.0
"""Time limit for a caller to authenticate."""


class IncomingConnection(Connection):
    """A connection at the head, from its first byte to its end."""

    def __init__(self, head: Head) -> None:
        super().__init__(FrameParser(CALLS, limit=UNPROVEN_BYTES))
        self.hello: Hello | None = None
        """The node's hello, once it is admitted."""
        self.goodbye = False
        self.acknowledged = 0
        self._head = head
        self._greeting: Greeting | None = None
        self._done = False
        self._came = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    def ip(self) -> str:
        """The remote IP address."""
        return self.address.rpartition(":")[0].strip("[]")

    def holder(self) -> str:
        """The node, for messages."""
        assert self.hello is not None
        now = time.monotonic()
        silent_s = now - self.last_received
        silent = f", silent for {silent_s:.0f} s" if silent_s > SUSPECT_S else ""
        return (
            f"{self.hello.host} ({self.ip()}, process {self.hello.pid}, connected for {now - self._came:.0f}"
            f" s{silent})"
        )

    def is_same_call(self, hello: Hello) -> bool:
        """Whether this is the same process, which did not receive the welcome in time and connects
        again.
        """
        return self.hello is not None and (self.hello.call, self.hello.host) == (hello.call, hello.host)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            PROOF_S, self.give_up, "malformed", f"did not authenticate within {PROOF_S:.0f} s"
        )
        self._head.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio; sends the greeting after the caller's preamble."""
        super().data_received(data)
        if self._greeting is None and self.parser.began and not self._ending:
            self._greet()

    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A frame: the hello, or a message of an admitted node."""
        if self.hello is None:
            self._prove(frame)
        else:
            assert self.seal is not None
            self._on_body(decode_frame(self.seal.unseal(frame)))

    def malformed(self, error: Malformed) -> None:
        """The received bytes are not valid."""
        if isinstance(error, DifferentVersion) and self.transport is not None:
            self.transport.write(preamble(ANSWERS))  # so that the other version can say so, too
        if self.hello is None:
            self.give_up("malformed", str(error))
        else:
            self.abort(f"it {error}")

    def over(self, why: str) -> None:
        """Called at the end of the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.hello is None and not self._done and not self._head.closing:
            self._reject("malformed", "disconnected before it had authenticated")
        self._head.left(self, why)

    def give_up(
        self, kind: RejectedKind, why: str, *, node_rank: int | None = None, holder: str = ""
    ) -> None:
        """Rejects the caller, and reports it to the front."""
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
        node_rank, host = claimed_identity(frame[1])
        name = "" if node_rank is None else f"node {node_rank}" + (f" ({host})" if host else "")
        try:
            body = hello_seal(self._head.token, self._greeting, sends=TO_NODE).open(frame)
        except Forged:
            refusal = Refusal("token", "has a wrong or missing token")
            self.write(encode(refusal.to_body()))  # without proof: it could not check one
            self.give_up("token", f"{name or 'a caller'} {refusal.text}", node_rank=node_rank)
            return
        self._authenticate(Hello.from_body(body), self._greeting)

    def _authenticate(self, hello: Hello, greeting: Greeting) -> None:
        self.seal = session_seal(self._head.token, greeting, hello, sends=TO_NODE)
        refusal = self._head.refusal_of(hello)
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

    def _on_body(self, body: Body | Piece) -> None:
        assert self.hello is not None
        match body:
            case Piece() | {"t": "offer" | "sent" | "withdraw", "id": int()}:
                self._head.transfers(self, body)
            case {"t": "ping"}:
                pass
            case {"t": "say", "m": dict() as message}:
                self._head.on_message(self.hello.node_rank, message)
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
                raise Malformed("sent a frame of unknown type")

"""The head's side of the channel, in the channel's thread: who calls, who is here, what is the last word."""

import asyncio
import time
from typing import Any

from unisono.control.connection import BYE, Connection, Pulse
from unisono.control.events import Event, Joined, Left, Rejected, RejectedKind, Said
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
    judge,
    session_seal,
)
from unisono.control.inbox import Inbox

PROOF_S = 3.0
"""How long a caller may take until it has proven itself."""
SPARE_CONNECTIONS = 64
"""How many more connections than nodes there may be; the oldest unproven one gives way."""
_SAME_REJECTION_S = 10.0
_REMEMBERED_REJECTIONS = 1024


class Head:
    """All state of the head's side. Its methods run in the channel's thread only."""

    def __init__(
        self, *, token: bytes, nodes: int, host: str, welcome: dict[str, Any], run: str, epoch: int, inbox: Inbox[Event]
    ) -> None:  # fmt: skip
        self.token = token
        self.nodes = nodes
        self.run = run
        self.epoch = epoch
        self.welcome = welcome
        self.inbox = inbox
        self.members: dict[int, Caller] = {}
        self.late: set[Caller] = set()
        self.unproven: dict[Caller, None] = {}  # in the order of their coming
        self.open: set[Caller] = set()  # all of these, and those whose last bytes are on their way
        self.last_word: bytes | None = None
        self.words = 0  # how many last words there have been: an acknowledgement says which one it means
        self.closing = False
        self.empty = asyncio.Event()
        self._own_name = f"the head itself ({host})"
        self._rejections: dict[tuple[str, RejectedKind, int | None], float] = {}
        self._pulse = Pulse()

    def start(self) -> None:
        """Begins to beat."""
        self._pulse.start(self.present)

    def present(self) -> list["Caller"]:
        """Everybody who has proven itself."""
        return [*self.members.values(), *self.late]

    def came(self, caller: "Caller") -> None:
        """A connection has been made; nothing is known of it."""
        self.unproven[caller] = None
        self.open.add(caller)
        if len(self.unproven) + len(self.members) + len(self.late) > self.nodes + SPARE_CONNECTIONS:
            oldest = next(iter(self.unproven))
            oldest.give_up("malformed", "has proven nothing and gave way to others: too many call at once")

    def judge(self, hello: Hello) -> Refusal | None:
        """Whether this proven caller may come in."""
        holders = {rank: member.holder() for rank, member in self.members.items()}
        settled = self.last_word is not None
        return judge(
            hello, run=self.run, epoch=self.epoch, nodes=self.nodes, holders={0: self._own_name, **holders},
            settled=settled,
        )  # fmt: skip

    def admit(self, caller: "Caller", hello: Hello) -> None:
        """Takes a proven caller in. There is no await between judging and this: a rank is never given twice."""
        self.unproven.pop(caller, None)
        welcome = {"t": "welcome", "run_nonce": self.run, "epoch": self.epoch, "wall": time.time()}
        caller.write(encode({**welcome, "welcome": self.welcome}))
        if self.last_word is None:
            self.members[hello.node_rank] = caller
            self.inbox.put(Joined(hello.node_rank, hello.host, caller.ip()))
            return
        self.late.add(caller)
        self.rejected(caller, Rejected(caller.address, f"node {hello.node_rank} ({hello.host}) came after the last word",
                                       "late", hello.node_rank))  # fmt: skip
        caller.write(self.last_word)

    def left(self, caller: "Caller", why: str) -> None:
        """A connection is over."""
        self.open.discard(caller)
        self.unproven.pop(caller, None)
        self.late.discard(caller)
        hello = caller.hello
        if hello is not None and self.members.get(hello.node_rank) is caller:
            del self.members[hello.node_rank]
            clean = caller.goodbye or self.acknowledged(caller)
            self.inbox.put(
                Left(
                    hello.node_rank, hello.host, why or ("it said goodbye" if clean else "it is gone"), clean
                )
            )
        self.look_whether_empty()

    def rejected(self, caller: "Caller", event: Rejected) -> None:
        """Tells the front of a rejection. Those who prove nothing are told of once in ten seconds for each address."""
        if event.kind not in ("token", "malformed"):
            self.inbox.put(event)
            return
        now = time.monotonic()
        key = (caller.ip(), event.kind, event.claims)
        if now - self._rejections.get(key, -_SAME_REJECTION_S) < _SAME_REJECTION_S:
            return
        if len(self._rejections) >= _REMEMBERED_REJECTIONS:
            self._rejections.clear()
        self._rejections[key] = now
        self.inbox.put(event)

    def send(self, node_rank: int, body: bytes) -> None:
        """Sends to one node, if it is here."""
        if node_rank in self.members:
            self.members[node_rank].write(body)

    def tell_all(self, body: bytes) -> None:
        """Sends to all nodes that are here."""
        for member in list(self.members.values()):
            member.write(body)

    def settle(self, message: dict[str, Any]) -> None:
        """Says the last word to all who are here; who comes later hears it in `admit`."""
        self.words += 1
        self.last_word = encode({"t": "last", "n": self.words, "m": message})
        for caller in self.present():
            caller.write(self.last_word)

    def acknowledged(self, caller: "Caller") -> bool:
        """Whether it has the last word."""
        return self.last_word is not None and caller.acknowledged == self.words

    def close(self) -> None:
        """Says goodbye to everybody who has the last word, or to everybody at once if there is none."""
        self.closing = True
        for caller in self.present():
            self.dismiss(caller)
        self.look_whether_empty()

    def dismiss(self, caller: "Caller") -> None:
        """Says goodbye to one, once it has the last word. Its own closing follows."""
        if self.closing and (self.last_word is None or self.acknowledged(caller)):
            caller.write(BYE)

    def look_whether_empty(self) -> None:
        """Notes it when all who were here are gone after `close`."""
        if self.closing and not self.members and not self.late:
            self.empty.set()

    def stop(self) -> None:
        """Ends all that is left, at once."""
        self._pulse.stop()
        for caller in list(self.open):
            caller.abort("the head has closed")


class Caller(Connection):
    """A connection at the head, from its first byte to its end."""

    def __init__(self, head: Head) -> None:
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
        age_s = time.monotonic() - self._came
        return f"{self.hello.host} ({self.ip()}, process {self.hello.pid}, here for {age_s:.0f} s)"

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
            self._hear(self.seal.open(frame))

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
        self._head.unproven.pop(self, None)
        self.end(why)

    def _reject(
        self, kind: RejectedKind, why: str, *, node_rank: int | None = None, holder: str = ""
    ) -> None:
        if not self._done:
            self._done = True
            self._head.rejected(self, Rejected(self.address, why, kind, node_rank, holder))

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

    def _hear(self, body: Body) -> None:
        assert self.hello is not None
        match body:
            case {"t": "ping"}:
                pass
            case {"t": "say", "m": dict() as message}:
                self._head.inbox.put(Said(self.hello.node_rank, message))
            case {"t": "clock"}:
                self.write(encode({"t": "clock", "wall": time.time()}))
            case {"t": "ack", "n": int() as number}:
                self.acknowledged = number
                self._head.dismiss(self)
            case {"t": "bye"}:
                self.goodbye = True
                self.end()
            case _:
                raise Malformed("sent a frame of an unknown type")

"""The head's side of the channel, in the channel's thread: who calls, who is here, what is the last word."""

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from unisono.control.connection import BYE, Pulse
from unisono.control.events import Event, Joined, Left, Rejected, RejectedKind, Said
from unisono.control.frames import Body, Piece, encode
from unisono.control.handshake import Hello, Refusal, judge
from unisono.control.inbox import Inbox

if TYPE_CHECKING:
    from unisono.control.caller import Caller

SPARE_CONNECTIONS = 64
"""How many more connections than nodes there may be; the oldest unproven one gives way."""
_SAME_REJECTION_S = 10.0
_MOST_REJECTIONS = 256


class Taker(Protocol):
    """Takes the files that nodes send. Called in the channel's thread, so it must not block."""

    def heard(self, caller: "Caller", item: Body | Piece) -> None:
        """An offer, a piece, or the end of a file. Raises Malformed for what no node of ours would send."""

    def gone(self, caller: "Caller") -> None:
        """The connection is over."""


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
        self.taker: Taker | None = None
        self.left_out: dict[int, str] = {}  # nodes that may not come in any more, and why
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
        member = self.members.get(hello.node_rank)
        if member is not None and member.is_same_call(hello):
            member = None
        holder = member.holder() if member else self._own_name if hello.node_rank == 0 else ""
        return judge(
            hello,
            run=self.run,
            epoch=self.epoch,
            nodes=self.nodes,
            holder=holder,
            settled=self.last_word is not None,
            left_out=self.left_out.get(hello.node_rank, ""),
        )

    def admit(self, caller: "Caller", hello: Hello) -> None:
        """Takes a proven caller in. There is no await between judging and this: a rank is never given twice."""
        self.unproven.pop(caller, None)
        welcome = {"t": "welcome", "run_nonce": self.run, "epoch": self.epoch, "wall": time.time()}
        caller.write(encode({**welcome, "welcome": self.welcome}))
        if self.last_word is None:
            earlier = self.members.get(hello.node_rank)
            self.members[hello.node_rank] = caller
            if earlier is not None:
                earlier.abort("it has called again")
                return
            self.inbox.put(Joined(hello.node_rank, hello.host, caller.ip()))
            return
        self.late.add(caller)
        self.turn_away(caller, Rejected(caller.address, f"node {hello.node_rank} ({hello.host}) came after the last word",
                                       "late", hello.node_rank))  # fmt: skip
        caller.write(self.last_word)

    def left(self, caller: "Caller", why: str) -> None:
        """A connection is over."""
        self.open.discard(caller)
        self.unproven.pop(caller, None)
        self.late.discard(caller)
        if self.taker is not None:
            self.taker.gone(caller)
        hello = caller.hello
        if hello is not None and self.members.get(hello.node_rank) is caller:
            del self.members[hello.node_rank]
            clean = caller.goodbye or self.acknowledged(caller)
            why = why or ("it said goodbye" if clean else "its unisono process has ended without a last word")
            is_cut = caller.silence is not None and caller.silence.is_cut
            self.inbox.put(
                Left(hello.node_rank, hello.host, why, clean, caller.quiet_s, is_cut, caller.gave_up)
            )
        self.look_whether_empty()

    def turn_away(self, caller: "Caller", event: Rejected) -> None:
        """Tells the front of a rejection. Of those who prove nothing only so many are told of that memory is bounded."""
        self.unproven.pop(caller, None)
        if event.kind in ("token", "malformed") and not self._is_news(caller, event):
            return
        self.inbox.put(event)

    def _is_news(self, caller: "Caller", event: Rejected) -> bool:
        """Whether this was not told of in the last seconds, and not too much else was."""
        now = time.monotonic()
        told = {key: at for key, at in self._rejections.items() if now - at < _SAME_REJECTION_S}
        key = (caller.ip(), event.kind, event.claims)
        news = key not in told and len(told) < _MOST_REJECTIONS
        self._rejections = {**told, key: now} if news else told
        return news

    def said(self, node_rank: int, message: dict[str, Any]) -> None:
        """A node has said something."""
        self.inbox.put(Said(node_rank, message))

    def transfers(self, caller: "Caller", item: Body | Piece) -> None:
        """A node sends a file, or a part of one."""
        if self.taker is not None:
            self.taker.heard(caller, item)
        elif isinstance(item, dict) and item["t"] == "offer":
            caller.write(encode({"t": "done", "id": item["id"], "why": "the head does not take files now"}))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Lets a node in no more. One that is here stays until it hangs up."""
        self.left_out[node_rank] = why

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

"""The head's end of the control channel, for the front of node 0."""

import asyncio
import contextlib
import socket
import time
from typing import Any

from unisono.control.caller import Caller
from unisono.control.connection import SUSPECT_S
from unisono.control.events import Event
from unisono.control.frames import encode
from unisono.control.head import Head, Taker
from unisono.control.inbox import Inbox
from unisono.control.listening import allow_open_files, bind
from unisono.control.loop import SHARED

_WELCOME_BYTES = 48 << 10
_BACKLOG = 2048  # calls that wait to be accepted; the system may allow fewer


class HeadServer:
    """Listens for the other nodes, from construction to `close`. All methods return at once but `receive` and `close`.

    Args:
        host: the address to listen on, never all of them.
        port: 0 lets the system choose.
        token: the job's secret.
        nodes: how many there are, this one included.
        welcome: what every node is told when it comes in; run_nonce, epoch and wall (seconds since 1970) are added.
        run_nonce: of this start.
        epoch: which attempt of the run this is.

    Attributes:
        address: where it listens.

    Raises:
        Disagreed: if the port is taken, naming by whom; if the address is not this machine's.
        UsageError: if `host` means every address.
        UnfitError: if the system allows fewer open files than there are nodes.
    """

    def __init__(
        self, *, host: str, port: int, token: bytes, nodes: int, welcome: dict[str, Any], run_nonce: str, epoch: int = 0
    ) -> None:  # fmt: skip
        assert token, "a job of several nodes has a token"
        assert len(encode({"t": "welcome", "welcome": welcome})) < _WELCOME_BYTES, "send large things later"
        allow_open_files(nodes)
        self._socket = bind(host, port, backlog=_BACKLOG)
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (str(name[0]), int(name[1]))
        self._inbox: Inbox[Event] = Inbox()
        self._closed = False
        own_name = str(welcome.get("head_host") or socket.gethostname())
        SHARED.enter()
        self._head, self._server = SHARED.run(
            self._start(token=token, nodes=nodes, host=own_name, welcome=dict(welcome), run=run_nonce,
                        epoch=epoch)
        )  # fmt: skip

    def receive(self, timeout_s: float) -> list[Event]:
        """All that has happened, in order; waits for the first until `timeout_s` is over."""
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._inbox.fileno()

    def send(self, node_rank: int, message: dict[str, Any]) -> None:
        """Sends a message to one node. Where it is not here, nothing happens: its Left is in the events.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        SHARED.post(self._head.send, node_rank, encode({"t": "say", "m": message}))

    def tell_all(self, message: dict[str, Any]) -> None:
        """Sends a message to all nodes that are here.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        SHARED.post(self._head.tell_all, encode({"t": "say", "m": message}))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Lets a node in no more until the job ends; `why` goes on from `node R (HOST) `. What it still says is heard until it hangs up."""
        SHARED.post(self._head.leave_out, node_rank, why)

    def settle(self, message: dict[str, Any]) -> None:
        """Says the last word: to all who are here, and, until `close`, to everybody who still comes.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        encode({"t": "last", "n": 0, "m": message})
        SHARED.post(self._head.settle, message)

    def take_files(self, taker: Taker | None) -> None:
        """Says who takes the files that nodes send from now on; None: nobody does. See control.transfer."""
        SHARED.run(self._take_files(taker))

    def reply(self, caller: Caller, body: dict[str, Any]) -> None:
        """Answers the sender of a file, from any thread."""
        SHARED.post(caller.write, encode(body))

    def tell(self, event: Event) -> None:
        """Adds to what `receive` gives."""
        self._inbox.put(event)

    def here(self) -> set[int]:
        """The nodes that are connected now."""
        return set(self._head.members)

    def silences(self) -> dict[int, float]:
        """Nodes that have said nothing for more than 3 s, and for how long. After 8 s they have Left."""
        now = time.monotonic()
        members = list(self._head.members.items())
        return {rank: now - member.heard for rank, member in members if now - member.heard > SUSPECT_S}

    def close(self, *, patience_s: float) -> None:
        """Waits until all who are here have the last word and are gone, at most `patience_s`; then hangs up on the rest."""
        if self._closed:
            return
        self._closed = True
        SHARED.run(self._stop(patience_s))
        SHARED.leave()
        self._inbox.close()

    async def _start(self, **known: Any) -> tuple[Head, asyncio.Server]:
        head = Head(inbox=self._inbox, **known)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Caller(head), sock=self._socket, backlog=_BACKLOG)
        head.start()
        return head, server

    async def _take_files(self, taker: Taker | None) -> None:
        self._head.taker = taker

    async def _stop(self, patience_s: float) -> None:
        self._head.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._head.empty.wait(), max(0.0, patience_s))
        self._server.close()
        self._head.stop()
        while self._head.open:
            await asyncio.sleep(0)  # asyncio reports the ends of aborted connections in its next rounds

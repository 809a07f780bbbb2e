"""A node's end of the control channel, for the front of every node but the head's."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from unisono.control.connection import BYE, Connection, Heartbeats
from unisono.control.dial import DialedConnection, DialRequest, dial_head
from unisono.control.events import CHANNEL_THREAD, Inbox, Left, NodeMessage
from unisono.control.protocol import PROVEN_BYTES, Body, Malformed, Piece, encode, encode_piece, is_host_name
from unisono.errors import UsageError

_GOODBYE_S = 2.0
HEAD_RANK = 0


class NodeLink:
    """The connection to the head, from `connect` to `close`. Messages of the head are `NodeMessage(0, …)`; its end is one `Left`.

    Attributes:
        welcome: what the head tells every node; with run_nonce, epoch and wall (its clock).
        local_address: the address of this node on which it reached the head.
        clock_offset_s: this node's wall clock minus the head's; None: not measured.
        next_transfer: the number of the next file that is sent over it.
    """

    @classmethod
    def connect(
        cls,
        *,
        host: str,
        port: int,
        token: bytes,
        node_rank: int,
        node_host: str,
        timeout_s: float,
        on_wait: Callable[[str, float], None] | None = None,
        nodes: int | None = None,
        run_nonce: str | None = None,
        epoch: int | None = None,
    ) -> Self:
        """Calls the head until it answers, or `timeout_s` is over.

        Args:
            host: the head's name or address.
            port: the head's port.
            token: the job's secret.
            node_rank: of this node.
            node_host: this node's name, for others.
            timeout_s: how long a head that does not answer is called again.
            on_wait: told after each attempt that failed: who does not answer and why, and the seconds since the first.
            nodes: how many nodes this one expects; None: it does not say.
            run_nonce: of the start that this process belongs to, if it has been in one: another start's head refuses it.
            epoch: the same.

        Raises:
            Disagreed: with a verdict: head_unreachable, dns_failure; and at once token_rejected, node_duplicate,
                stale_process, world_mismatch (another number of nodes), port_in_use (a stranger answers), version_mismatch.
            UsageError: if `node_host` is no name.
        """
        assert token, "a job of several nodes has a token"
        if not is_host_name(node_host):
            raise UsageError.of(
                f"`{node_host}` is no host name", why="allowed are letters, digits and _ . @ : -"
            )
        caller = DialRequest(host, port, token, node_rank, node_host, nodes or 0, run_nonce or "", epoch)
        return cls(dial_head(caller, timeout_s=timeout_s, on_wait=on_wait), head_host=host)

    def __init__(self, called: DialedConnection, *, head_host: str) -> None:
        self.welcome = called.welcome
        self.local_address: str = called.sock.getsockname()[0]
        self.clock_offset_s = called.clock_offset_s
        self.next_transfer = 0
        self._inbox: Inbox[NodeMessage | Left] = Inbox()
        self._closed = False
        CHANNEL_THREAD.enter()
        self._line = CHANNEL_THREAD.run(_bring_to_life(called, head_host, self._inbox))

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        """All that has come, in order; waits for the first until `timeout_s` is over."""
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """Readable while something waits."""
        return self._inbox.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the head. If it is gone, nothing happens: Left says so.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        CHANNEL_THREAD.post(self._line.write, encode({"t": "say", "m": message}))

    def send_of_file(self, part: Body | Piece) -> None:
        """Sends a piece of a file, or what is to be said of one. For control.file_sender, which bounds how much is on its way."""
        CHANNEL_THREAD.post(self._line.write, encode_piece(part) if isinstance(part, Piece) else encode(part))

    def hear_of_files(self, heard: Callable[[Body], None]) -> None:
        """What the head says of files goes there, in the channel's thread; when the head is gone, {"t": "gone", "why"}."""
        CHANNEL_THREAD.run(self._line.hear_of_files(heard))

    def close(self) -> None:
        """Says goodbye, and waits a moment until the head has heard it and all that was sent."""
        if self._closed:
            return
        self._closed = True
        CHANNEL_THREAD.post(self._line.say_goodbye)
        self._line.gone.wait(_GOODBYE_S)
        CHANNEL_THREAD.run(self._line.cut())
        CHANNEL_THREAD.leave()
        self._inbox.close()


class _Line(Connection):
    """The node's end, in the channel's thread."""

    def __init__(self, called: DialedConnection, head_host: str, inbox: Inbox[NodeMessage | Left]) -> None:
        super().__init__(called.parser)
        self.seal = called.seal
        self.parser.limit = PROVEN_BYTES
        self.gone = threading.Event()
        self._early = called.early
        self._of_files: Callable[[Body], None] | None = None
        self._head_host = head_host
        self._inbox = inbox
        self._clean = False
        self._leaving = False
        self._pulse = Heartbeats()
        self._over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The channel's thread has the socket."""
        super().connection_made(transport)
        self._pulse.start(lambda: [self])
        try:
            for body in self._early:
                self._hear(body)
        except Malformed as error:
            self.malformed(error)
        self.data_received(b"")  # what the dialling has read and not used

    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A frame of the head."""
        assert self.seal is not None
        self._hear(self.seal.open(frame))

    def malformed(self, error: Malformed) -> None:
        """Somebody between has changed, repeated or dropped frames."""
        self.abort(f"it {error}")

    def over(self, why: str) -> None:
        """The head is gone, or we are."""
        self._pulse.stop()
        if self._of_files is not None:
            self._of_files({"t": "gone", "why": why or "it is gone"})
        if not self._leaving:
            why = why or (
                "it said goodbye" if self._clean else "its unisono process has ended without a last word"
            )
            is_cut = self.silence is not None and self.silence.is_cut
            self._inbox.put(
                Left(HEAD_RANK, self._head_host, why, self._clean, self.quiet_s, is_cut, self.gave_up)
            )
        self.gone.set()
        self._over.set()

    def say_goodbye(self) -> None:
        """Sends the goodbye after all that was sent before; the head then closes."""
        self._leaving = True
        self.write(BYE)

    async def cut(self) -> None:
        """Ends it, whatever the head does."""
        self.abort("closed")
        await self._over.wait()

    async def hear_of_files(self, heard: Callable[[Body], None]) -> None:
        """Takes who is told of files from now on."""
        self._of_files = heard
        if self._over.is_set():
            heard({"t": "gone", "why": "it is gone"})

    def _hear(self, body: Body) -> None:
        match body:
            case {"t": "ping"} | {"t": "clock"}:
                pass
            case {"t": "more", "id": int(), "pieces": int()} | {"t": "done", "id": int(), "why": str()}:
                if self._of_files is not None:
                    self._of_files(body)
            case {"t": "say", "m": dict() as message}:
                self._inbox.put(NodeMessage(HEAD_RANK, message))
            case {"t": "last", "n": int() as number, "m": dict() as message}:
                self._clean = True
                self._inbox.put(NodeMessage(HEAD_RANK, message))
                self.write(encode({"t": "ack", "n": number}))
            case {"t": "bye"}:
                self.other_gave_up(body)
                self._clean = self._clean or not self.gave_up
                self.end(self.silence.why if self.silence is not None else "it said goodbye")
            case _:
                raise Malformed("sent a frame of an unknown type")


async def _bring_to_life(called: DialedConnection, head_host: str, inbox: Inbox[NodeMessage | Left]) -> _Line:
    called.sock.setblocking(False)
    line = _Line(called, head_host, inbox)
    await asyncio.get_running_loop().create_connection(lambda: line, sock=called.sock)
    return line

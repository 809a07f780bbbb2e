"""A node's end of the control channel, for every front except the head's."""

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
    """The connection to the head, from `connect` to `close`. The head's messages are `NodeMessage(0, …)`; the end is one `Left`.

    Attributes:
        welcome: the head's welcome to every node, with run_nonce, epoch and wall (its clock).
        local_address: the address of this node on which it reached the head.
        clock_offset_s: this node's wall clock minus the head's; None: not measured.
        next_transfer: number of the next file transfer.
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
        """Connects to the head; retries until it responds or `timeout_s` is over.

        Args:
            host: the head's name or address.
            timeout_s: time limit for retries.
            on_wait: called after each failed attempt with who does not respond and why, and the seconds since the first attempt.
            nodes: number of nodes that this one expects; None: not checked.
            run_nonce: of the start that this process belongs to, if any: the head of a different start refuses it.

        Raises:
            Disagreed: with a verdict: head_unreachable, dns_failure; and at once token_rejected, node_duplicate,
                stale_process, world_mismatch (different number of nodes), port_in_use (a different program responds), version_mismatch.
            UsageError: if `node_host` is not a valid host name.
        """
        assert token, "a job of several nodes needs a token"
        if not is_host_name(node_host):
            raise UsageError.of(
                f"`{node_host}` is not a valid host name", why="allowed are letters, digits and _ . @ : -"
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
        self._line = CHANNEL_THREAD.run(_start_line(called, head_host, self._inbox))

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        """Everything received since the last call, in order; waits up to `timeout_s` for the first."""
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while something waits."""
        return self._inbox.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the head. If the connection has ended, nothing happens; a Left reports that.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._line.write, encode({"t": "say", "m": message}))

    def send_of_file(self, part: Body | Piece) -> None:
        """Sends a piece of a file, or what is to be said of one. For control.file_sender, which bounds how much is on its way."""
        CHANNEL_THREAD.post(self._line.write, encode_piece(part) if isinstance(part, Piece) else encode(part))

    def set_file_handler(self, handler: Callable[[Body], None]) -> None:
        """Sets the receiver of the head's messages about files, called in the channel's thread; at the end of the connection with {"t": "gone", "why"}."""
        CHANNEL_THREAD.run(self._line.set_file_handler(handler))

    def close(self) -> None:
        """Says goodbye, and waits a moment until the head has received it and everything sent before."""
        if self._closed:
            return
        self._closed = True
        CHANNEL_THREAD.post(self._line.send_goodbye)
        self._line.closed_event.wait(_GOODBYE_S)
        CHANNEL_THREAD.run(self._line.cut())
        CHANNEL_THREAD.leave()
        self._inbox.close()


class _Line(Connection):
    """The node's end, in the channel's thread."""

    def __init__(self, called: DialedConnection, head_host: str, inbox: Inbox[NodeMessage | Left]) -> None:
        super().__init__(called.parser)
        self.seal = called.seal
        self.parser.limit = PROVEN_BYTES
        self.closed_event = threading.Event()
        self._early = called.early
        self._of_files: Callable[[Body], None] | None = None
        self._head_host = head_host
        self._inbox = inbox
        self._clean = False
        self._leaving = False
        self._pulse = Heartbeats()
        self._over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        self._pulse.start(lambda: [self])
        try:
            for body in self._early:
                self._on_body(body)
        except Malformed as error:
            self.malformed(error)
        self.data_received(b"")  # what the dialling has read and not used

    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A frame of the head."""
        assert self.seal is not None
        self._on_body(self.seal.open(frame))

    def malformed(self, error: Malformed) -> None:
        """Frames were changed, repeated or dropped on the way."""
        self.abort(f"it {error}")

    def over(self, why: str) -> None:
        """Called at the end of the connection."""
        self._pulse.stop()
        if self._of_files is not None:
            self._of_files({"t": "gone", "why": why or "the connection has ended"})
        if not self._leaving:
            why = why or (
                "it closed the connection" if self._clean else "its unisono process ended without a goodbye"
            )
            is_cut = self.silence is not None and self.silence.is_cut
            self._inbox.put(
                Left(HEAD_RANK, self._head_host, why, self._clean, self.quiet_s, is_cut, self.gave_up)
            )
        self.closed_event.set()
        self._over.set()

    def send_goodbye(self) -> None:
        """Sends the goodbye after everything else; the head then closes."""
        self._leaving = True
        self.write(BYE)

    async def cut(self) -> None:
        """Aborts the connection."""
        self.abort("closed")
        await self._over.wait()

    async def set_file_handler(self, handler: Callable[[Body], None]) -> None:
        """Sets the receiver of messages about files."""
        self._of_files = handler
        if self._over.is_set():
            handler({"t": "gone", "why": "the connection has ended"})

    def _on_body(self, body: Body) -> None:
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
                self.end(self.silence.why if self.silence is not None else "it closed the connection")
            case _:
                raise Malformed("sent a frame of unknown type")


async def _start_line(called: DialedConnection, head_host: str, inbox: Inbox[NodeMessage | Left]) -> _Line:
    called.sock.setblocking(False)
    line = _Line(called, head_host, inbox)
    await asyncio.get_running_loop().create_connection(lambda: line, sock=called.sock)
    return line

"""Both ends of the control channel for fronts: a node's link to the head, and the head's server
with its listening port.
"""

import asyncio
import contextlib
import errno
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import UnfitError, UsageError
from unisono.base.text import one_line
from unisono.guard.control.connection import (
    BYE,
    CHANNEL_THREAD,
    SUSPECT_S,
    ChannelEvent,
    Connection,
    Heartbeats,
    Inbox,
    Left,
    NodeMessage,
)
from unisono.guard.control.dial import DialedConnection, DialRequest, dial_head, disagreement
from unisono.guard.control.head import FileSink, Head, IncomingConnection
from unisono.guard.control.protocol import (
    PROVEN_BYTES,
    Body,
    Malformed,
    Piece,
    encode,
    encode_piece,
    is_host_name,
)
from unisono.guard.facts.network import find_listener

_GOODBYE_S = 2.0
HEAD_RANK = 0


class NodeLink:
    """The connection to the head, from `connect` to `close`.

    The head's messages are `NodeMessage(0, …)`; the end is one `Left`.

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
            on_wait: called after each failed attempt with who does not respond and why, and the
                seconds since the first attempt.
            nodes: number of nodes that this one expects; None: not checked.
            run_nonce: of the start that this process belongs to, if any: the head of a different
                start refuses it.

        Raises:
            Disagreed: with a verdict: head_unreachable, dns_failure; and at once token_rejected,
                node_duplicate, stale_process, world_mismatch (different number of nodes),
                port_in_use (a different program responds), version_mismatch.
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
        """Everything received since the last call, in order; waits up to `timeout_s` for the
        first.
        """
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while something waits."""
        return self._inbox.fileno()

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message to the head.

        If the connection has ended, nothing happens; a Left reports that.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._line.write, encode({"t": "say", "m": message}))

    def send_of_file(self, part: Body | Piece) -> None:
        """Sends a piece of a file, or what is to be said of one.

        For control.file_sender, which bounds how much is on its way.
        """
        CHANNEL_THREAD.post(self._line.write, encode_piece(part) if isinstance(part, Piece) else encode(part))

    def set_file_handler(self, handler: Callable[[Body], None]) -> None:
        """Sets the receiver of the head's messages about files, called in the channel's thread; at
        the end of the connection with {"t": "gone", "why"}.
        """
        CHANNEL_THREAD.run(self._line.set_file_handler(handler))

    def close(self) -> None:
        """Says goodbye, and waits a moment until the head has received it and everything sent
        before.
        """
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
                "it closed the connection"
                if self._clean
                else "its unisono process ended without closing the connection"
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


_WELCOME_BYTES = 48 << 10
_BACKLOG = 2048  # calls that wait to be accepted; the system may allow fewer


class HeadServer:
    """Listens for the other nodes, from construction to `close`.

    All methods except `receive` and `close` return immediately.

    Args:
        host: the address to listen on, never all addresses.
        port: 0 lets the system choose.
        nodes: number of nodes, including this one.
        welcome: sent to every node that joins; run_nonce, epoch and wall (seconds since 1970) are
            added.
        epoch: number of this attempt of the run.

    Raises:
        Disagreed: if the port is in use, with the process; if the address is not this machine's.
        UsageError: if `host` means every address.
        UnfitError: if the system allows fewer open files than there are nodes.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        token: bytes,
        nodes: int,
        welcome: Mapping[str, object],
        run_nonce: str,
        epoch: int = 0,
    ) -> None:
        assert token, "a job of several nodes needs a token"
        assert len(encode({"t": "welcome", "welcome": welcome})) < _WELCOME_BYTES, "send large things later"
        allow_open_files(nodes)
        self._socket = bind_port(host, port, backlog=_BACKLOG)
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (str(name[0]), int(name[1]))
        self._inbox: Inbox[ChannelEvent] = Inbox()
        self._closed = False
        own_name = str(welcome.get("head_host") or socket.gethostname())
        CHANNEL_THREAD.enter()
        self._head, self._server = CHANNEL_THREAD.run(
            self._start(
                token=token, nodes=nodes, host=own_name, welcome=dict(welcome), run=run_nonce, epoch=epoch
            )
        )

    def receive(self, timeout_s: float) -> list[ChannelEvent]:
        """All events since the last call, in order; waits up to `timeout_s` for the first."""
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while events wait."""
        return self._inbox.fileno()

    def send(self, node_rank: int, message: Mapping[str, object]) -> None:
        """Sends a message to one node.

        If it is not connected, nothing happens; a Left is in the events.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._head.send, node_rank, encode({"t": "say", "m": message}))

    def broadcast(self, message: Mapping[str, object]) -> None:
        """Sends a message to all connected nodes.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._head.broadcast, encode({"t": "say", "m": message}))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Stops admitting a node until the job ends; `why` continues the sentence after `node R
        (HOST) `.

        Its messages are received until it disconnects.
        """
        CHANNEL_THREAD.post(self._head.leave_out, node_rank, why)

    def send_last(self, message: Mapping[str, object]) -> None:
        """Sends the last message to all connected nodes, and until `close` to every node that
        connects.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        encode({"t": "last", "n": 0, "m": message})
        CHANNEL_THREAD.post(self._head.send_last, message)

    def take_files(self, file_sink: FileSink | None) -> None:
        """Says who takes the files that nodes send from now on; None: nobody does.

        See control.file_sender.
        """
        CHANNEL_THREAD.run(self._take_files(file_sink))

    def reply(self, caller: IncomingConnection, body: Mapping[str, object]) -> None:
        """Replies to the sender of a file, from any thread."""
        CHANNEL_THREAD.post(caller.write, encode(body))

    def post(self, event: ChannelEvent) -> None:
        """Adds an event for `receive`."""
        self._inbox.put(event)

    def connected(self) -> set[int]:
        """Node ranks that are connected now."""
        return set(self._head.members)

    def silences(self) -> dict[int, float]:
        """Nodes that have been silent for more than 3 s, with the seconds.

        After 8 s they have Left.
        """
        now = time.monotonic()
        members = list(self._head.members.items())
        return {
            rank: now - member.last_received
            for rank, member in members
            if now - member.last_received > SUSPECT_S
        }

    def close(self, *, patience_s: float) -> None:
        """Waits up to `patience_s` until all nodes have the last message and have left; then
        disconnects the rest.
        """
        if self._closed:
            return
        self._closed = True
        CHANNEL_THREAD.run(self._stop(patience_s))
        CHANNEL_THREAD.leave()
        self._inbox.close()

    async def _start(self, **settings: Any) -> tuple[Head, asyncio.Server]:
        head = Head(inbox=self._inbox, **settings)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: IncomingConnection(head), sock=self._socket, backlog=_BACKLOG
        )
        head.start()
        return head, server

    async def _take_files(self, file_sink: FileSink | None) -> None:
        self._head.file_sink = file_sink

    async def _stop(self, patience_s: float) -> None:
        self._head.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._head.empty.wait(), max(0.0, patience_s))
        self._server.close()
        self._head.stop()
        while self._head.open:
            # asyncio reports the ends of aborted connections in its next rounds.
            await asyncio.sleep(0)


_OTHER_FILES = 100
_SEGMENT_BYTES = 1_160  # with headers below the smallest MTU that IPv6 allows, 1280
_ALL_ADDRESSES = ("", "0.0.0.0", "::", "*")  # noqa: S104 - the addresses that are refused


def bind_port(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on `host` only. Port 0: the system chooses one.

    Raises:
        UsageError: if `host` means all addresses, or the port cannot be bound.
        Disagreed: if the port is in use, the name has no address, or the address is not this
            machine's.
    """
    if host in _ALL_ADDRESSES:
        raise UsageError.of(
            f"the head cannot listen on `{host}`, which stands for all networks of this machine",
            fix="pass the address on which the other nodes reach this one: --head HOST:PORT",
        )
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port in TIME_WAIT is nobody's.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections have it from here, and callers are notified: where large packets are
        # lost, reports still arrive so that the dial matrix can detect it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _cannot_bind(error, host, port) from error
    return sock


def allow_open_files(nodes: int) -> None:
    """Raises the limit of open files so that this process can have a connection to every node.

    Raises:
        UnfitError: if the hard limit is too low.
    """
    needed = nodes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        summary = f"the head of {nodes} nodes needs {needed} open files, but the limit is {hard}"
        fix = f"`ulimit -n {max(65536, needed)}` before the start, or LimitNOFILE= in the service"
        evidence = (Evidence(where="RLIMIT_NOFILE", text=f"soft {soft}, hard {hard}"),)
        verdict = Verdict(cause="ulimit", when="before", summary=summary, evidence=evidence, fix=(fix,))
        raise UnfitError.of(summary, where="RLIMIT_NOFILE", fix=fix, verdict=verdict)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = one_line(str(getattr(error, "strerror", "") or error))
        raise disagreement(
            "dns_failure",
            f"the head cannot resolve its own name `{host}`: {why}",
            where=host,
            fix=("pass an IP address that the other nodes reach: --head IP:PORT",),
        ) from error
    return addresses[0][0], addresses[0][4]


def _cannot_bind(error: OSError, host: str, port: int) -> Exception:
    address = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return _taken(host, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return disagreement(
            "head_unreachable",
            f"the head cannot listen on {address}: no interface of this machine has this address",
            where=address,
            fix=(
                (
                    "start node 0 on the machine with this address, or pass --head with an address of this"
                    " machine: `ip -br addr`"
                ),
            ),
        )
    why = one_line(error.strerror or str(error)).lower()
    return UsageError.of(
        f"the head cannot listen on {address}: {why}", fix="pass a port above 1023: --head HOST:PORT"
    )


def _taken(host: str, port: int) -> Exception:
    listener = find_listener(port)
    if listener is None:
        owner, fix = (
            "a process of a different user or container",
            f"`sudo ss -ltnp 'sport = :{port}'` shows it",
        )
    else:
        owner = f"process {listener.pid} ({one_line(listener.command, limit=120) or '?'})"
        fix = f"if it is left over from an earlier start, end it: kill {listener.pid}"
    return disagreement(
        "port_in_use",
        f"port {port} on {host} is in use: {owner} listens there",
        where=f"{host}:{port}",
        why=owner,
        fix=(fix, "or start all nodes with a different port: --head HOST:PORT"),
    )

"""The head's end of the control channel, for the front of node 0; and its listening port."""

import asyncio
import contextlib
import errno
import resource
import socket
import time
from typing import Any

from unisono.causes import Evidence, Verdict
from unisono.control.connection import SUSPECT_S
from unisono.control.dial import disagreement
from unisono.control.events import CHANNEL_THREAD, Event, Inbox
from unisono.control.head import FileSink, Head, IncomingConnection
from unisono.control.protocol import encode
from unisono.errors import UnfitError, UsageError
from unisono.facts.tcp import find_listener
from unisono.text import one_line

_WELCOME_BYTES = 48 << 10
_BACKLOG = 2048  # calls that wait to be accepted; the system may allow fewer


class HeadServer:
    """Listens for the other nodes, from construction to `close`. All methods except `receive` and `close` return immediately.

    Args:
        host: the address to listen on, never all addresses.
        port: 0 lets the system choose.
        nodes: number of nodes, including this one.
        welcome: sent to every node that joins; run_nonce, epoch and wall (seconds since 1970) are added.
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
        welcome: dict[str, Any],
        run_nonce: str,
        epoch: int = 0,
    ) -> None:
        assert token, "a job of several nodes needs a token"
        assert len(encode({"t": "welcome", "welcome": welcome})) < _WELCOME_BYTES, "send large things later"
        allow_open_files(nodes)
        self._socket = bind_port(host, port, backlog=_BACKLOG)
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (str(name[0]), int(name[1]))
        self._inbox: Inbox[Event] = Inbox()
        self._closed = False
        own_name = str(welcome.get("head_host") or socket.gethostname())
        CHANNEL_THREAD.enter()
        self._head, self._server = CHANNEL_THREAD.run(
            self._start(
                token=token, nodes=nodes, host=own_name, welcome=dict(welcome), run=run_nonce, epoch=epoch
            )
        )

    def receive(self, timeout_s: float) -> list[Event]:
        """All events since the last call, in order; waits up to `timeout_s` for the first."""
        return self._inbox.take(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while events wait."""
        return self._inbox.fileno()

    def send(self, node_rank: int, message: dict[str, Any]) -> None:
        """Sends a message to one node. If it is not connected, nothing happens; a Left is in the events.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._head.send, node_rank, encode({"t": "say", "m": message}))

    def broadcast(self, message: dict[str, Any]) -> None:
        """Sends a message to all connected nodes.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        CHANNEL_THREAD.post(self._head.broadcast, encode({"t": "say", "m": message}))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Stops admitting a node until the job ends; `why` continues the sentence after `node R (HOST) `. Its messages are received until it disconnects."""
        CHANNEL_THREAD.post(self._head.leave_out, node_rank, why)

    def send_last(self, message: dict[str, Any]) -> None:
        """Sends the last message to all connected nodes, and until `close` to every node that connects.

        Raises:
            ValueError: if the message is larger than 8 MiB or not JSON.
        """
        encode({"t": "last", "n": 0, "m": message})
        CHANNEL_THREAD.post(self._head.send_last, message)

    def take_files(self, file_sink: FileSink | None) -> None:
        """Says who takes the files that nodes send from now on; None: nobody does. See control.file_sender."""
        CHANNEL_THREAD.run(self._take_files(file_sink))

    def reply(self, caller: IncomingConnection, body: dict[str, Any]) -> None:
        """Replies to the sender of a file, from any thread."""
        CHANNEL_THREAD.post(caller.write, encode(body))

    def post(self, event: Event) -> None:
        """Adds an event for `receive`."""
        self._inbox.put(event)

    def connected(self) -> set[int]:
        """Node ranks that are connected now."""
        return set(self._head.members)

    def silences(self) -> dict[int, float]:
        """Nodes that have been silent for more than 3 s, with the seconds. After 8 s they have Left."""
        now = time.monotonic()
        members = list(self._head.members.items())
        return {
            rank: now - member.last_received
            for rank, member in members
            if now - member.last_received > SUSPECT_S
        }

    def close(self, *, patience_s: float) -> None:
        """Waits up to `patience_s` until all nodes have the last message and have left; then disconnects the rest."""
        if self._closed:
            return
        self._closed = True
        CHANNEL_THREAD.run(self._stop(patience_s))
        CHANNEL_THREAD.leave()
        self._inbox.close()

    async def _start(self, **known: Any) -> tuple[Head, asyncio.Server]:
        head = Head(inbox=self._inbox, **known)
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
            await asyncio.sleep(0)  # asyncio reports the ends of aborted connections in its next rounds


_OTHER_FILES = 100
_SEGMENT_BYTES = 1_160  # with headers below the smallest MTU that IPv6 allows, 1280
_ALL_ADDRESSES = ("", "0.0.0.0", "::", "*")  # noqa: S104 - the addresses that are refused


def bind_port(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on `host` only. Port 0: the system chooses one.

    Raises:
        UsageError: if `host` means all addresses, or the port cannot be bound.
        Disagreed: if the port is in use, the name has no address, or the address is not this machine's.
    """
    if host in _ALL_ADDRESSES:
        raise UsageError.of(
            f"the head cannot listen on `{host}`: that is every network of this machine",
            fix="pass the address on which the other nodes reach this one: --head HOST:PORT",
        )
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is nobody's
        # Accepted connections have it from here, and callers are notified: where large packets are lost, reports still arrive
        # so that the dial matrix can detect it.
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = one_line(str(getattr(error, "strerror", "") or error))
        raise disagreement(
            "dns_failure",
            f"the head cannot resolve its own name `{host}`: {why}",
            where=host,
            fix=("pass an IP address that the other nodes reach: --head IP:PORT",),
        ) from error
    return found[0][0], found[0][4]


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
                "start node 0 on the machine with this address, or pass --head with an address of this machine: `ip -br addr`",
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

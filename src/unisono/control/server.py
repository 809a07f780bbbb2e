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
        assert token, "a job of several nodes has a token"
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
        CHANNEL_THREAD.post(self._head.send, node_rank, encode({"t": "say", "m": message}))

    def tell_all(self, message: dict[str, Any]) -> None:
        """Sends a message to all nodes that are here.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        CHANNEL_THREAD.post(self._head.tell_all, encode({"t": "say", "m": message}))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Lets a node in no more until the job ends; `why` goes on from `node R (HOST) `. What it still says is heard until it hangs up."""
        CHANNEL_THREAD.post(self._head.leave_out, node_rank, why)

    def settle(self, message: dict[str, Any]) -> None:
        """Says the last word: to all who are here, and, until `close`, to everybody who still comes.

        Raises:
            ValueError: if the message is larger than 8 MiB, or no JSON.
        """
        encode({"t": "last", "n": 0, "m": message})
        CHANNEL_THREAD.post(self._head.settle, message)

    def take_files(self, taker: FileSink | None) -> None:
        """Says who takes the files that nodes send from now on; None: nobody does. See control.file_sender."""
        CHANNEL_THREAD.run(self._take_files(taker))

    def reply(self, caller: IncomingConnection, body: dict[str, Any]) -> None:
        """Answers the sender of a file, from any thread."""
        CHANNEL_THREAD.post(caller.write, encode(body))

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

    async def _take_files(self, taker: FileSink | None) -> None:
        self._head.taker = taker

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
    """A socket that listens on `host` alone. Port 0: the system chooses one.

    Raises:
        UsageError: if `host` means all addresses, or the port may not be had.
        Disagreed: if the port is taken, the name has no address, or the address is another machine's.
    """
    if host in _ALL_ADDRESSES:
        raise UsageError.of(
            f"the head may not listen on `{host}`: that is every network of this machine",
            fix="give the address on which the other nodes reach this one: --head HOST:PORT",
        )
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is nobody's
        # Accepted connections have it from here, and callers are told: where large packets are lost, reports still come
        # through, so that the dial matrix can name it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _cannot_bind(error, host, port) from error
    return sock


def allow_open_files(nodes: int) -> None:
    """Sees to it that this process may have a connection to every node.

    Raises:
        UnfitError: if the system's hard limit is too low for that.
    """
    needed = nodes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        summary = f"a head of {nodes} nodes needs {needed} open files, and this process may have {hard}"
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
            f"the head does not know its own name `{host}`: {why}",
            where=host,
            fix=("give the IP address of the interface that the other nodes reach: --head IP:PORT",),
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
                "start node 0 on the machine that has this address, or give --head an address of this one: `ip -br addr`",
            ),
        )
    why = one_line(error.strerror or str(error)).lower()
    return UsageError.of(
        f"the head cannot listen on {address}: {why}", fix="give a port above 1023: --head HOST:PORT"
    )


def _taken(host: str, port: int) -> Exception:
    listener = find_listener(port)
    if listener is None:
        owner, fix = "somebody who cannot be seen from here", f"`sudo ss -ltnp 'sport = :{port}'` shows who"
    else:
        owner = f"process {listener.pid} ({one_line(listener.command, limit=120) or '?'})"
        fix = f"if it is left over from an earlier start, end it: kill {listener.pid}"
    return disagreement(
        "port_in_use",
        f"the head cannot have port {port} on {host}: {owner} listens there",
        where=f"{host}:{port}",
        why=owner,
        fix=(fix, "or start all nodes with another port: --head HOST:PORT"),
    )

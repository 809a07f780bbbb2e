"""The HTTP server under `board` and `serve`.

Who may hold a connection and for how long, whose name it answers to, and whether it really has its
port.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol  # 0.54: no public hook limits connections

from unisono.base.errors import UnfitError
from unisono.base.text import one_line

_LOOK_S = 1.0
_CHECK_S = 10.0


def address_of(listener: socket.socket, host: str) -> str:
    """The URL of the server."""
    address, port = listener.getsockname()[:2]
    # This name has two addresses, and a different program may have the other one.
    name = address if host == "localhost" else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class HttpConnection(H11Protocol):
    """A connection that sends the head of its request soon, and makes room for others until
    then.

    A client that opens connections without end costs only its own: beyond `most_waiting`
    connections of its address that wait for a request, or `most` of all, the one that has waited
    longest is dropped. Where all of `most` are being answered, a new one gets 503.

    Attributes:
        most: connections of all clients.
        most_waiting: connections of one address that have no request.
        head_s: seconds from the first byte of a request, or the connection's beginning, to the end
            of the head.
        refusal: what a connection beyond `most` is sent.
        waiting_since: when its last answer ended, by the event loop's clock.
    """

    most = 512
    most_waiting = 128
    head_s = 5.0
    refusal: Response

    waiting_since = 0.0
    _timer: asyncio.TimerHandle | None = None
    _head_since: float | None = None
    _closing_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        """Takes the connection, or the room of one that waits."""
        super().connection_made(transport)
        self.waiting_since = self._head_since = self.loop.time()
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request."""
        super().data_received(data)
        if not self.is_waiting or not self.conn.trailing_data[0]:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection's own timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or bool(cycle.response_complete)

    def _make_room(self) -> None:
        others = [
            one
            for one in self.connections
            if isinstance(one, HttpConnection) and not one.transport.is_closing()
        ]
        waiting = sorted(
            (one for one in others if one.is_waiting and one is not self), key=lambda one: one.waiting_since
        )
        address = self.client and self.client[0]
        same = [one for one in waiting if (one.client and one.client[0]) == address]
        if len(same) >= self.most_waiting:
            same[0].transport.abort()
        elif len(others) > self.most and waiting:
            waiting[0].transport.abort()
        elif len(others) > self.most:
            self._refuse()

    def _refuse(self) -> None:
        headers = b"".join(b"%s: %s\r\n" % header for header in self.refusal.raw_headers)
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n%s\r\n%s"
            % (headers, self.refusal.body)
        )
        self.transport.close()

    def _look(self) -> None:
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        now = self.loop.time()
        if self.transport.is_closing():  # what the client does not read must not keep the connection
            self._closing_since = self._closing_since or now
        for since in (self._head_since, self._closing_since):
            if since is not None and now - since > self.head_s:
                self.transport.abort()


class ServerMiddleware:
    """Answers the server's request to itself, and ends answers whose client does not read them."""

    def __init__(self, app: ASGIApp, *, send_s: float) -> None:
        """Wraps `app`; sending a part of an answer may take `send_s` seconds."""
        self._app = app
        self._send_s = send_s
        self.path = f"/{secrets.token_urlsafe(24)}"
        self.has_answered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(self._send_s):
                await send(message)

        if scope["type"] == "http" and scope["path"] == self.path:
            self.has_answered = True
            await Response(status_code=204)(scope, receive, send)
            return
        # ClientDisconnect is what starlette makes of a TimeoutError.
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            await self._app(scope, receive, send_soon)


class _Server(Server):
    """uvicorn's server without its own handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running_server(
    app: ASGIApp, listener: socket.socket, *, connection: type[HttpConnection], send_s: float, **settings: Any
) -> AsyncIterator[Server]:
    """A server that answers on `listener`; it has answered a request of its own, so no other
    program has the port.

    Args:
        app: the application.
        listener: a socket that listens.
        connection: what limits connections.
        send_s: seconds in which a client must take a part of an answer.
        settings: of uvicorn.

    Raises:
        UnfitError: if its own request does not reach it.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # invalid requests are not worth a line each
    outermost = ServerMiddleware(app, send_s=send_s)
    config = Config(
        outermost,
        http=connection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **settings,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _ask_itself(outermost, listener, tls="ssl_certfile" in settings)
        yield server
    finally:
        server.should_exit = True
        await task


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _ask_itself(outermost: ServerMiddleware, listener: socket.socket, *, tls: bool) -> None:
    """Sends a request to the address of the server.

    It has no key or token, and needs no certificate of a name: a different program may answer it.

    Raises:
        UnfitError: if the answer does not come from this server.
    """
    host, port = listener.getsockname()[:2]
    try:
        async with asyncio.timeout(_CHECK_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_any_certificate() if tls else None
            )
            try:
                writer.write(
                    f"GET {outermost.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
                )
                await writer.drain()
                answer = await reader.readline()
            finally:
                writer.close()
        why = f"it got {one_line(answer.decode(errors='replace'), limit=80)!r} from a different program"
    except (OSError, TimeoutError) as error:
        why = str(error) or f"there was no answer within {_CHECK_S:g} s"
    if not outermost.has_answered:
        raise UnfitError.of(
            f"a request of the server to itself, at {host} port {port}, did not reach it",
            where="--host, --port",
            why=why,
            fix="check packet filters on this machine (`unisono doctor`), or choose a different port",
        )

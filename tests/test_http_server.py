"""The server under `board` and `serve`. Run: pytest tests/test_http_server.py"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from unisono.base.errors import UnfitError
from unisono.base.text import host_name
from unisono.front.http_headers import origin_host
from unisono.front.http_server import HttpConnection, running_server
from unisono.guard.facts.network import bind_listener

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Few(HttpConnection):
    """A connection of a server that takes three."""

    most = 3
    most_waiting = 2
    head_s = 0.5
    refusal = JSONResponse({"error": "full"}, 503, {"retry-after": "1"})


class Client:
    """Connections to a server, closed at the end.

    Attributes:
        go: what the server's answers wait for.
    """

    def __init__(self, port: int) -> None:
        self.go = asyncio.Event()
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def ask(self, data: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def with_server(work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Runs `work` beside a server."""

    async def run() -> None:
        with bind_listener("127.0.0.1", None) as listener:
            client = Client(listener.getsockname()[1])

            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                await client.go.wait()
                await PlainTextResponse("here")(scope, receive, send)

            async with running_server(
                answer, listener, connection=Few, send_s=1.0, timeout_graceful_shutdown=1
            ):
                try:
                    await asyncio.wait_for(work(client), 30)
                finally:
                    await client.close()

    asyncio.run(run())


def test_new_connection_gets_503_in_the_usual_form_while_all_are_busy() -> None:
    async def work(client: Client) -> None:
        busy = [await client.ask() for _ in range(3)]
        reader, _ = await client.ask()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert answer.endswith(b'\r\n\r\n{"error":"full"}')
        client.go.set()
        for reader, _ in busy:
            assert await reader.readuntil(b"here")

    with_server(work)


def test_connections_without_a_request_make_room_the_oldest_first() -> None:
    async def work(client: Client) -> None:
        client.go.set()
        waiting = [await client.ask(b"GET / HT") for _ in range(4)]
        assert await waiting[0][0].read() == b""
        assert await waiting[1][0].read() == b""
        waiting[3][1].write(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert await waiting[3][0].readuntil(b"here")

    with_server(work)


def test_incomplete_head_ends_its_connection_soon_also_after_an_answer() -> None:
    async def work(client: Client) -> None:
        client.go.set()
        reader, _ = await client.ask(b"")
        assert await reader.read() == b""
        reader, writer = await client.ask()
        await reader.readuntil(b"here")
        writer.write(b"GET / HT")
        assert await reader.read() == b""

    with_server(work)


def test_a_server_whose_own_request_is_answered_by_others_says_so() -> None:
    async def run() -> None:
        with bind_listener("127.0.0.1", None) as mine, bind_listener("127.0.0.1", None) as other:

            class Redirected(socket.socket):
                def getsockname(self) -> Any:
                    return other.getsockname()

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readline()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                writer.close()

            thief = await asyncio.start_server(answer, sock=other)
            with (
                Redirected(fileno=mine.detach()) as listener,
                pytest.raises(UnfitError, match="did not reach it"),
            ):
                async with running_server(PlainTextResponse("x"), listener, connection=Few, send_s=1.0):
                    pass
            thief.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"), ("LOCALHOST:80", "localhost"), ("127.0.0.1:8000", "127.0.0.1"), ("[::1]:8", "::1"), ("a-b_c.de", "a-b_c.de"),
        ("", None), (None, None), ("a{b}.evil.com", None), ("[::1", None), ("a:b", None), ("a@b", None), ("a/b", None), ("a\n", None), ("١", None),
    ],
)  # fmt: skip
def test_a_host_is_a_name_or_an_address(header: str | None, name: str | None) -> None:
    assert host_name(header) == name


@given(st.text(max_size=30))
def test_no_text_breaks_the_readers_of_headers(text: str) -> None:
    assert host_name(text) is None or set(text.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-:[]")
    for origin in (text, f"http://{text}"):
        host = origin_host(origin)
        assert host in (None, "null") or host_name(host) is not None

"""Requests to a server over HTTP, each with a deadline and a bounded answer.

The main thread never waits for a socket: requests are made in threads, so that it can tell the
watch that it lives. Proxies of the environment are not used, since the server gets a key and paths
of this machine; redirects are not followed.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unisono.base.files import parse_json
from unisono.base.text import one_line, redact

_CONNECTIONS = 64  # at the same time
_CONNECT_S = 10.0
_MOST_WORDS = 300  # characters of what a message quotes


class NoAnswer(Exception):  # noqa: N818 - named for what happened
    """The server did not answer: no connection, a lost one, or no end of the answer in time.

    Attributes:
        waited_s: until the deadline, if it was over.
    """

    def __init__(self, words: str, *, waited_s: float = 0.0) -> None:
        super().__init__(words)
        self.waited_s = waited_s


class TooLong(Exception):  # noqa: N818 - named for what happened
    """The answer exceeds its limit of bytes."""


@dataclass(frozen=True)
class Reply:
    """What the server answered.

    Attributes:
        status: of HTTP.
        body: all of it.
    """

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: if it is not JSON.
        """
        return parse_json(self.body)

    @property
    def words(self) -> str:
        """What the server says, for people: the message of its error, or the beginning of its
        body.
        """
        text = self.body[: 4 * _MOST_WORDS].decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            body = self.json()
            error = body.get("error", body) if isinstance(body, dict) else body
            text = str(error["message"] if "message" in error else error["detail"])
        return one_line(redact(text), limit=_MOST_WORDS)


class HttpClient:
    """Makes requests in threads."""

    def __init__(self, url: str, key: str | None) -> None:
        """Nothing is sent yet.

        Args:
            url: of the server, with http or https.
            key: sent as a bearer token; None: none.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None, "the config has checked it"
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if is_secure else 80)
        self._context = ssl.create_default_context() if is_secure else None
        self._key = key
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="sampler")
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def start(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        deadline_s: float,
        most_bytes: int,
    ) -> Future[Reply]:
        """Begins a request. Its result raises NoAnswer or TooLong.

        Args:
            method: GET or POST.
            path: of the route.
            body: sent as JSON.
            deadline_s: time for the whole answer.
            most_bytes: of its body.
        """
        return self._threads.submit(self._exchange, method, path, body, deadline_s, most_bytes)

    def abort(self) -> None:
        """Ends the requests that are connected."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _shut(connection)

    def close(self) -> None:
        """Ends all requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.abort()

    def _exchange(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, most_bytes: int
    ) -> Reply:
        late = threading.Event()
        connection = self._connection(min(deadline_s, _CONNECT_S))

        def end() -> None:
            late.set()
            _shut(connection)

        timer = threading.Timer(deadline_s, end)  # a socket's own limit begins anew with every byte
        timer.daemon = True
        timer.start()
        try:
            with self._lock:
                self._open.add(connection)
            connection.connect()
            connection.sock.settimeout(None)  # the timer ends what takes too long, and says so
            if late.is_set():
                raise TimeoutError
            return self._answer(connection, method, path, body, most_bytes)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                raise NoAnswer(f"no answer within {deadline_s:g} s", waited_s=deadline_s) from None
            raise NoAnswer(_words_of(error)) from None
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        most_bytes: int,
    ) -> Reply:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, data, headers)
        with connection.getresponse() as response:
            ends_with_connection = response.length is None and not response.chunked
            received = response.read(most_bytes + 1)
            # http.client takes a lost connection for the end of headers, or of a part of a body.
            is_lost = ends_with_connection and not received
            if is_lost or (response.length and len(received) <= most_bytes):
                raise http.client.IncompleteRead(received)
        if len(received) > most_bytes:
            raise TooLong(f"the answer to {method} {path} has more than {most_bytes:,} bytes")
        return Reply(response.status, received)

    def _connection(self, connect_s: float) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=connect_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=connect_s, context=self._context)


def _shut(connection: http.client.HTTPConnection) -> None:
    """Wakes the thread that waits for a connection."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _words_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no connection in time"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(redact(str(reason)), limit=_MOST_WORDS)

"""The server of the page: GET and HEAD alone, for whoever has the token, on the address that was
asked for; it follows the runs and announces what has changed.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.base.text import host_name
from unisono.front.board.follow import FollowedRun, find_runs, is_run
from unisono.front.board.page import NO_ICON, STATIC, page_html
from unisono.front.board.regions import REGIONS, ROLLOUTS, Region, list_runs, read_picture, show_region
from unisono.front.http_headers import LOOPBACK, origin_host
from unisono.front.http_server import HttpConnection, address_of, running_server

LOOK_S = 0.3
_RUNS_EVERY = 10
"""Looks between two searches for new runs."""
_HEARTBEAT_S = 2.0
_SEND_S = 10.0
_ENDING_S = 0.5
_KEEP_ALIVE_S = 10
_MOST_NAME = 255  # characters of a file name
MOST_CONNECTIONS = 64
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}


class Board:
    """The runs that are shown, and what is known of them.

    Reading takes place in threads, one at a time.
    """

    def __init__(self, paths: list[Path], *, key: bytes, has_others: bool = True) -> None:
        """Reads nothing yet.

        Args:
            has_others: whether a path without a run in it is shown as one, too.
        """
        self._paths = paths
        self._has_others = has_others
        self._key = key
        self._lock = threading.Lock()
        self._searching = threading.Lock()
        self.runs: dict[str, FollowedRun] = {}
        self._looks = 0
        self._looked_at = 0.0
        self._unannounced: dict[str, dict[str, int]] = {}

    def refresh(self) -> None:
        """Takes in what has changed, unless that was done just now.

        What is found is announced with the next look.
        """
        with self._lock:
            if time.monotonic() - self._looked_at < LOOK_S:
                return
        for name, regions in self.look().items():
            self._unannounced.setdefault(name, {}).update(regions)

    def news(self) -> dict[str, dict[str, int]]:
        """What has changed since the last call."""
        changed = self.look()
        earlier, self._unannounced = self._unannounced, {}
        return {name: {**earlier.get(name, {}), **changed.get(name, {})} for name in {**earlier, **changed}}

    def look(self) -> dict[str, dict[str, int]]:
        """Takes in what has changed; the new versions of changed regions, by run.

        A run that is new has all of them.
        """
        with self._lock:
            self._looked_at = time.monotonic()
            if self._looks % _RUNS_EVERY == 0:
                self._find()
            self._looks += 1
            changed = {}
            for run in self.runs.values():
                regions = run.look(at_ranks=self._looks % 2 == 1)
                if regions:
                    changed[run.name] = {region: run.versions[region] for region in regions}
            return changed

    def _find(self) -> None:
        for name, root in find_runs([path for path in self._paths if path.is_dir()]):
            if name not in self.runs and (self._has_others or is_run(root)):
                self.runs[name] = FollowedRun(name, root)

    def search(self) -> None:
        """Looks for new runs now."""
        with self._lock:
            self._find()

    def list(self) -> Region:
        """All runs."""
        with self._lock:
            return list_runs(self.runs.values())

    def show(self, name: str, region: str, query: dict[str, str]) -> bytes | None:
        """A region as JSON; None if there is no such run or region."""
        run = self.runs.get(name)
        if run is None or region not in REGIONS:
            return None
        # a search reads all logs from their beginning, which takes long, with readers of its own;
        # answers of rollouts are read from files alone
        is_search = (region == "log" and (query.get("q") or query.get("rank"))) or region == ROLLOUTS
        with self._searching if is_search else self._lock:
            body = show_region(run, region, query, key=self._key)
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()

    def picture(self, name: str, picture: str) -> bytes | None:
        """A picture of a run's samples; None if it has none of this name."""
        run = self.runs.get(name)
        return read_picture(run, picture) if run is not None else None


class Follower:
    """Looks at the runs while somebody is listening, and passes on what has changed."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._listeners: set[asyncio.Queue[str]] = set()
        self.is_over = False

    async def run(self) -> None:
        """Until the server ends."""
        while not self.is_over:
            if self._listeners:
                changed = await asyncio.to_thread(self._board.news)
                for queue in self._listeners if changed else ():
                    with contextlib.suppress(asyncio.QueueFull):  # it is slow, and will be dropped
                        queue.put_nowait(f"event: change\ndata: {json.dumps(changed)}\n\n")
            await asyncio.sleep(LOOK_S)

    def stop(self) -> None:
        """Ends the streams."""
        self.is_over = True
        for queue in self._listeners:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait("")

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events, with a heartbeat, by which the page sees that the server is there."""
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=100)
        self._listeners.add(queue)
        try:
            yield "retry: 1000\nevent: hello\ndata: {}\n\n"
            while not self.is_over:
                try:
                    yield await asyncio.wait_for(queue.get(), _HEARTBEAT_S)
                except TimeoutError:
                    yield "event: beat\ndata: {}\n\n"
        finally:
            self._listeners.discard(queue)


def build_app(board: Board, follower: Follower, **gate: Any) -> ASGIApp:
    """The application behind its gate.

    Args:
        gate: of `Gate`.
    """

    async def show_page(request: Request) -> Response:
        return html_response(page_html(language_of(request)))

    return Gate(Starlette(routes=[Route("/", show_page), *board_routes(board, follower)]), **gate)


def board_routes(board: Board, follower: Follower, *, static: tuple[Path, ...] = (STATIC,)) -> list[Route]:
    """What the page asks for: its own parts, the runs and their changes.

    Args:
        static: directories with the parts of the page.
    """
    parts = {path.name: path for folder in static for path in folder.iterdir() if path.suffix in _TYPES}

    async def show_static(request: Request) -> Response:
        name = request.path_params["name"]
        path = parts.get(name)
        if path is None:
            return PlainTextResponse("there is no such file", 404 if len(name) <= _MOST_NAME else 400)
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix])

    async def show_runs(request: Request) -> Response:
        await asyncio.to_thread(board.refresh)
        return JSONResponse(await asyncio.to_thread(board.list))

    async def show_one(request: Request) -> Response:
        await asyncio.to_thread(board.refresh)
        name, region = request.path_params["name"], request.path_params["region"]
        body = await asyncio.to_thread(board.show, name, region, dict(request.query_params))
        if body is None:
            return PlainTextResponse("there is no such run or region", 404)
        return Response(body, media_type="application/json")

    async def show_picture(request: Request) -> Response:
        name, picture = request.path_params["name"], request.path_params["picture"]
        data = await asyncio.to_thread(board.picture, name, picture)
        if data is None:
            return PlainTextResponse("there is no such run or picture", 404)
        return Response(data, media_type="image/jpeg")

    async def show_events(request: Request) -> Response:
        return StreamingResponse(follower.listen(), media_type="text/event-stream")

    return [
        Route("/static/{name}", show_static),
        Route("/api/runs", show_runs),
        Route("/api/runs/{name}/{region}", show_one),
        Route("/api/runs/{name}/pictures/{picture}", show_picture),
        Route("/events", show_events),
    ]


def html_response(text: str) -> Response:
    """A page."""
    return Response(text.encode(), media_type="text/html")


def language_of(request: Request) -> str:
    """`?lang=`, else the first of ours that the browser accepts."""
    requested = request.query_params.get("lang", "")
    if requested in ("en", "zh"):
        return requested
    for part in request.headers.get("accept-language", "").split(","):
        name = part.strip()[:2].lower()
        if name in ("en", "zh"):
            return name
    return "en"


class Gate:
    """Refuses what is not a GET or HEAD for us, by somebody with the token.

    Attributes:
        command: that printed the address.
    """

    command = "unisono board"

    def __init__(
        self, app: ASGIApp, *, key: bytes, token: str, host: str, port: int, is_secure: bool = False
    ) -> None:
        """Opens nothing yet.

        Args:
            key: of this user, from which the value of the cookie is made. It outlives this server,
                so that a page finds the next one on the same port by itself.
            token: in the printed address.
            host: the name or address in the printed URL.
            is_secure: whether browsers reach it with TLS.
        """
        self._app = app
        self._is_secure = is_secure
        self._token = token
        self._ticket = hmac.new(
            key, f"cookie of {self.command} on port {port}".encode(), "sha256"
        ).hexdigest()
        names = LOOPBACK if host in LOOPBACK else (*LOOPBACK, host.lower(), socket.gethostname().lower())
        self._hosts = tuple(dict.fromkeys(names))
        self._cookie = f"{self.command.replace(' ', '-')}-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                named = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        request = Request(scope)
        answer = self._refusal(request) or self._exchange(request)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        name, origin = host_name(host), origin_host(request.headers.get("origin", "null"))
        if name is None or origin is None:
            return PlainTextResponse("the header Host or Origin is not valid", 400)
        if name not in self._hosts:
            return PlainTextResponse("this server does not have that name", 421)
        if "origin" in request.headers and origin != host:
            return PlainTextResponse("requests from other sites are refused", 403)
        return self._method_refusal(request) or self._stranger_refusal(request)

    def _method_refusal(self, request: Request) -> Response | None:
        if request.method in ("GET", "HEAD"):
            return None
        return PlainTextResponse("only GET and HEAD", 405, {"Allow": "GET, HEAD"})

    def _stranger_refusal(self, request: Request) -> Response | None:
        if self._is_known(request) or self._has_token(request):
            return None
        return PlainTextResponse(f"open the address that `{self.command}` printed; it has a token", 401)

    def _is_known(self, request: Request) -> bool:
        try:
            cookie = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._ticket.encode())

    def _has_token(self, request: Request) -> bool:
        given = request.query_params.get("token", "") if request.url.path == "/" else ""
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _exchange(self, request: Request) -> Response | None:
        """The cookie for the token, on a page that leads to the address without it: a redirect from
        another site would not carry the cookie.
        """
        if "token" not in request.query_params or not self._has_token(request):
            return None
        language = request.query_params.get("lang", "")
        address = f"/?lang={language}" if language in ("en", "zh") else "/"
        response = html_response(
            f'<!doctype html><meta charset="utf-8">{NO_ICON}<meta http-equiv="refresh"'
            f' content="0;url={address}"><title>unisono</title>'
        )
        response.set_cookie(
            self._cookie,
            self._ticket,
            httponly=True,
            samesite="strict",
            path="/",
            secure=self._is_secure,
        )
        return response


class _BrowserConnection(HttpConnection):
    """A connection of a browser."""

    most = most_waiting = MOST_CONNECTIONS
    refusal = PlainTextResponse("all connections of this server are in use", 503, {"Retry-After": "1"})


def serve(
    paths: list[Path],
    listener: socket.socket,
    *,
    host: str,
    key: bytes,
    on_start: Callable[[str, Board], None],
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        listener: a socket that listens already.
        host: the name or address in the printed URL.
        on_start: gets the URL with the token, once requests are answered.

    Raises:
        UnfitError: if a different program answers on the port.
    """
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32)
    board = Board(paths, key=key)
    board.look()
    follower = Follower(board)
    app = build_app(board, follower, key=key, token=token, host=host, port=port)
    address = f"{address_of(listener, host)}/?token={token}"
    asyncio.run(serve_pages(app, listener, follower=follower, on_start=lambda: on_start(address, board)))


async def serve_pages(
    app: ASGIApp,
    listener: socket.socket,
    *,
    follower: Follower,
    on_start: Callable[[], None],
    **settings: Any,
) -> None:
    """Answers requests of browsers until SIGINT or SIGTERM.

    Args:
        app: behind a gate.
        listener: a socket that listens already.
        follower: announces what has changed.
        on_start: called once requests are answered.
        settings: more of uvicorn.

    Raises:
        UnfitError: if a different program answers on the port.
    """
    settings |= {"timeout_keep_alive": _KEEP_ALIVE_S, "h11_max_incomplete_event_size": 32_768}
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    following = asyncio.create_task(follower.run())
    async with running_server(
        app, listener, connection=_BrowserConnection, send_s=_SEND_S, **settings
    ) as server:
        on_start()
        await stop.wait()
        follower.stop()
        logging.getLogger("uvicorn.error").disabled = True  # it reports connections that it cuts
        loop.call_later(_ENDING_S, setattr, server, "force_exit", True)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following

"""The HTTP side of a server: addresses and keys, requests, and its end."""

import asyncio
import contextlib
import hmac
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from unisono.base.errors import UsageError
from unisono.base.files import open_given
from unisono.base.text import host_name, one_line
from unisono.front.http_headers import origin_host
from unisono.front.http_server import HttpConnection, running_server
from unisono.front.serve.adapter_folders import AdapterFolders, LoadRequest, UnloadRequest
from unisono.front.serve.answer_streams import ChoicesAnswer, EventStream, ResponsesAnswer
from unisono.front.serve.model_process import ROWS, WAITING, ModelProcess, PendingAsk
from unisono.front.serve.picture_addresses import MOST_PICTURES, PictureAddresses, picture_parts
from unisono.front.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Objects,
    read_request,
    unknown_model,
)
from unisono.front.serve.responses import ResponseRequest
from unisono.front.serve.values import (
    ClassifyRequest,
    EmbeddingRequest,
    ScoreRequest,
    ValueRequest,
    refuse_path,
)
from unisono.guard.facts.network import bind_listener, is_loopback
from unisono.trainer.plan.task_requests import NamedAdapter

if TYPE_CHECKING:
    from unisono.trainer.plan.talk_messages import Valued

_BODY_BYTES = 16 << 20
_LARGE_BYTES = 1 << 16
_BODY_S = 30.0
_SEND_S = 30.0  # in which a client must take a part of its answer
_LOADING_S = 2
_KEEP_ALIVE_S = 30
_KEY_BYTES = 1 << 16
_CLOSE_S = 2  # for the last bytes of answers, once all have ended
_PEER_GONE_MS = 60_000  # without an acknowledgement: a machine that vanished, or a cut network


@dataclass(frozen=True)
class ApiKeys:
    """The keys that a client may send; none: everybody on this machine is served."""

    values: tuple[bytes, ...] = field(default=(), repr=False)

    def admit(self, header: str | None) -> bool:
        """Whether an `Authorization` header has one of them.

        Takes the same time for all wrong ones.
        """
        kind, _, given = (header or "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), value) for value in self.values]
        return kind.lower() == "bearer" and any(matches)


def read_keys(file: Path | None, from_environment: str | None, *, warn: Callable[[str], None]) -> ApiKeys:
    """The keys of `--key-file` (one per line), else that of UNISONO_SERVE_KEY.

    Raises:
        UsageError: if the file cannot be read, or has none.
    """
    if file is None:
        key = (from_environment or "").strip()
        if from_environment and not key:
            raise UsageError.of(
                "UNISONO_SERVE_KEY is blank", where="environment", fix="set a key, or unset it"
            )
        return ApiKeys((key.encode(),) if key else ())
    try:
        with open_given(file.expanduser()) as stream:
            mode = stat.S_IMODE(file.expanduser().stat().st_mode)
            lines = stream.read(_KEY_BYTES).split(b"\n")
    except OSError as error:
        raise UsageError.of(
            f"the key file {file} cannot be read",
            where="--key-file",
            why=error.strerror or str(error),
            fix="name a file with one key per line",
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith(b"#"))
    if not keys:
        raise UsageError.of(
            f"there is no key in {file}", where="--key-file", fix="write at least one key, one per line"
        )
    if mode & 0o077:
        warn(f"warning: {file} can be read or changed by other users (mode {mode:04o}): chmod 600 {file}")
    return ApiKeys(keys)


def listen(host: str, port: int | None, keys: ApiKeys) -> socket.socket:
    """A socket that listens on the address of the server.

    Args:
        host: a name or address of this machine.
        port: None: a free one.
        keys: required on every address that other machines can reach.

    Raises:
        UsageError: if it is taken or not an address of this machine, or other machines could reach
            it without a key.
    """
    if not keys.values and not _is_local(host):
        raise UsageError.of(
            f"there is no key for the address {one_line(host)}",
            where="--host",
            why="every machine that reaches it could use the model; only this machine is served without a key",
            fix=(
                "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > key; chmod 600 key; and add"
                " --key-file key"
            ),
        )
    listener = bind_listener(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these three
    with contextlib.suppress(OSError, AttributeError):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_GONE_MS)
    return listener


def _is_local(host: str) -> bool:
    """Whether it is a name or address of this machine that no other one reaches."""
    return host == "localhost" or is_loopback(host)


class Api:
    """The application: routes, keys, and answers in OpenAI's form."""

    def __init__(
        self,
        model: ModelProcess,
        *,
        name: str,
        keys: ApiKeys,
        addresses: PictureAddresses,
        folders: AdapterFolders,
        created: int,
    ) -> None:
        self._model = model
        self._addresses = addresses
        self._folders = folders
        self._name = name
        self._keys = keys
        self._created = created
        self._parsing = asyncio.Semaphore(1)
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/v1/embeddings", partial(self._value, EmbeddingRequest), methods=["POST"]),
                *(
                    Route(path, partial(self._value, ScoreRequest), methods=["POST"])
                    for path in ("/v1/score", "/score")
                ),
                Route("/classify", partial(self._value, ClassifyRequest), methods=["POST"]),
                Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _show_error,
                HTTPException: _show_http_error,
                Exception: _show_defect,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            self._admit(Headers(scope=scope))
            refuse_path(scope["path"], self._model.facts)
        except ApiError as error:
            await _error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def _adapters(self) -> dict[str, str]:
        """The name of each model for clients, and that of its adapter."""
        return {self._name: "", **{one.name: one.name for one in self._model.adapters}}

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description(name) for name in self._adapters]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._adapters:
            raise unknown_model(name, self._adapters)
        return JSONResponse(self._description(name))

    def _description(self, name: str) -> dict[str, object]:
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "unisono"}
        return {**model, "parent": self._name} if self._adapters[name] else model

    def _admit(self, headers: Headers) -> None:
        """Refuses strangers, and everybody until the model is loaded.

        Without a key, a web page that the user visits must not reach the model through the user's
        browser: its origin would be a different one, and with DNS rebinding the host, too.

        Raises:
            ApiError: 400 for headers that are not valid, 503 while the model is loaded, 401 without
                a valid key, 403 from a web page.
        """
        host = host_name(headers.get("host"))
        origin = origin_host(headers["origin"]) if "origin" in headers else host
        if host is None or origin is None:
            raise ApiError(400, "the header Host or Origin is not valid", code="invalid_host")
        if not self._model.ready.is_set():
            raise ApiError(503, "the model is being loaded", code="loading", retry_after_s=_LOADING_S)
        if self._keys.values:
            if not self._keys.admit(headers.get("authorization")):
                raise ApiError(
                    401,
                    "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
            return
        for name in (host, host_name(origin)):
            if not _is_local(name or ""):
                raise ApiError(403, f"requests for or from {name} need a key", code="origin_refused")

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def _load_adapter(self, request: Request) -> Response:
        self._refuse_changes()
        parsed: LoadRequest = await self._read(LoadRequest, request)
        if parsed.lora_name == self._name:
            what = "the model itself has this name; choose a different one"
            raise ApiError(400, what, param="lora_name", code="name_taken")
        path = await asyncio.to_thread(self._folders.find, parsed.lora_path)
        await self._model.load(NamedAdapter(parsed.lora_name, str(path)))
        return Response(f"the adapter {one_line(parsed.lora_name)} is loaded", media_type="text/plain")

    async def _unload_adapter(self, request: Request) -> Response:
        self._refuse_changes()
        parsed: UnloadRequest = await self._read(UnloadRequest, request)
        if not self._adapters.get(parsed.lora_name):
            what = f"there is no adapter {one_line(parsed.lora_name, limit=100)!r} here"
            raise ApiError(404, what, param="lora_name", code="model_not_found")
        await self._model.unload(parsed.lora_name)
        return Response(f"the adapter {one_line(parsed.lora_name)} is unloaded", media_type="text/plain")

    def _refuse_changes(self) -> None:
        if not self._folders.paths:
            what = "adapters are loaded and unloaded only with --adapter-folders; --adapter names others"
            raise ApiError(404, what, code="adapters_fixed")

    async def _read(self, kind: Any, request: Request) -> Any:
        """The request in a body.

        A large one is parsed in a thread, and one at a time, since its values need many times its
        size.

        Raises:
            ApiError: if it is not JSON, by its type or content, or not a valid request.
        """
        # The types that a web page can send to any server without its consent (no-cors) are not
        # among these.
        kind_sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind_sent != "application/json":
            raise ApiError(
                415, "the body must be JSON, with `Content-Type: application/json`", code="content_type"
            )
        data = await _body(request)
        if len(data) <= _LARGE_BYTES:
            return read_request(kind, data, models=self._adapters)
        async with self._parsing:
            return await asyncio.to_thread(read_request, kind, data, models=self._adapters)

    async def _fetch_pictures(self, request: Request, messages: Sequence[Any]) -> None:
        """Replaces the addresses of pictures in messages by data URLs.

        Raises:
            ApiError: if the model reads no pictures, they are too many, or one cannot be fetched.
        """
        parts = list(picture_parts(messages))
        blind = self._model.facts.blind
        if parts and blind:
            raise ApiError(400, blind, param="messages", code="invalid_value")
        if len(parts) > MOST_PICTURES:
            what = f"the request has {len(parts)} pictures, and at most {MOST_PICTURES} are read"
            raise ApiError(400, what, param="messages", code="invalid_value")
        if parts:
            await _while_connected(request, self._addresses.fill(parts))

    async def _respond(self, request: Request) -> Response:
        parsed: ResponseRequest = await self._read(ResponseRequest, request)
        chat = parsed.chat()
        asks = await self._submit(request, chat)
        return await self._send(request, asks, chat, ResponsesAnswer(asks[0], parsed, chat))

    async def _answer(self, request: Request, kind: Any) -> Response:
        parsed = await self._read(kind, request)
        asks = await self._submit(request, parsed)
        objects = Objects(parsed.model, is_chat=kind is ChatRequest, shows_scores=parsed.shows_scores)
        return await self._send(request, asks, parsed, ChoicesAnswer(asks, objects, parsed))

    async def _value(self, kind: type[ValueRequest], request: Request) -> Response:
        """The values of texts."""
        parsed: ValueRequest = await self._read(kind, request)
        asks = self._model.submit([parsed.question(self._model.facts)])
        try:
            valued: Valued | None = await _while_connected(request, asks[0].valued())
        finally:
            self._model.drop(asks)
        if valued is None:
            return Response(status_code=499)
        return await asyncio.to_thread(
            lambda: JSONResponse(parsed.answer(valued, self._model.facts))  # of up to a million numbers
        )

    async def _submit(self, request: Request, parsed: ChatRequest | CompletionRequest) -> list[PendingAsk]:
        """Queues the prompts of a request.

        Raises:
            ApiError: as `ModelProcess.submit`, or if a picture cannot be used.
        """
        adapter = self._adapters[parsed.model]
        questions = [replace(question, adapter=adapter) for question in parsed.questions()]
        await self._fetch_pictures(request, questions[0].messages or ())
        return self._model.submit(questions)

    async def _send(
        self,
        request: Request,
        asks: list[PendingAsk],
        parsed: ChatRequest | CompletionRequest,
        answer: ChoicesAnswer | ResponsesAnswer,
    ) -> Response:
        """The response to a request, whole or as a stream."""
        try:
            begun = await _while_connected(request, answer.begin())
            if begun is None:
                return _nobody(self._model, asks)
            if parsed.stream:
                return EventStream(answer.events(), on_end=lambda: self._model.drop(asks))
            whole = await _while_connected(request, answer.whole())
            return _nobody(self._model, asks) if whole is None else JSONResponse(whole)
        except BaseException:  # cancellation, too, frees the places
            self._model.drop(asks)
            raise


async def _body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        ApiError: if it is too large, or takes too long.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _BODY_BYTES:
                    raise ApiError(
                        413, f"the body has more than {_BODY_BYTES >> 20} MiB", code="body_too_large"
                    )
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_S:g} s", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client has gone", code="disconnected") from None
    return bytes(data)


async def _while_connected(request: Request, work: Any) -> Any:
    """The result of `work`; None if the client goes before, which ends the work.

    Raises:
        ApiError: that of the work.
    """
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _nobody(model: ModelProcess, asks: list[PendingAsk]) -> Response:
    """What is sent to a client that has gone; frees its places."""
    model.drop(asks)
    return Response(status_code=499)


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _show_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {one_line(request.scope['path'], limit=100)}: {error.detail}"
    return _error_response(ApiError(error.status_code, what))


async def _show_defect(_: Request, error: Exception) -> Response:
    """For the client; the traceback is on the server's terminal."""
    return _error_response(ApiError(500, f"the server failed: {type(error).__name__}", code="server_error"))


class _ClientConnection(HttpConnection):
    """A connection of a client; one machine may send as many requests at once as are served."""

    most_waiting = ROWS + WAITING
    refusal = _error_response(
        ApiError(503, "all connections of this server are in use", code="connections", retry_after_s=1)
    )


async def serve(
    model: ModelProcess,
    listener: socket.socket,
    *,
    name: str,
    keys: ApiKeys,
    addresses: PictureAddresses,
    folders: AdapterFolders,
    grace_s: float,
    on_ready: Callable[[], None],
    created: int,
) -> None:
    """Loads the model and serves until a signal comes, or the model's process cannot be
    restarted.

    Until it is loaded, requests get 503.

    Args:
        model: not started yet.
        listener: from `listen`.
        name: of the model, for clients.
        keys: that clients may send.
        addresses: of pictures, that requests may name.
        folders: of adapters that requests may load.
        grace_s: seconds that running answers have after SIGTERM or Ctrl-C; a second signal ends
            them at once.
        on_ready: called when the model is loaded, and a request to the server's own address has
            reached it.
        created: seconds since 1970, for clients.

    Raises:
        UnisonoError: if the model is refused, its process died too often, or a different program
            answers on the port.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    stop = asyncio.create_task(signals.get())
    api = Api(model, name=name, keys=keys, addresses=addresses, folders=folders, created=created)
    settings = {"timeout_keep_alive": _KEEP_ALIVE_S, "timeout_graceful_shutdown": _CLOSE_S}
    try:
        async with running_server(api, listener, connection=_ClientConnection, send_s=_SEND_S, **settings):
            model.start()
            await _first(stop, model.ready.wait(), model.ended.wait())
            if model.failure is None and not stop.done():
                on_ready()
                await _first(stop, model.ended.wait())
                await _complete(model, signals, grace_s)
            model.close()
    finally:
        model.close()
        stop.cancel()
    if model.failure is not None and not model.is_ending:
        raise model.failure


async def _complete(model: ModelProcess, signals: "asyncio.Queue[int]", grace_s: float) -> None:
    """Waits until running answers are complete, the time is over, or a second signal comes."""
    if model.failure is None:
        model.end()
        second = asyncio.create_task(signals.get())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_first(second, model.idle.wait(), model.ended.wait()), grace_s)
        second.cancel()


async def _first(task: "asyncio.Task[int]", *others: Any) -> None:
    """Waits for the first of them."""
    waits = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait((task, *waits), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

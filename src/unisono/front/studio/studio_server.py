"""The server of the studio: the board's routes, and those that change something."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from unisono.base.errors import UnisonoError
from unisono.front.board.page import STATIC, page_html
from unisono.front.board.server import (
    Board,
    Follower,
    board_routes,
    html_response,
    language_of,
    serve_pages,
)
from unisono.front.studio.actions import Actions
from unisono.front.studio.audit import AuditLog
from unisono.front.studio.commands import Commands
from unisono.front.studio.downloads import zipped
from unisono.front.studio.folders import Folders
from unisono.front.studio.form import form
from unisono.front.studio.gate import UPLOADS, StudioGate, read_body
from unisono.front.studio.models import Models
from unisono.front.studio.owner import OwnerSettings
from unisono.front.studio.page import OWN_STATIC, studio_html
from unisono.front.studio.permissions import Permissions
from unisono.front.studio.problems import shown_problems
from unisono.front.studio.results import Results
from unisono.front.studio.run_queue import RunQueue
from unisono.front.studio.runs import folders_with_runs
from unisono.front.studio.suggestions import suggestions
from unisono.front.studio.tasks import Tasks

_QUEUE_S = 0.5

Action = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def serve(
    owner: OwnerSettings, listener: socket.socket, *, key: bytes, on_start: Callable[[str], None]
) -> None:
    """Serves until SIGINT or SIGTERM. Runs that were started go on.

    Args:
        owner: what the page may do, and where browsers reach it.
        listener: a socket that listens already.
        key: of this user.
        on_start: gets the URL with the token, once requests are answered.

    Raises:
        UnfitError: if a different program answers on the port.
    """
    asyncio.run(_serve(owner, listener, key=key, on_start=on_start))


async def _serve(
    owner: OwnerSettings, listener: socket.socket, *, key: bytes, on_start: Callable[[str], None]
) -> None:
    token, access = secrets.token_urlsafe(32), owner.access
    folders = Folders(owner.roots)
    board = Board(folders_with_runs(folders), key=key, has_others=False)
    board.look()
    follower = Follower(board)
    actions = _actions(board, folders, owner)
    app = Starlette(
        routes=[*_routes(actions, token), *board_routes(board, follower, static=(STATIC, OWN_STATIC))]
    )
    gate = StudioGate(
        app,
        key=key,
        token=token,
        host=access.name,
        port=listener.getsockname()[1],
        is_secure=access.is_secure,
    )
    address = f"{access.address(listener)}/?token={token}"
    beside = [asyncio.create_task(_watch(actions.queue)), asyncio.create_task(actions.models.run())]
    try:
        await serve_pages(
            gate,
            listener,
            follower=follower,
            on_start=lambda: on_start(address),
            **access.server_settings(),
        )
    finally:
        for task in beside:
            task.cancel()
        actions.commands.close()
        actions.results.tasks.close()
        actions.models.close()


def _actions(board: Board, folders: Folders, owner: OwnerSettings) -> Actions:
    permissions = Permissions(folders, owner.trusts_code)
    audit = AuditLog(folders.first / "studio.log")
    return Actions(
        board,
        folders,
        owner,
        permissions,
        RunQueue(folders.first, folders.state),
        Commands(folders.first),
        Results(board, permissions, Tasks(folders.first), audit, owner.may_push),
        Models(),
        audit,
    )


async def _watch(queue: RunQueue) -> None:
    """Begins queued runs when their turn comes."""
    while True:
        queue.look()
        await asyncio.sleep(_QUEUE_S)


def _routes(actions: Actions, token: str) -> list[Route]:
    takes: dict[str, Action] = {
        "draft": actions.draft,
        "plan": actions.plan,
        "preview": actions.preview,
        "start": actions.start,
        "steer": actions.steer,
        "load": actions.load,
        "unload": actions.unload,
        "export": actions.results.export,
        "evaluate": actions.results.evaluate,
        "compare": actions.results.compare,
        "push": actions.results.push,
        "stop-task": actions.results.stop_task,
        "diagnose": actions.diagnose,
    }
    return [
        *_pages(),
        *_questions(actions, token),
        *(Route(f"/api/studio/{name}", _posted(action), methods=["POST"]) for name, action in takes.items()),
        Route(UPLOADS, _upload(actions), methods=["POST"]),
        Route("/api/studio/chat", _Chat(actions), methods=["POST"]),
        Route("/api/studio/downloads/{task}", _download(actions)),
    ]


def _pages() -> list[Route]:
    async def show_studio(request: Request) -> Response:
        return html_response(studio_html(language_of(request)))

    async def show_board(request: Request) -> Response:
        return html_response(page_html(language_of(request), home="/"))

    return [Route("/", show_studio), Route("/board", show_board)]


def _questions(actions: Actions, token: str) -> list[Route]:
    """What is only read. The token is for the page alone: other sites cannot read the answer."""

    async def session(request: Request) -> dict[str, Any]:
        roots = [str(root) for root in actions.folders.roots]
        owner = actions.owner
        return {
            "token": token,
            "roots": roots,
            "trusts_code": owner.trusts_code,
            "may_push": owner.may_push,
            "launchers": list(owner.launchers),
        }

    async def show_form(request: Request) -> dict[str, Any]:
        return form()

    async def runs(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(actions.rows)

    async def files(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(actions.folders.list, request.query_params.get("path", ""))

    async def offered(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(suggestions, actions.board, actions.folders)

    async def answers(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(actions.results.answers, request.query_params.get("group", ""))

    asked = {
        "session": session,
        "form": show_form,
        "runs": runs,
        "files": files,
        "suggestions": offered,
        "answers": answers,
    }
    return [Route(f"/api/studio/{name}", _answered(question)) for name, question in asked.items()]


def _answered(
    question: Callable[[Request], Awaitable[dict[str, Any]]],
) -> Callable[[Request], Awaitable[Response]]:
    """Refusals become problems in the answer, which the page shows."""

    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await question(request))
        except UnisonoError as error:
            return JSONResponse({"problems": shown_problems(error.problems)}, 400)
        except ClientDisconnect:
            return Response(status_code=499)
        except OSError as error:
            what = {"what": f"the file system refused it: {error.strerror or error}"}
            return JSONResponse({"problems": shown_problems([what])}, 400)

    return answer


def _posted(action: Action) -> Callable[[Request], Awaitable[Response]]:
    async def act(request: Request) -> dict[str, Any]:
        return await action(await read_body(request))

    return _answered(act)


def _upload(actions: Actions) -> Callable[[Request], Awaitable[Response]]:
    async def take(request: Request) -> dict[str, Any]:
        path = await actions.folders.take_upload(request.query_params.get("name", ""), request.stream())
        actions.audit.write("upload", path=str(path), bytes=path.stat().st_size)
        return {"path": actions.folders.shown(path)}

    return _answered(take)


def _download(actions: Actions) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        task = actions.results.tasks.tasks.get(request.path_params["task"])
        if task is None or task.out is None or task.state != "done":
            return PlainTextResponse("there is no such export", 404)
        actions.audit.write("download", path=str(task.out))
        if task.out.is_file():
            return FileResponse(task.out, filename=task.out.name)
        disposition = f'attachment; filename="{task.id}-{task.kind}.zip"'
        return StreamingResponse(
            zipped(task.out), media_type="application/zip", headers={"Content-Disposition": disposition}
        )

    return give


class _Chat:
    """Passes a request on to the model in `?model=`, in OpenAI's protocol."""

    def __init__(self, actions: Actions) -> None:
        self._models = actions.models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._models.loaded.get(Request(scope).query_params.get("model", ""))
        if model is None:
            await JSONResponse({"error": {"message": "the model is not loaded"}}, 404)(scope, receive, send)
            return
        await self._models.answer(model, scope, receive, send)

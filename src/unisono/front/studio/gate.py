"""Who may change something: requests of the page itself, with the token in a header."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from unisono.base.errors import UsageError
from unisono.front.board.server import Gate

UPLOADS = "/api/studio/uploads"
_BODY_BYTES = 24 << 20  # of a request as JSON: a conversation may have pictures


class StudioGate(Gate):
    """Refuses strangers as the board does, and of the others every change without the token.

    A cookie alone, which a browser sends by itself, changes nothing.
    """

    command = "unisono studio"

    def _is_known(self, request: Request) -> bool:
        return self._bears_token(request) or super()._is_known(request)

    def _bears_token(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())

    def _method_refusal(self, request: Request) -> Response | None:
        if request.method in ("GET", "HEAD"):
            return None
        if request.method != "POST":
            return PlainTextResponse("only GET, HEAD and POST", 405, {"Allow": "GET, HEAD, POST"})
        return self._stranger_refusal(request) or self._change_refusal(request)

    def _change_refusal(self, request: Request) -> Response | None:
        if not self._bears_token(request):
            return PlainTextResponse("a change needs the token in the header Authorization", 403)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("changes from other sites are refused", 403)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        takes = "application/octet-stream" if request.url.path == UPLOADS else "application/json"
        return None if kind == takes else PlainTextResponse(f"the body must be {takes}", 415)


async def read_body(request: Request) -> dict[str, Any]:
    """The object in the body of a request.

    Raises:
        UsageError: if it is too large, or not a JSON object.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _BODY_BYTES:
            raise UsageError.of(f"the request has more than {_BODY_BYTES >> 20} MiB", fix="send less")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError.of("the request is not a JSON object", fix="send an object")
    return value


def text_of(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    """A text in a request.

    Raises:
        UsageError: if it is missing or not a text.
    """
    value = body.get(name, default)
    if not isinstance(value, str):
        raise UsageError.of(f"{name} is not a text", fix=f"send {name} as a text")
    return value

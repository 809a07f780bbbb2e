"""Pictures that a request names by their address: fetched from hosts, and read from folders, that
the operator allows.
"""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from unisono.base.errors import UsageError
from unisono.base.files import open_plain
from unisono.base.named_hosts import DEADLINE_S, MOST_BYTES, PORTS, FetchError, NamedHosts, TooLargeError
from unisono.base.text import host_name, one_line
from unisono.front.serve.protocol import ApiError

MOST_PICTURES = 16
"""In one request."""
_HOSTS_FLAG = "--image-hosts"
_SHOWN = 80
_TOO_LARGE = f"the pictures of the request have more than {MOST_BYTES >> 20} MiB"
_NO_FILE = "there is no such file in the folders of --image-folders"


def picture_parts(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The parts of OpenAI's messages that are pictures, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


@dataclass(frozen=True)
class PictureAddresses:
    """What requests may name.

    Attributes:
        hosts: names or addresses of hosts, each alone, for the usual ports, or with `:PORT`.
        folders: real paths.
    """

    hosts: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, hosts: str | None, folders: str | None) -> "PictureAddresses":
        """Those of --image-hosts and --image-folders, lists with commas.

        Raises:
            UsageError: if one is not a host or a directory.
        """
        names = listed(hosts)
        odd = next((name for name in names if host_name(name) is None), None)
        if odd is not None:
            raise UsageError.of(
                f"{one_line(odd, limit=_SHOWN)!r} is not a host",
                where=_HOSTS_FLAG,
                fix="write names or addresses with commas between them, e.g. pictures.example.org,10.0.0.7:8080",
            )
        paths = [Path(name).expanduser() for name in listed(folders)]
        missing = next((path for path in paths if not path.is_dir()), None)
        if missing is not None:
            raise UsageError.of(
                f"{missing} is not a directory", where="--image-folders", fix="name directories that exist"
            )
        return cls(frozenset(name.lower() for name in names), tuple(path.resolve() for path in paths))

    async def fill(self, parts: Sequence[dict[str, Any]]) -> None:
        """Replaces addresses in the parts of a request's pictures by data URLs.

        Raises:
            ApiError: for the first one that is not allowed, or cannot be fetched.
        """
        room = MOST_BYTES
        try:
            async with asyncio.timeout(DEADLINE_S):
                for number, part in enumerate(parts, 1):
                    address = _address_in(part)
                    if address is None:
                        continue
                    try:
                        data = await self._fetch(address, room)
                    except FetchError as why:
                        raise _refusal(
                            f"picture {number} ({one_line(address, limit=_SHOWN)}): {why}"
                        ) from why
                    room -= len(data)
                    text = await asyncio.to_thread(base64.b64encode, data)
                    part["image_url"] = {
                        **part["image_url"],
                        "url": f"data:application/octet-stream;base64,{text.decode()}",
                    }
        except TimeoutError:
            raise _refusal(f"the pictures could not be fetched within {DEADLINE_S:g} s") from None

    async def _fetch(self, address: str, room: int) -> bytes:
        """The bytes of an address, at most `room`.

        Raises:
            FetchError: if it is not allowed, or cannot be fetched.
        """
        try:
            parts = urlsplit(address)
            if parts.scheme.lower() == "file":
                return await asyncio.to_thread(self._read, parts, room)
            if parts.scheme.lower() in PORTS:
                return await self._download(address, room)
        except ValueError as error:  # not a URL
            raise FetchError(one_line(str(error), limit=_SHOWN)) from error
        raise FetchError("send it as a data URL: data:image/png;base64,…")

    def _read(self, parts: SplitResult, room: int) -> bytes:
        if not self.folders:
            raise FetchError("file URLs are refused; --image-folders allows them, or send a data URL")
        if parts.netloc not in ("", "localhost"):
            raise FetchError("a file URL has no host")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self.folders):
                raise FetchError(_NO_FILE)
            with open_plain(path) as stream:
                data = stream.read(room + 1)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise FetchError(_NO_FILE) from error
        if len(data) > room:
            raise FetchError(_TOO_LARGE)
        return data

    async def _download(self, address: str, room: int) -> bytes:
        if not self.hosts:
            raise FetchError(
                f"http and https URLs are refused; {_HOSTS_FLAG} allows them, or send a data URL"
            )
        try:
            return await NamedHosts(self.hosts, _HOSTS_FLAG).fetch(address, most_bytes=room)
        except TooLargeError as error:
            raise FetchError(_TOO_LARGE) from error


def _address_in(part: dict[str, Any]) -> str | None:
    """The address in a part; None if it is a data URL, or none: the task refuses it then."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else None
    return url if isinstance(url, str) and url[:5].lower() != "data:" else None


def listed(text: str | None) -> list[str]:
    """The words of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param="messages", code="invalid_image_url")

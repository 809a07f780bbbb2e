"""Pictures that a request names by their address: fetched from hosts, and read from folders, that
the operator allows.
"""

import asyncio
import base64
import contextlib
import ipaddress
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import h11

from unisono.base.errors import UsageError
from unisono.base.files import open_plain
from unisono.base.text import one_line
from unisono.front.http_headers import host_name
from unisono.front.serve.protocol import ApiError

DEADLINE_S = 10.0
"""In which all pictures of a request must have been fetched."""
MOST_BYTES = 16 << 20
"""Of all these pictures together."""
MOST_PICTURES = 16
"""In one request."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = 3
_REDIRECTING = (301, 302, 303, 307, 308)
_SHOWN = 80
_NO_FILE = "there is no such file in the folders of --image-folders"


def picture_parts(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The parts of OpenAI's messages that are pictures, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


class _Unusable(Exception):  # noqa: N818 - named for what happened
    """Why a picture cannot be fetched."""


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
        names = _listed(hosts)
        odd = next((name for name in names if host_name(name) is None), None)
        if odd is not None:
            raise UsageError.of(
                f"{one_line(odd, limit=_SHOWN)!r} is not a host",
                where="--image-hosts",
                fix="write names or addresses with commas between them, e.g. pictures.example.org,10.0.0.7:8080",
            )
        paths = [Path(name).expanduser() for name in _listed(folders)]
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
                    except _Unusable as why:
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
            _Unusable: if it is not allowed, or cannot be fetched.
        """
        try:
            parts = urlsplit(address)
            if parts.scheme.lower() == "file":
                return await asyncio.to_thread(self._read, parts, room)
            if parts.scheme.lower() in _PORTS:
                return await self._download(address, room)
        except ValueError as error:  # not a URL
            raise _Unusable(one_line(str(error), limit=_SHOWN)) from error
        raise _Unusable("send it as a data URL: data:image/png;base64,…")

    def _read(self, parts: SplitResult, room: int) -> bytes:
        if not self.folders:
            raise _Unusable("file URLs are refused; --image-folders allows them, or send a data URL")
        if parts.netloc not in ("", "localhost"):
            raise _Unusable("a file URL has no host")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self.folders):
                raise _Unusable(_NO_FILE)
            with open_plain(path) as stream:
                data = stream.read(room + 1)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise _Unusable(_NO_FILE) from error
        return _bounded(data, room)

    async def _download(self, address: str, room: int) -> bytes:
        allowed = None
        for _ in range(_REDIRECTS + 1):
            parts = urlsplit(address)
            scheme, host = parts.scheme.lower(), parts.hostname or ""
            if scheme not in _PORTS:
                raise _Unusable(f"it redirects to a {one_line(scheme, limit=20)} URL")
            if allowed not in (None, host):
                raise _Unusable(f"it redirects to {one_line(host, limit=_SHOWN)}, another host")
            allowed = host
            port = parts.port or _PORTS[scheme]
            self._admit(parts, port)
            status, location, data = await self._get(parts, await self._resolve(host, port), port, room)
            if status == 200:
                return data
            if status not in _REDIRECTING or not location:
                raise _Unusable(f"{host} answers with status {status}")
            address = urljoin(address, location)
        raise _Unusable(f"it redirects more than {_REDIRECTS} times")

    def _admit(self, parts: SplitResult, port: int) -> None:
        if not self.hosts:
            raise _Unusable("http and https URLs are refused; --image-hosts allows them, or send a data URL")
        host, usual = parts.hostname or "", port in _PORTS.values()
        shown = f"[{host}]" if ":" in host else host
        if not (usual and shown in self.hosts) and f"{shown}:{port}" not in self.hosts:
            named = shown if usual else f"{shown}:{port}"
            raise _Unusable(f"{one_line(named, limit=_SHOWN)} is not among the hosts of --image-hosts")
        if parts.username is not None or parts.password is not None:
            raise _Unusable("an address with a user or a password is refused")

    async def _resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host.

        Raises:
            _Unusable: if it has none, or one that is not public and not named in --image-hosts.
        """
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)
        except (OSError, UnicodeError) as error:
            raise _Unusable(f"{host} has no address: {error}") from error
        addresses = [str(entry[4][0]) for entry in entries]
        inside = next((one for one in addresses if not self._is_open(one, port)), None)
        if inside is not None:
            raise _Unusable(f"{host} has the address {inside}, which is not public; name it in --image-hosts")
        return addresses

    def _is_open(self, address: str, port: int) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        shown = f"[{parsed}]" if parsed.version == 6 else str(parsed)
        is_public = parsed.is_global and not parsed.is_multicast
        return is_public or shown in self.hosts or f"{shown}:{port}" in self.hosts

    async def _get(
        self, parts: SplitResult, addresses: Sequence[str], port: int, room: int
    ) -> tuple[int, str, bytes]:
        """Status, Location and body of a URL, from one of the addresses of its host: the name is
        not looked up again.
        """
        context = ssl.create_default_context() if parts.scheme.lower() == "https" else None
        name = parts.hostname if context is not None else None
        why = ""
        for address in addresses:
            try:
                reader, writer = await asyncio.open_connection(
                    address, port, ssl=context, server_hostname=name
                )
                with contextlib.closing(writer):
                    return await _exchange(reader, writer, parts, room)
            except (OSError, h11.ProtocolError) as error:
                why = one_line(str(error), limit=_SHOWN)
        raise _Unusable(f"{parts.hostname} cannot be asked: {why}")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: SplitResult, room: int
) -> tuple[int, str, bytes]:
    connection = h11.Connection(h11.CLIENT)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [
        ("host", parts.netloc),
        ("accept", "image/*"),
        ("user-agent", "unisono"),
        ("connection", "close"),
    ]
    for event in (h11.Request(method="GET", target=target, headers=headers), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    status, location, body = 0, "", bytearray()
    while True:
        received = connection.next_event()
        if received is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(received, h11.Response):
            status = received.status_code
            location = next(
                (value.decode("latin-1") for key, value in received.headers if key == b"location"), ""
            )
            if status != 200:
                return status, location, b""
        elif isinstance(received, h11.Data):
            body += received.data
            _bounded(body, room)
        elif isinstance(received, h11.EndOfMessage):
            return status, location, bytes(body)
        elif not isinstance(received, h11.InformationalResponse):
            raise _Unusable("its host ends the connection")


def _bounded(data: Any, room: int) -> Any:
    if len(data) > room:
        raise _Unusable(f"the pictures of the request have more than {MOST_BYTES >> 20} MiB")
    return data


def _address_in(part: dict[str, Any]) -> str | None:
    """The address in a part; None if it is a data URL, or none: the task refuses it then."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else None
    return url if isinstance(url, str) and url[:5].lower() != "data:" else None


def _listed(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param="messages", code="invalid_image_url")

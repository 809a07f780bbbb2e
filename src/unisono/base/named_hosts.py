"""Fetches files over HTTP, only from hosts that the user has listed. Needs h11."""

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from unisono.base.text import one_line

DEADLINE_S = 10.0
"""For a picture, or for all of a request."""
MOST_BYTES = 16 << 20
"""Likewise."""
PORTS = {"http": 80, "https": 443}
"""The usual port of each scheme that is fetched."""
_REDIRECTS = 3
_REDIRECTING = (301, 302, 303, 307, 308)
_SHOWN = 80


class FetchError(Exception):
    """A file cannot be fetched; the text is the reason."""


class TooLargeError(FetchError):
    """A file has more bytes than it may have."""


@dataclass(frozen=True)
class NamedHosts:
    """Hosts that files may be fetched from.

    Attributes:
        names: names or addresses of hosts in lower case, each alone, for the usual ports, or with
            `:PORT`.
        key: the flag or config key that names them, for messages.
        redirects_between: whether one of them may redirect to another one.
    """

    names: frozenset[str]
    key: str
    redirects_between: bool = False

    async def fetch(self, address: str, *, most_bytes: int) -> bytes:
        """The bytes of a URL.

        The addresses of a host are looked up once for each request, and must be public or named,
        too, so that a name cannot lead into the network of this machine.

        Raises:
            FetchError: if its host is not named, or it cannot be fetched.
            ValueError: if it is not a URL.
        """
        former = None
        for _ in range(_REDIRECTS + 1):
            parts = urlsplit(address)
            scheme, host = parts.scheme.lower(), parts.hostname or ""
            if scheme not in PORTS:
                raise FetchError(f"it redirects to a {one_line(scheme, limit=20)} URL")
            if former not in (None, host) and not self.redirects_between:
                raise FetchError(f"it redirects to {one_line(host, limit=_SHOWN)}, another host")
            former = host
            port = self.admit(parts)
            addresses = await self._resolve(host, port)
            status, location, data = await _get(parts, addresses, port, most_bytes)
            if status == 200:
                return data
            if status not in _REDIRECTING or not location:
                raise FetchError(f"{host} answers with status {status}")
            address = urljoin(address, location)
        raise FetchError(f"it redirects more than {_REDIRECTS} times")

    def admit(self, parts: SplitResult) -> int:
        """The port of a URL.

        Raises:
            FetchError: if its host is not named, or it has a user or a password.
            ValueError: if its port is not a number.
        """
        port = parts.port or PORTS[parts.scheme.lower()]
        host, is_usual = parts.hostname or "", port in PORTS.values()
        shown = f"[{host}]" if ":" in host else host
        if not (is_usual and shown in self.names) and f"{shown}:{port}" not in self.names:
            named = shown if is_usual else f"{shown}:{port}"
            raise FetchError(f"{one_line(named, limit=_SHOWN)} is not among the hosts of {self.key}")
        if parts.username is not None or parts.password is not None:
            raise FetchError("an address with a user or a password is refused")
        return port

    async def _resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host.

        Raises:
            FetchError: if it has none, or one that is neither public nor named.
        """
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, proto=6)
        except (OSError, UnicodeError) as error:
            raise FetchError(f"{host} has no address: {error}") from error
        addresses = [str(entry[4][0]) for entry in entries]
        inside = next((one for one in addresses if not self._is_open(one, port)), None)
        if inside is not None:
            raise FetchError(f"{host} has the address {inside}, which is not public; name it in {self.key}")
        return addresses

    def _is_open(self, address: str, port: int) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        shown = f"[{parsed}]" if parsed.version == 6 else str(parsed)
        is_public = parsed.is_global and not parsed.is_multicast
        return is_public or shown in self.names or f"{shown}:{port}" in self.names


async def _get(
    parts: SplitResult, addresses: Sequence[str], port: int, most_bytes: int
) -> tuple[int, str, bytes]:
    """Status, Location and body of a URL, from one of the addresses of its host: the name is not
    looked up again.
    """
    import h11

    context = ssl.create_default_context() if parts.scheme.lower() == "https" else None
    name = parts.hostname if context is not None else None
    why = ""
    for address in addresses:
        try:
            reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
            with contextlib.closing(writer):
                return await _exchange(reader, writer, parts, most_bytes)
        except (OSError, h11.ProtocolError) as error:
            why = one_line(str(error), limit=_SHOWN)
    raise FetchError(f"{parts.hostname} cannot be reached: {why}")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: SplitResult, most_bytes: int
) -> tuple[int, str, bytes]:
    import h11

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
            if len(body) > most_bytes:
                raise TooLargeError(f"it has more than {most_bytes >> 20} MiB")
        elif isinstance(received, h11.EndOfMessage):
            return status, location, bytes(body)
        elif not isinstance(received, h11.InformationalResponse):
            raise FetchError("its host ends the connection")

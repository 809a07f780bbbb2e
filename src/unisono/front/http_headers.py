"""Names of hosts in the Host and Origin headers of requests."""

import re
from urllib.parse import urlsplit

_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9._-]{1,253})|\[(?P<v6>[0-9A-Fa-f:.]{2,45})\])(?::\d{1,5})?", re.ASCII
)


def host_name(header: str | None) -> str | None:
    """The name or address in a Host header, in lower case and without its port (RFC 9110, 7.2).

    None if the header is missing or not valid.
    """
    match = _HOST.fullmatch(header or "")
    return (match["name"] or match["v6"]).lower() if match else None


def origin_host(header: str) -> str | None:
    """The Host header that a request from this Origin would have to its own server (RFC 6454).

    `null` for other schemes; None if it is not valid.
    """
    if header == "null":
        return header
    try:
        parts = urlsplit(header)
    except ValueError:
        return None
    if not host_name(parts.netloc) or header != f"{parts.scheme}://{parts.netloc}":
        return None
    return parts.netloc if parts.scheme in ("http", "https") else "null"

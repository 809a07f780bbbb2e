"""Names of hosts, also in the Origin headers of requests."""

from urllib.parse import urlsplit

from unisono.base.text import host_name

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that no other reaches."""


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

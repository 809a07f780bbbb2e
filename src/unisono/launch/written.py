"""Numbers, ports and hosts as a person or a launcher has written them; each is refused with the place it came from."""

import re

from unisono.errors import UsageError
from unisono.text import one_line

DEFAULT_PORT = 29577
HOST_PATTERN = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*")
"""What a host name from a person or a peer may look like (DESIGN B8); it never begins with `-`."""


def parse_head(text: str, source: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, [IPv6]:PORT or a bare IPv6 address.

    Raises:
        UsageError: if it is none of these.
    """
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d+))?", text)
    if bracketed:
        return bracketed[1], port(bracketed[2], source) if bracketed[2] else DEFAULT_PORT
    host, colon, number = text.rpartition(":")
    if not colon or ":" in host:  # no port, or an IPv6 address without brackets
        return checked_host(text, source), DEFAULT_PORT
    return checked_host(host, source), port(number, source)


def parse_hosts(text: str | None) -> tuple[str, ...]:
    """The hosts of `--hosts a,b,c`; none where it was not given.

    Raises:
        UsageError: if a place is empty.
    """
    words = () if text is None else tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageError.of(
            f"--hosts {text!r} has an empty place", where="command line", fix="as in --hosts a,b,c"
        )
    return words


def checked_host(text: str, source: str) -> str:
    """`text`, if it can be a host name or an address.

    Raises:
        UsageError: if it cannot; a name that begins with `-` would be an option to ssh.
    """
    host = text.strip()
    if HOST_PATTERN.fullmatch(host) and len(host) <= 253:
        return host
    raise UsageError.of(
        f"{source}: {one_line(text, limit=80)!r} is no host name", where="environment" if source.isupper() else "command line",
        why="a host is letters, digits and . _ - : @, and does not begin with -", fix=f"{source} a-host.example or 10.0.0.1",
    )  # fmt: skip


def positive(text: str, source: str) -> int:
    """A whole number of at least 1.

    Raises:
        UsageError: if it is none.
    """
    number = whole(text, source)
    if number < 1:
        raise UsageError.of(
            f"{source} is {number}: it must be at least 1", where=source, fix=f"set {source} to 1 or more"
        )
    return number


def port(text: str, source: str) -> int:
    """A TCP port.

    Raises:
        UsageError: if it is none.
    """
    number = whole(text, source)
    if not 1 <= number <= 65_535:
        raise UsageError.of(
            f"{source}: {number} is no port", where=source, fix=f"a port from 1024 to 65535; {DEFAULT_PORT} where none is given",
        )  # fmt: skip
    return number


def whole(text: str, source: str) -> int:
    """A whole number from 0.

    Raises:
        UsageError: if it is none.
    """
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) <= 9:
        return int(stripped)
    raise UsageError.of(
        f"{source}: {one_line(text, limit=80)!r} is no whole number", where=source, fix=f"set {source} to a whole number, or leave it out",
    )  # fmt: skip

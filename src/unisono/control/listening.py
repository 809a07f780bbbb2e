"""The head's port: bound to the one address that was chosen, or refused in words."""

import errno
import resource
import socket
from typing import Any

from unisono.causes import Evidence, Verdict
from unisono.control.trouble import disagreed
from unisono.errors import UnfitError, UsageError
from unisono.facts.tcp import find_listener
from unisono.text import one_line

_OTHER_FILES = 100
_SEGMENT_BYTES = 1_160  # with headers below the smallest MTU that IPv6 allows, 1280
_ANY = ("", "0.0.0.0", "::", "*")  # noqa: S104 - the addresses that are refused


def bind(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on `host` alone. Port 0: the system chooses one.

    Raises:
        UsageError: if `host` means all addresses, or the port may not be had.
        Disagreed: if the port is taken, the name has no address, or the address is another machine's.
    """
    if host in _ANY:
        raise UsageError.of(
            f"the head may not listen on `{host}`: that is every network of this machine",
            fix="give the address on which the other nodes reach this one: --head HOST:PORT",
        )
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is nobody's
        # Accepted connections have it from here, and callers are told: where large packets are lost, reports still come
        # through, so that the dial matrix can name it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _cannot_bind(error, host, port) from error
    return sock


def allow_open_files(nodes: int) -> None:
    """Sees to it that this process may have a connection to every node.

    Raises:
        UnfitError: if the system's hard limit is too low for that.
    """
    needed = nodes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        summary = f"a head of {nodes} nodes needs {needed} open files, and this process may have {hard}"
        fix = f"`ulimit -n {max(65536, needed)}` before the start, or LimitNOFILE= in the service"
        evidence = (Evidence(where="RLIMIT_NOFILE", text=f"soft {soft}, hard {hard}"),)
        verdict = Verdict(cause="ulimit", when="before", summary=summary, evidence=evidence, fix=(fix,))
        raise UnfitError.of(summary, where="RLIMIT_NOFILE", fix=fix, verdict=verdict)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = one_line(str(getattr(error, "strerror", "") or error))
        raise disagreed(
            "dns_failure", f"the head does not know its own name `{host}`: {why}", where=host,
            fix=("give the IP address of the interface that the other nodes reach: --head IP:PORT",),
        ) from error  # fmt: skip
    return found[0][0], found[0][4]


def _cannot_bind(error: OSError, host: str, port: int) -> Exception:
    address = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return _taken(host, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return disagreed(
            "head_unreachable", f"the head cannot listen on {address}: no interface of this machine has this address",
            where=address,
            fix=("start node 0 on the machine that has this address, or give --head an address of this one: `ip -br addr`",),
        )  # fmt: skip
    why = one_line(error.strerror or str(error)).lower()
    return UsageError.of(
        f"the head cannot listen on {address}: {why}", fix="give a port above 1023: --head HOST:PORT"
    )


def _taken(host: str, port: int) -> Exception:
    listener = find_listener(port)
    if listener is None:
        owner, fix = "somebody who cannot be seen from here", f"`sudo ss -ltnp 'sport = :{port}'` shows who"
    else:
        owner = f"process {listener.pid} ({one_line(listener.command, limit=120) or '?'})"
        fix = f"if it is left over from an earlier start, end it: kill {listener.pid}"
    return disagreed(
        "port_in_use", f"the head cannot have port {port} on {host}: {owner} listens there", where=f"{host}:{port}",
        why=owner, fix=(fix, "or start all nodes with another port: --head HOST:PORT"),
    )  # fmt: skip

"""How a node connects to the head: repeated attempts, the handshake from the node's side, and the errors of both."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.causes import Evidence, Verdict, find_cause
from unisono.control.connection import without_delay
from unisono.control.protocol import (
    ANSWERS,
    CALLS,
    PROTOCOL,
    TO_HEAD,
    UNPROVEN_BYTES,
    Body,
    DifferentVersion,
    ForeignProtocol,
    Forged,
    FrameParser,
    Greeting,
    Hello,
    Malformed,
    Seal,
    encode,
    fresh_nonce,
    greeting_seal,
    hello_seal,
    preamble,
    session_seal,
)
from unisono.errors import Disagreed
from unisono.text import one_line

ANSWER_S = 3.0
"""How long an attempt waits for a connection, and for each answer."""
_PAUSE_S = (0.2, 0.5)
_STRANGE_ANSWERS = 2
"""So many strange answers in a row are believed."""
_STRANGE_SILENCES = 3
"""The same for saying nothing: a head that is short of breath does that, too."""
_UNKNOWN_HOST_S = 5.0
"""A name that the resolver does not know is asked for again so long: in some clusters names come with their nodes."""
_WELCOME_BYTES = 64 << 10
_CLOCK_EXCHANGES = 5
_CLOCK_S = 2.0
_PIECE_BYTES = 1 << 16


@dataclass
class DialedConnection:
    """A connection on which both sides have proven themselves. `early`: frames that came while the clocks were compared."""

    sock: socket.socket
    parser: FrameParser
    seal: Seal
    welcome: dict[str, Any]
    clock_offset_s: float | None = None
    early: list[Body] = field(default_factory=list)


@dataclass(frozen=True)
class DialRequest:
    """Who calls, and whom."""

    host: str
    port: int
    token: bytes
    node_rank: int
    node_host: str
    nodes: int = 0
    run: str = ""
    epoch: int | None = None
    call: str = field(default_factory=fresh_nonce)

    @property
    def me(self) -> str:
        """This node, for people."""
        return node_name(self.node_rank, self.node_host)

    @property
    def address(self) -> str:
        """The head's, for people."""
        return f"{self.host}:{self.port}"


class _NoAnswer(Exception):  # noqa: N818 - named for what happened
    """This attempt has failed; another may not.

    Attributes:
        believed_after: so many in a row are believed, since something is there that does not answer as the head does;
            0: no number of them is.
        lasting: soon no further attempt is of use.
    """

    def __init__(self, why: str, *, believed_after: int = 0, lasting: bool = False) -> None:
        super().__init__(why)
        self.believed_after = believed_after
        self.lasting = lasting


class _NoAddress(_NoAnswer):
    """The name has no address. `lasting`: the resolver is sure of it."""


def dial_head(
    caller: DialRequest, *, timeout_s: float, on_wait: Callable[[str, float], None] | None
) -> DialedConnection:
    """Calls until the head answers, `timeout_s` is over, or it is certain that waiting is of no use.

    Raises:
        Disagreed: with a verdict; see NodeLink.connect.
    """
    began = time.monotonic()
    strange = 0
    while True:
        try:
            return _dial_once(caller, began + timeout_s)
        except _NoAnswer as error:
            waited_s = time.monotonic() - began
            strange = strange + 1 if error.believed_after else 0
            if strange and strange >= error.believed_after:
                raise foreign_program_error(caller.me, caller.address, str(error)) from error
            if waited_s >= timeout_s or (error.lasting and waited_s > _UNKNOWN_HOST_S):
                raise _timeout_error(caller, error, waited_s) from error
            if on_wait is not None:
                on_wait(f"the head at {caller.address}: {error}", waited_s)
        left_s = began + timeout_s - time.monotonic()
        time.sleep(max(0.0, min(random.uniform(*_PAUSE_S), left_s)))  # noqa: S311 - so that nodes do not call in step


def _timeout_error(caller: DialRequest, error: _NoAnswer, waited_s: float) -> Exception:
    if isinstance(error, _NoAddress):
        return unknown_host_error(caller.me, caller.host, str(error), waited_s)
    return unreachable_error(caller.me, caller.address, str(error), waited_s)


def _dial_once(caller: DialRequest, deadline: float) -> DialedConnection:
    """One connection, one handshake. Raises _NoAnswer where another attempt may help, Disagreed where none does."""
    sock = _connect(caller, deadline)
    try:
        without_delay(sock)
        called = _shake_hands(caller, sock)
        _compare_clocks(called)
    except (OSError, Malformed) as error:
        sock.close()
        raise _NoAnswer(f"the connection broke ({_error_text(error)})") from error
    except BaseException:  # also for Ctrl-C: the head must not wait for us; raised again
        sock.close()
        raise
    return called


def _connect(caller: DialRequest, deadline: float) -> socket.socket:
    problem: OSError | None = None
    for family, address in _addresses(caller, deadline):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.05, min(ANSWER_S, deadline - time.monotonic())))
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            problem = error
            continue
        if sock.getsockname() != sock.getpeername():
            return sock
        sock.close()  # on its own machine a caller can, rarely, connect to itself
        problem = ConnectionRefusedError("nobody listens there")
    assert problem is not None
    raise _NoAnswer(_error_text(problem)) from problem


def _addresses(caller: DialRequest, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """What the head's name resolves to. Resolvers can hang for long, so the asking is left to a thread."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(caller.host, caller.port, type=socket.SOCK_STREAM))
        except (socket.gaierror, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="unisono.resolve", daemon=True)
    thread.start()
    thread.join(max(0.1, min(2 * ANSWER_S, deadline - time.monotonic())))
    if not answer:
        raise _NoAddress("the resolver does not answer", lasting=False)
    if isinstance(answer[0], Exception):
        again = isinstance(answer[0], socket.gaierror) and answer[0].errno == socket.EAI_AGAIN
        raise _NoAddress(_error_text(answer[0]), lasting=not again) from answer[0]
    return [(found[0], found[4]) for found in answer[0]]


def _shake_hands(caller: DialRequest, sock: socket.socket) -> DialedConnection:
    """The handshake, seen from the node."""
    sock.sendall(preamble(CALLS))
    parser = FrameParser(ANSWERS, limit=UNPROVEN_BYTES)
    try:
        greeting = Greeting.from_body(greeting_seal(sends=TO_HEAD).open(_frame(sock, parser)))
    except ForeignProtocol as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error
    except DifferentVersion as error:
        raise version_error(caller.me, caller.address, error.version) from error
    except Malformed as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error
    hello = Hello(
        nonce=fresh_nonce(),
        call=caller.call,
        node_rank=caller.node_rank,
        nodes=caller.nodes,
        host=caller.node_host,
        pid=os.getpid(),
        run=caller.run or greeting.run,
        epoch=greeting.epoch if caller.epoch is None else caller.epoch,
    )
    sock.sendall(hello_seal(caller.token, greeting, sends=TO_HEAD).close(encode(hello.to_body())))
    parser.limit = _WELCOME_BYTES
    seal = session_seal(caller.token, greeting, hello, sends=TO_HEAD)
    return DialedConnection(sock, parser, seal, _welcome(caller, _answer(caller, sock, parser, seal)))


def _answer(caller: DialRequest, sock: socket.socket, parser: FrameParser, seal: Seal) -> Body:
    try:
        return seal.open(_frame(sock, parser))
    except Forged as error:
        raise token_error(caller.me, caller.node_host, caller.address) from error
    except Malformed as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error


def _welcome(caller: DialRequest, body: Body) -> dict[str, Any]:
    match body:
        case {
            "t": "welcome",
            "run_nonce": str(),
            "epoch": int(),
            "wall": float(),
            "welcome": dict() as welcome,
        }:
            return {**welcome, **{key: body[key] for key in ("run_nonce", "epoch", "wall")}}
        case {"t": "refused", "kind": str() as kind, "text": str() as text}:
            raise refusal_error(caller.me, caller.node_host, caller.address, kind=kind, text=text)
        case _:
            raise _NoAnswer("sends no welcome", believed_after=_STRANGE_ANSWERS)


def _compare_clocks(called: DialedConnection) -> None:
    """Our wall clock minus the head's, by the quickest of a few exchanges. What else comes meanwhile is kept."""
    called.parser.limit = 8 << 20
    until = time.monotonic() + _CLOCK_S
    quickest_s = float("inf")
    with contextlib.suppress(_NoAnswer):  # the link finds out by itself that the head is gone
        for _ in range(_CLOCK_EXCHANGES):
            sent, sent_wall = time.monotonic(), time.time()
            called.sock.sendall(called.seal.close(encode({"t": "clock"})))
            while (body := called.seal.open(_frame(called.sock, called.parser, until)))["t"] != "clock":
                called.early.append(body)
            took_s = time.monotonic() - sent
            if took_s < quickest_s and isinstance(body.get("wall"), float):
                quickest_s, called.clock_offset_s = took_s, sent_wall + took_s / 2 - body["wall"]


def _frame(sock: socket.socket, parser: FrameParser, until: float | None = None) -> tuple[bytes, bytes]:
    """The next frame, waited for ANSWER_S or `until`."""
    until = time.monotonic() + ANSWER_S if until is None else until
    while (frame := parser.take()) is None:
        sock.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = sock.recv(_PIECE_BYTES)
        except TimeoutError as error:
            if parser.began:
                raise _NoAnswer("stopped answering") from error
            silent = f"accepts the call and says nothing for {ANSWER_S:.0f} s"
            raise _NoAnswer(silent, believed_after=_STRANGE_SILENCES) from error
        if not data:
            raise _NoAnswer("hung up" if parser.began else "accepts the call and hangs up")
        parser.feed(data)
    return frame


def _error_text(error: Exception) -> str:
    """What the system said, in the words of people who look for a firewall."""
    match error:
        case ConnectionRefusedError():
            return "nobody listens there (connection refused)"
        case TimeoutError():
            return f"no answer in {ANSWER_S:.0f} s (timed out)"
        case OSError():
            return one_line(error.strerror or str(error))
        case _:
            return one_line(str(error))


def node_name(node_rank: int, host: str) -> str:
    """How a node is written: `node_name 1 (b)`."""
    return f"node {node_rank} ({one_line(host, limit=255)})"


def disagreement(
    cause: str,
    summary: str,
    *,
    where: str = "",
    why: str = "",
    fix: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
) -> Disagreed:
    """An error and its verdict in one.

    Args:
        cause: its id in the catalogue.
        summary: what is wrong, one line, with the values seen.
        where: at which address.
        why: what was observed.
        fix: what to do; the catalogue's remedy where it is empty.
        hosts: culprits.
    """
    entry = find_cause(cause)
    assert entry is not None, cause
    fix = fix or entry.remedy
    evidence = (Evidence(where=one_line(where), text=one_line(why)),) if why else ()
    verdict = Verdict(
        cause=cause,
        when="before",
        summary=summary,
        hosts=hosts,
        phase="agree.call",
        evidence=evidence,
        fix=fix,
    )
    return Disagreed.of(one_line(summary), where=where, why=why, fix=fix[0], verdict=verdict)


def unreachable_error(me: str, address: str, why: str, waited_s: float) -> Disagreed:
    """The head does not answer."""
    host, _, port = address.rpartition(":")
    return disagreement(
        "head_unreachable",
        f"{me} cannot reach the head at {address}: {why}",
        where=address,
        why=f"tried for {waited_s:.0f} s",
        fix=(
            f"see whether node 0 runs and listens there; from this node: nc -vz {host} {port}",
            "refused: start the head first; no answer: open the firewall, or give an address that both nodes share",
        ),
    )


def unknown_host_error(me: str, host: str, why: str, waited_s: float) -> Disagreed:
    """The head's name has no address here."""
    return disagreement(
        "dns_failure",
        f"{me} does not know the head's name `{host}`: {why}",
        where=host,
        why=f"asked the resolver for {waited_s:.0f} s",
        fix=(
            f"give an IP address: --head IP:PORT; `getent hosts {host}` must answer on this node",
            "or add the name to DNS or /etc/hosts of every node",
        ),
    )


def foreign_program_error(me: str, address: str, why: str) -> Disagreed:
    """Something answers at the head's address, and it is not the head."""
    port = address.rpartition(":")[2]
    return disagreement(
        "port_in_use",
        f"{me} called the head at {address}, and what answers there {why}",
        where=address,
        why=why,
        fix=(
            f"on the head's machine: `ss -ltnp 'sport = :{port}'` shows who has the port",
            "start all nodes with another port: --head HOST:PORT",
        ),
    )


def version_error(me: str, address: str, version: int) -> Disagreed:
    """The head is of another release."""
    return disagreement(
        "version_mismatch",
        f"the head at {address} speaks version {version} of the control protocol, {me} speaks {PROTOCOL}",
        where=address,
        fix=("install the same version of unisono on all nodes",),
    )


def token_error(me: str, host: str, address: str) -> Disagreed:
    """The proofs do not fit."""
    return disagreement(
        "token_rejected",
        f"{me} and the head at {address} do not have the same token",
        where=address,
        hosts=(host,),
        fix=(
            "give the same token to all nodes: --token-file FILE, or UNISONO_TOKEN",
            "if it is the same: an earlier start of the job still listens there; end it",
        ),
    )


_CAUSE_OF = {
    "duplicate": "node_duplicate",
    "stale": "stale_process",
    "misfit": "world_mismatch",
    "left_out": "node_missing",
}
_FIX_OF = {
    "duplicate": (
        "give each node its own rank: --node-rank 0, 1, 2 …",
        "if the holder is left over, end it by its pid",
    ),
    "stale": ("end this process and start the command again",),
    "left_out": (
        "when the job has ended, start it again on all nodes: it goes on from its newest checkpoint",
    ),
    "misfit": ("give the same --nodes to all nodes, and each its own --node-rank from 0",),
}


def refusal_error(me: str, host: str, address: str, *, kind: str, text: str) -> Disagreed:
    """The head knows the token and says no. `text` goes on from the node's name."""
    summary = f"{me} {one_line(text, limit=400)}"
    cause = _CAUSE_OF.get(kind, "head_unreachable")
    return disagreement(
        cause,
        summary,
        where=address,
        why=f"the head refused: {kind}",
        fix=_FIX_OF.get(kind, ()),
        hosts=(host,),
    )

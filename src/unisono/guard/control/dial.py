"""How a node connects to the head: repeated attempts, the handshake from the node's side, and the
errors of both.
"""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed
from unisono.base.text import one_line
from unisono.guard.control.connection import without_delay
from unisono.guard.control.protocol import (
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

ANSWER_S = 3.0
"""Time limit of an attempt for the connection, and for each answer."""
_PAUSE_S = (0.2, 0.5)
_STRANGE_ANSWERS = 2
"""Number of consecutive invalid answers that end the attempts."""
_STRANGE_SILENCES = 3
"""Number of consecutive silences that end them; an overloaded head is silent, too."""
_UNKNOWN_HOST_S = 5.0
"""Time for which an unknown host name is looked up again: in some clusters names appear with their
nodes.
"""
_WELCOME_BYTES = 64 << 10
_CLOCK_EXCHANGES = 5
_CLOCK_S = 2.0
_PIECE_BYTES = 1 << 16


@dataclass
class DialedConnection:
    """An authenticated connection. `early`: frames that arrived while clocks were compared."""

    sock: socket.socket
    parser: FrameParser
    seal: Seal
    welcome: dict[str, object]
    clock_offset_s: float | None = None
    early: list[Body] = field(default_factory=list)


@dataclass(frozen=True)
class DialRequest:
    """A node's request to join, and the head's address."""

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
        """This node, for messages."""
        return node_name(self.node_rank, self.node_host)

    @property
    def address(self) -> str:
        """The head's address, for messages."""
        return f"{self.host}:{self.port}"


class _NoAnswer(Exception):  # noqa: N818 - named for what happened
    """This attempt failed; a further one may succeed.

    Attributes:
        believed_after: number of consecutive failures after which they are final, since a different
            program responds; 0: never.
        lasting: further attempts are of no use.
    """

    def __init__(self, why: str, *, believed_after: int = 0, lasting: bool = False) -> None:
        super().__init__(why)
        self.believed_after = believed_after
        self.lasting = lasting


class _NoAddress(_NoAnswer):
    """The name has no address. `lasting`: by a definite answer of the resolver."""


def dial_head(
    caller: DialRequest, *, timeout_s: float, on_wait: Callable[[str, float], None] | None
) -> DialedConnection:
    """Connects to the head; retries until it responds, `timeout_s` is over, or waiting is of no
    use.

    Raises:
        Disagreed: with a verdict; see NodeLink.connect.
    """
    began = time.monotonic()
    foreign = 0
    while True:
        try:
            return _dial_once(caller, began + timeout_s)
        except _NoAnswer as error:
            waited_s = time.monotonic() - began
            foreign = foreign + 1 if error.believed_after else 0
            if foreign and foreign >= error.believed_after:
                raise foreign_program_error(caller.me, caller.address, str(error)) from error
            if waited_s >= timeout_s or (error.lasting and waited_s > _UNKNOWN_HOST_S):
                raise _timeout_error(caller, error, waited_s) from error
            if on_wait is not None:
                on_wait(f"the head at {caller.address}: {error}", waited_s)
        left_s = began + timeout_s - time.monotonic()
        # The pause is random, so that nodes do not call in step.
        time.sleep(max(0.0, min(random.uniform(*_PAUSE_S), left_s)))  # noqa: S311


def _timeout_error(caller: DialRequest, error: _NoAnswer, waited_s: float) -> Exception:
    if isinstance(error, _NoAddress):
        return unknown_host_error(caller.me, caller.host, str(error), waited_s)
    return unreachable_error(caller.me, caller.address, str(error), waited_s)


def _dial_once(caller: DialRequest, deadline: float) -> DialedConnection:
    """One connection and handshake.

    Raises _NoAnswer if a further attempt may help, else Disagreed.
    """
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
        problem = ConnectionRefusedError("nothing listens there")
    assert problem is not None
    raise _NoAnswer(_error_text(problem)) from problem


def _addresses(caller: DialRequest, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Addresses of the head's name. Looked up in a thread, since resolvers can hang."""
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
        raise _NoAddress("the resolver does not respond", lasting=False)
    if isinstance(answer[0], Exception):
        again = isinstance(answer[0], socket.gaierror) and answer[0].errno == socket.EAI_AGAIN
        raise _NoAddress(_error_text(answer[0]), lasting=not again) from answer[0]
    return [(entry[0], entry[4]) for entry in answer[0]]


def _shake_hands(caller: DialRequest, sock: socket.socket) -> DialedConnection:
    """The node's side of the handshake."""
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


def _welcome(caller: DialRequest, body: Body) -> dict[str, object]:
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
    """Measures this node's wall clock minus the head's, by the fastest of a few exchanges.

    Other frames are kept.
    """
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
            if took_s < quickest_s and isinstance(wall := body.get("wall"), float):
                quickest_s, called.clock_offset_s = took_s, sent_wall + took_s / 2 - wall


def _frame(sock: socket.socket, parser: FrameParser, until: float | None = None) -> tuple[bytes, bytes]:
    """The next frame, within ANSWER_S or until `until`."""
    until = time.monotonic() + ANSWER_S if until is None else until
    while (frame := parser.take()) is None:
        sock.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = sock.recv(_PIECE_BYTES)
        except TimeoutError as error:
            if parser.began:
                raise _NoAnswer("stopped responding") from error
            silent = f"accepts the connection but sends nothing for {ANSWER_S:.0f} s"
            raise _NoAnswer(silent, believed_after=_STRANGE_SILENCES) from error
        if not data:
            raise _NoAnswer("disconnected" if parser.began else "accepts the connection and closes it")
        parser.feed(data)
    return frame


def _error_text(error: Exception) -> str:
    """The system's error in words that help to find a firewall."""
    match error:
        case ConnectionRefusedError():
            return "connection refused: nothing listens there"
        case TimeoutError():
            return f"timed out: no answer within {ANSWER_S:.0f} s"
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
    """An error with its verdict.

    Args:
        summary: the problem in one line, with the observed values.
        fix: what to do; empty: the cause's fix.
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
    """The head does not respond."""
    host, _, port = address.rpartition(":")
    return disagreement(
        "head_unreachable",
        f"{me} cannot reach the head at {address}: {why}",
        where=address,
        why=f"tried for {waited_s:.0f} s",
        fix=(
            f"check that node 0 runs and listens there; from this node: nc -vz {host} {port}",
            "refused: start the head first; no answer: open the firewall, or pass an address that both nodes can reach",
        ),
    )


def unknown_host_error(me: str, host: str, why: str, waited_s: float) -> Disagreed:
    """The head's name has no address on this node."""
    return disagreement(
        "dns_failure",
        f"{me} cannot resolve the head's name `{host}`: {why}",
        where=host,
        why=f"looked up for {waited_s:.0f} s",
        fix=(
            f"pass an IP address: --head IP:PORT; `getent hosts {host}` must answer on this node",
            "or add the name to DNS or /etc/hosts of every node",
        ),
    )


def foreign_program_error(me: str, address: str, why: str) -> Disagreed:
    """A different program responds at the head's address."""
    port = address.rpartition(":")[2]
    return disagreement(
        "port_in_use",
        f"{me} connected to the head at {address}, but the program there {why}",
        where=address,
        why=why,
        fix=(
            f"on the head's machine `ss -ltnp 'sport = :{port}'` shows the program",
            "start all nodes with a different port: --head HOST:PORT",
        ),
    )


def version_error(me: str, address: str, version: int) -> Disagreed:
    """The head has a different protocol version."""
    return disagreement(
        "version_mismatch",
        f"the head at {address} speaks version {version} of the control protocol, {me} speaks {PROTOCOL}",
        where=address,
        fix=("install the same version of unisono on all nodes",),
    )


def token_error(me: str, host: str, address: str) -> Disagreed:
    """The tokens of node and head differ."""
    return disagreement(
        "token_rejected",
        f"{me} and the head at {address} do not have the same token",
        where=address,
        hosts=(host,),
        fix=(
            "pass the same token on all nodes: --token-file FILE, or UNISONO_TOKEN",
            "if it is the same, an earlier start of the job still listens there: end it",
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
        "pass a different rank on each node: --node-rank 0, 1, 2 …",
        "if that process is left over, end it by its pid",
    ),
    "stale": ("end this process and start the command again",),
    "left_out": (
        "when the job has ended, start it again on all nodes: it resumes from its newest checkpoint",
    ),
    "misfit": ("pass the same --nodes on all nodes, and a different --node-rank on each, from 0",),
}


def refusal_error(me: str, host: str, address: str, *, kind: str, text: str) -> Disagreed:
    """The head refuses an authenticated node.

    `text` continues the sentence after the node's name.
    """
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

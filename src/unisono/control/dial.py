"""A node's way to the head, up to the moment when both have proven themselves. Blocking; one attempt or many, in time."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.control.connection import without_delay
from unisono.control.frames import (
    ANSWERS,
    CALLS,
    TO_HEAD,
    UNPROVEN_BYTES,
    Body,
    Foreign,
    Forged,
    FrameParser,
    Malformed,
    OtherProtocol,
    Seal,
    encode,
    preamble,
)
from unisono.control.handshake import (
    Greeting,
    Hello,
    fresh_nonce,
    greeting_seal,
    hello_seal,
    session_seal,
)
from unisono.control.trouble import (
    nameless,
    node,
    other_protocol,
    refused,
    stranger,
    unreachable,
    wrong_token,
)
from unisono.text import one_line

ANSWER_S = 3.0
"""How long an attempt waits for a connection, and for each answer."""
_PAUSE_S = (0.2, 0.5)
_STRANGE_ANSWERS = 2
"""So many strange answers in a row are believed."""
_STRANGE_SILENCES = 3
"""The same for saying nothing: a head that is short of breath does that, too."""
_NAMELESS_S = 5.0
"""A name that the resolver does not know is asked for again so long: in some clusters names come with their nodes."""
_WELCOME_BYTES = 64 << 10
_CLOCK_EXCHANGES = 5
_CLOCK_S = 2.0
_PIECE_BYTES = 1 << 16


@dataclass
class Called:
    """A connection on which both sides have proven themselves. `early`: frames that came while the clocks were compared."""

    sock: socket.socket
    parser: FrameParser
    seal: Seal
    welcome: dict[str, Any]
    clock_offset_s: float | None = None
    early: list[Body] = field(default_factory=list)


@dataclass(frozen=True)
class Caller:
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
        return node(self.node_rank, self.node_host)

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


def call(caller: Caller, *, timeout_s: float, on_wait: Callable[[str, float], None] | None) -> Called:
    """Calls until the head answers, `timeout_s` is over, or it is certain that waiting is of no use.

    Raises:
        Disagreed: with a verdict; see NodeLink.connect.
    """
    began = time.monotonic()
    strange = 0
    while True:
        try:
            return _attempt(caller, began + timeout_s)
        except _NoAnswer as error:
            waited_s = time.monotonic() - began
            strange = strange + 1 if error.believed_after else 0
            if strange and strange >= error.believed_after:
                raise stranger(caller.me, caller.address, str(error)) from error
            if waited_s >= timeout_s or (error.lasting and waited_s > _NAMELESS_S):
                raise _given_up(caller, error, waited_s) from error
            if on_wait is not None:
                on_wait(f"the head at {caller.address}: {error}", waited_s)
        left_s = began + timeout_s - time.monotonic()
        time.sleep(max(0.0, min(random.uniform(*_PAUSE_S), left_s)))  # noqa: S311 - so that nodes do not call in step


def _given_up(caller: Caller, error: _NoAnswer, waited_s: float) -> Exception:
    if isinstance(error, _NoAddress):
        return nameless(caller.me, caller.host, str(error), waited_s)
    return unreachable(caller.me, caller.address, str(error), waited_s)


def _attempt(caller: Caller, deadline: float) -> Called:
    """One connection, one handshake. Raises _NoAnswer where another attempt may help, Disagreed where none does."""
    sock = _connect(caller, deadline)
    try:
        without_delay(sock)
        called = _introduce(caller, sock)
        _compare_clocks(called)
    except (OSError, Malformed) as error:
        sock.close()
        raise _NoAnswer(f"the connection broke ({_words(error)})") from error
    except BaseException:  # also for Ctrl-C: the head must not wait for us; raised again
        sock.close()
        raise
    return called


def _connect(caller: Caller, deadline: float) -> socket.socket:
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
    raise _NoAnswer(_words(problem)) from problem


def _addresses(caller: Caller, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
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
        raise _NoAddress(_words(answer[0]), lasting=not again) from answer[0]
    return [(found[0], found[4]) for found in answer[0]]


def _introduce(caller: Caller, sock: socket.socket) -> Called:
    """The handshake, seen from the node."""
    sock.sendall(preamble(CALLS))
    parser = FrameParser(ANSWERS, limit=UNPROVEN_BYTES)
    try:
        greeting = Greeting.from_body(greeting_seal(sends=TO_HEAD).open(_frame(sock, parser)))
    except Foreign as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error
    except OtherProtocol as error:
        raise other_protocol(caller.me, caller.address, error.version) from error
    except Malformed as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error
    hello = Hello(
        nonce=fresh_nonce(), call=caller.call, node_rank=caller.node_rank, nodes=caller.nodes, host=caller.node_host, pid=os.getpid(),
        run=caller.run or greeting.run, epoch=greeting.epoch if caller.epoch is None else caller.epoch,
    )  # fmt: skip
    sock.sendall(hello_seal(caller.token, greeting, sends=TO_HEAD).close(encode(hello.to_body())))
    parser.limit = _WELCOME_BYTES
    seal = session_seal(caller.token, greeting, hello, sends=TO_HEAD)
    return Called(sock, parser, seal, _welcome(caller, _answer(caller, sock, parser, seal)))


def _answer(caller: Caller, sock: socket.socket, parser: FrameParser, seal: Seal) -> Body:
    try:
        return seal.open(_frame(sock, parser))
    except Forged as error:
        raise wrong_token(caller.me, caller.node_host, caller.address) from error
    except Malformed as error:
        raise _NoAnswer(str(error), believed_after=_STRANGE_ANSWERS) from error


def _welcome(caller: Caller, body: Body) -> dict[str, Any]:
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
            raise refused(caller.me, caller.node_host, caller.address, kind=kind, text=text)
        case _:
            raise _NoAnswer("sends no welcome", believed_after=_STRANGE_ANSWERS)


def _compare_clocks(called: Called) -> None:
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


def _words(error: Exception) -> str:
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

"""What a caller without the token can and cannot do: each line of the security list.

Run: pytest tests/guard/control/test_security.py
"""

import json
import os
import random
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import Disagreed, UnfitError
from unisono.guard.control.channel_ends import HeadServer, allow_open_files
from unisono.guard.control.connection import Joined, Left, NodeMessage, Rejected
from unisono.guard.control.head import PROOF_S, SPARE_CONNECTIONS
from unisono.guard.control.protocol import (
    CALLS,
    PREAMBLE_BYTES,
    TO_HEAD,
    UNPROVEN_BYTES,
    FrameParser,
    Greeting,
    Hello,
    Malformed,
    Seal,
    derive,
    encode,
    fresh_nonce,
    greeting_seal,
    hello_seal,
    new_token,
    preamble,
    session_seal,
)

if TYPE_CHECKING:
    from tests.guard.control.conftest import Room

LIMIT_S = 20.0


def dial(head: HeadServer) -> socket.socket:
    return socket.create_connection(head.address, LIMIT_S)


def rest(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        return data
    return data


def greeted(sock: socket.socket) -> Greeting:
    """A caller that knows the protocol, up to the head's greeting."""
    sock.sendall(preamble(CALLS))
    parser = FrameParser(b"unisono<")
    while (frame := parser.take()) is None:
        parser.feed(sock.recv(4096))
    return Greeting.from_body(greeting_seal(sends=TO_HEAD).open(frame))


def hello(greeting: Greeting, **changed: Any) -> Hello:
    known = {
        "nonce": fresh_nonce(),
        "call": "c" * 32,
        "node_rank": 1,
        "nodes": 3,
        "host": "b",
        "pid": 1,
        "run": greeting.run,
        "epoch": 0,
    }
    return Hello(**{**known, **changed})


def test_the_head_reports_nothing_to_who_does_not_begin_as_we_do(room: "Room") -> None:
    head = room.head()
    with dial(head) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert rest(sock) == b""
    [event] = room.hears(head, Rejected)
    assert (event.kind, event.claims) == ("malformed", None)
    assert "GET / HTTP/1.1" in event.why
    assert event.address == f"127.0.0.1:{event.address.rpartition(':')[2]}"


def test_garbage_changes_nothing(room: "Room") -> None:
    head = room.head()
    node = room.node(head)
    for garbage in (b"\0" * 5000, preamble(CALLS) + b"\xff" * 100, CALLS + b"\x07", os.urandom(100)):
        with dial(head) as sock:
            sock.sendall(garbage)
            rest(sock)
    room.node(head, node_rank=2)
    node.send({"still": "here"})
    assert room.hears(head, NodeMessage)
    room.hears(head, Joined, 2)
    assert not room.unasked(head, Left)


def test_time_before_proof_is_bounded_at_each_stage(room: "Room") -> None:
    head = room.head()
    began = time.monotonic()
    stages = [dial(head) for _ in range(3)]
    stages[1].sendall(preamble(CALLS))
    stages[2].sendall(preamble(CALLS) + (100).to_bytes(4, "big") + b"x")
    for sock in stages:
        rest(sock)
        assert PROOF_S - 0.5 < time.monotonic() - began < 5 * PROOF_S
        sock.close()
    assert "did not authenticate within 3 s" in room.hears(head, Rejected)[0].why


def test_a_frame_before_proof_is_small(room: "Room") -> None:
    head = room.head()
    with dial(head) as sock:
        greeted(sock)
        sock.sendall((UNPROVEN_BYTES + 1).to_bytes(4, "big"))
        assert rest(sock) == b""
    assert f"{UNPROVEN_BYTES} is the maximum" in room.hears(head, Rejected)[0].why


def test_connections_before_proof_are_bounded_and_nodes_join_all_the_same(room: "Room") -> None:
    head = room.head(nodes=3)
    idle = [dial(head) for _ in range(3 + SPARE_CONNECTIONS + 20)]
    room.node(head)
    room.hears(head, Joined)
    assert "too many connections at once" in room.hears(head, Rejected)[0].why
    assert len(head._head.open) <= 3 + SPARE_CONNECTIONS + 1
    for sock in idle:
        sock.close()


def test_rejections_of_one_address_do_not_fill_the_memory(
    room: "Room", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.guard.control.head._SAME_REJECTION_S", 600.0)  # for as long as this may take
    head = room.head()
    for _ in range(200):
        with dial(head) as sock:
            sock.sendall(b"x")
            rest(sock)
    room.node(head)
    room.hears(head, Joined)
    assert len(room.unasked(head, Rejected)) == 1


def test_whatever_rank_a_liar_claims_the_memory_is_bounded(
    room: "Room", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.guard.control.head._SAME_REJECTION_S", 600.0)
    head = room.head(nodes=3)
    for rank in range(300):
        with dial(head) as sock:
            greeting = greeted(sock)
            body = hello(greeting, node_rank=rank).to_body()
            sock.sendall(hello_seal(b"guess", greeting, sends=TO_HEAD).close(encode(body)))
            rest(sock)
    room.node(head)
    room.hears(head, Joined)
    assert len(room.unasked(head, Rejected)) == 256


def test_a_recorded_call_fits_no_second_time(room: "Room") -> None:
    head = room.head()
    with dial(head) as sock:
        greeting = greeted(sock)
        recorded = hello_seal(room.token, greeting, sends=TO_HEAD).close(encode(hello(greeting).to_body()))
        sock.sendall(recorded)
        room.hears(head, Joined)
    room.hears(head, Left)
    with dial(head) as sock:
        greeted(sock)
        sock.sendall(recorded)
        rest(sock)
    assert room.hears(head, Rejected)[0].kind == "token"
    assert not room.unasked(head, Joined)


def test_a_frame_that_is_repeated_on_the_way_ends_the_connection(room: "Room") -> None:
    head = room.head()
    with dial(head) as sock:
        greeting = greeted(sock)
        me = hello(greeting)
        sock.sendall(hello_seal(room.token, greeting, sends=TO_HEAD).close(encode(me.to_body())))
        seal = session_seal(room.token, greeting, me, sends=TO_HEAD)
        frame = seal.close(encode({"t": "say", "m": {"n": 1}}))
        sock.sendall(frame + frame)
        assert room.hears(head, NodeMessage) == [NodeMessage(1, {"n": 1})]
        [left] = room.hears(head, Left)
    assert not left.clean
    assert "with a wrong MAC" in left.why
    assert not room.unasked(head, NodeMessage)


def test_a_head_that_does_not_know_the_token_is_not_believed(room: "Room") -> None:
    """A false head greets properly and says welcome with a key of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def false_head() -> None:
        sock, _ = listener.accept()
        with sock:
            greeting = Greeting(fresh_nonce(), "run1", 0)
            sock.recv(PREAMBLE_BYTES)
            sock.sendall(preamble(b"unisono<") + Seal(b"", sends=b"<").close(encode(greeting.to_body())))
            sock.recv(4096)
            welcome = {"t": "welcome", "run_nonce": "run1", "epoch": 0, "wall": 1.0, "welcome": {}}
            sock.sendall(session_seal(b"guess", greeting, hello(greeting), sends=b"<").close(encode(welcome)))
            rest(sock)

    thread = threading.Thread(target=false_head)
    thread.start()
    with listener, pytest.raises(Disagreed, match="do not have the same token"):
        room.node(listener.getsockname())
    thread.join(LIMIT_S)


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "-oProxyCommand=x"}, {"host": "b\x1b[2J"}, {"host": ""}, {"host": 7}, {"node_rank": "1"}, {"nodes": -1},
        {"node_rank": True}, {"node_rank": 1e300}, {"run": "a b"}, {"nonce": "x"}, {"call": "x"}, {"pid": None}, {"t": "say"},
    ],
)  # fmt: skip
def test_a_hello_with_the_token_and_foreign_values_is_malformed(
    room: "Room", changed: dict[str, Any]
) -> None:
    head = room.head()
    with dial(head) as sock:
        greeting = greeted(sock)
        body = {**hello(greeting).to_body(), **changed}
        sock.sendall(hello_seal(room.token, greeting, sends=TO_HEAD).close(encode(body)))
        rest(sock)
    [event] = room.hears(head, Rejected)
    assert event.kind == "malformed"
    assert event.why.isprintable()


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from([*Hello.__slots__, "t", "x"]), anything))
def test_no_value_in_a_hello_raises_anything_but_malformed(changed: dict[str, Any]) -> None:
    body = {**hello(Greeting(fresh_nonce(), "r", 0)).to_body(), **changed}
    words = ""
    try:
        Hello.from_body(body)
        Greeting.from_body(body)
    except Malformed as error:
        words = str(error)
    assert words.isprintable()


def test_words_of_a_head_lose_control_characters(room: "Room") -> None:
    from unisono.guard.control.dial import refusal_error

    error = refusal_error("node 1 (b)", "b", "a:1", kind="stale", text="is \x1b[2Jold\u202e\nand more")
    assert error.lines()[0] == "error: node 1 (b) is old and more"
    assert error.verdict is not None
    assert error.verdict.summary.isprintable()


def test_a_derived_key_leads_neither_to_the_token_nor_to_a_different_key(room: "Room") -> None:
    keys = {
        derive(room.token, "a"), derive(room.token, "b"), derive(room.token, "a", 1), derive(room.token, "a", "1"),
        derive(room.token, "a", 1, 1), derive(room.token, "a", 11), derive(b"other", "a"),
    }  # fmt: skip
    assert len(keys) == 7
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(Disagreed, match="same token"):
        room.node(room.head(), token=derive(room.token, "rank", 1))
    assert len(new_token()) >= 43
    assert new_token() != new_token()


def test_nodes_join_while_garbage_pours_in(room: "Room") -> None:
    head = room.head(nodes=9)
    ended = threading.Event()

    def pour(seed: int) -> None:
        choice = random.Random(seed)
        while not ended.is_set():
            data = choice.choice([b"", preamble(CALLS), preamble(CALLS) + (50).to_bytes(4, "big")])
            try:
                with dial(head) as sock:
                    sock.sendall(data + choice.randbytes(choice.randrange(300)))
                    if choice.random() < 0.5:
                        sock.settimeout(0.2)
                        sock.recv(100)
            except OSError:
                continue

    threads = [threading.Thread(target=pour, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        nodes = [room.node(head, node_rank=rank) for rank in range(1, 9)]
        for node in nodes:
            node.send({"here": True})
        assert {printed.node_rank for printed in room.hears(head, NodeMessage, 8)} == set(range(1, 9))
    finally:
        ended.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not room.unasked(head, Left)
    assert {event.kind for event in room.unasked(head, Rejected)} <= {"malformed", "token"}


def test_too_few_open_files_are_raised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (64, 5000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    allow_open_files(1024)
    assert limits["now"] == (1124, 5000)
    with pytest.raises(UnfitError, match="needs 10100 open files, but the limit is 5000"):
        allow_open_files(10_000)


def test_what_is_on_the_wire_has_no_token_in_it(room: "Room") -> None:
    seen = bytearray()
    head = room.head()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_relay, args=(listener, head.address, seen), daemon=True).start()
    node = room.node(listener.getsockname())
    node.send({"kind": "report"})
    room.hears(head, NodeMessage)
    node.close()
    listener.close()
    assert room.token not in bytes(seen)
    assert json.dumps({"kind": "report"}, separators=(",", ":")).encode() in bytes(seen)


def _relay(listener: socket.socket, target: tuple[str, int], seen: bytearray) -> None:
    near, _ = listener.accept()
    far = socket.create_connection(target)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    thread = threading.Thread(target=copy, args=(far, near), daemon=True)
    thread.start()
    copy(near, far)
    thread.join(LIMIT_S)
    near.close()
    far.close()

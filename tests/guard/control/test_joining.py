"""Who comes in, who does not, and in which words. Run: pytest tests/guard/control/test_joining.py"""

import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from unisono.base.errors import Disagreed, UsageError
from unisono.guard.control.channel_ends import NodeLink
from unisono.guard.control.connection import Joined, Left, NodeMessage, Rejected
from unisono.guard.control.dial import DialRequest, dial_head

if TYPE_CHECKING:
    from tests.guard.control.conftest import Room


TOKEN = b"the secret of this job, 32 bytes"
LIMIT_CLOCK_S = 5.0
LIMIT_CLOSE_S = 20.0


def refused(room: "Room", head: Any, **options: Any) -> Disagreed:
    with pytest.raises(Disagreed) as caught:
        room.node(head, **options)
    assert caught.value.exit_code == 3
    assert caught.value.verdict is not None
    return caught.value


def cause(error: Disagreed) -> str:
    assert error.verdict is not None
    return error.verdict.cause


def test_a_node_joins_and_both_hear_each_other(room: "Room") -> None:
    head = room.head(welcome={"host": "a", "nonce_file": ".n"})
    node = room.node(head, node_rank=2, nodes=3)
    assert room.hears(head, Joined) == [Joined(2, "host2", "127.0.0.1")]
    assert node.welcome == {
        "host": "a",
        "nonce_file": ".n",
        "run_nonce": "run1",
        "epoch": 0,
        "wall": node.welcome["wall"],
    }
    wall: Any = node.welcome["wall"]
    assert abs(time.time() - wall) < LIMIT_CLOCK_S
    assert node.local_address == "127.0.0.1"
    node.send({"kind": "report", "report": {"x": [1, "ü", None, 2.5]}})
    assert room.hears(head, NodeMessage) == [
        NodeMessage(2, {"kind": "report", "report": {"x": [1, "ü", None, 2.5]}})
    ]
    head.send(2, {"kind": "dial"})
    head.broadcast({"kind": "prepare"})
    assert [printed.message["kind"] for printed in room.hears(node, NodeMessage, 2)] == ["dial", "prepare"]


def test_clocks_of_one_machine_do_not_differ(room: "Room") -> None:
    node = room.node(room.head())
    assert node.clock_offset_s is not None
    assert abs(node.clock_offset_s) < 0.5


def test_a_large_message_arrives_whole_in_both_directions(room: "Room") -> None:
    head = room.head()
    node = room.node(head)
    text = "x" * (6 << 20)
    node.send({"text": text})
    head.broadcast({"text": text})
    assert (
        room.hears(head, NodeMessage)[0].message["text"]
        == room.hears(node, NodeMessage)[0].message["text"]
        == text
    )


def test_the_descriptor_is_readable_while_events_wait(room: "Room") -> None:
    head = room.head()
    with selectors.DefaultSelector() as selector:
        selector.register(head, selectors.EVENT_READ)
        assert not selector.select(0.0)
        node = room.node(head)
        assert selector.select(10)
        room.hears(head, Joined)
        assert not selector.select(0.0)
        selector.register(node, selectors.EVENT_READ)
        head.broadcast({"kind": "note"})
        assert [key.fileobj for key, _ in selector.select(10)] == [node]


def test_a_wrong_token_is_reported_at_once_on_both_sides(room: "Room") -> None:
    head = room.head()
    began = time.monotonic()
    error = refused(room, head, token=b"another secret")
    assert cause(error) == "token_rejected"
    [event] = room.hears(head, Rejected)
    assert time.monotonic() - began < 5
    assert (event.kind, event.claims, event.why) == (
        "token",
        1,
        "node 1 (host1) has a wrong or missing token",
    )
    assert event.address.startswith("127.0.0.1:")
    room.node(head)
    assert room.hears(head, Joined)


def test_a_second_node_with_a_rank_is_reported_who_holds_it(room: "Room") -> None:
    head = room.head()
    room.node(head, node_host="b")
    error = refused(room, head, node_host="c")
    assert cause(error) == "node_duplicate"
    assert "node 1 (c) has a duplicate rank: b (127.0.0.1, process " in str(error)
    [event] = room.hears(head, Rejected, kind="duplicate")
    assert event.claims == 1
    assert event.holder.startswith("b (127.0.0.1, process ")


def test_who_calls_again_because_no_welcome_came_is_not_a_second_node(room: "Room") -> None:
    """A head that was short of breath answers when the node has hung up and called anew."""
    head = room.head()
    caller = DialRequest(*head.address, TOKEN, 1, "b")
    first = dial_head(caller, timeout_s=20, on_wait=None)
    again = dial_head(caller, timeout_s=20, on_wait=None)
    room.hears(head, Joined)
    assert cause(refused(room, head, node_host="b")) == "node_duplicate"
    assert not room.unasked(head, Joined)
    assert not room.unasked(head, Left)
    for called in (first, again):
        called.sock.close()
    assert room.hears(head, Left)
    assert not room.unasked(head, Left)


def test_nobody_else_can_be_node_0(room: "Room") -> None:
    error = refused(room, room.head(), node_rank=0)
    assert cause(error) == "node_duplicate"
    assert "the head itself" in str(error)


def test_a_rank_that_is_free_again_can_be_taken_again(room: "Room") -> None:
    head = room.head()
    room.node(head).close()
    assert room.hears(head, Left)[0].clean
    room.node(head)
    assert room.hears(head, Joined, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_rank": 3}, "has no valid rank for 3 nodes: ranks are 0 to 2"),
        ({"node_rank": -1}, "has no valid rank for 3 nodes: ranks are 0 to 2"),
        ({"nodes": 4}, "expects 4 nodes, the head expects 3"),
    ],
)
def test_a_different_number_of_nodes_is_refused(room: "Room", options: dict[str, Any], words: str) -> None:
    head = room.head()
    error = refused(room, head, **options)
    assert cause(error) == "world_mismatch"
    assert words in str(error)
    assert words in room.hears(head, Rejected, kind="misfit")[0].why


@pytest.mark.parametrize("options", [{"run_nonce": "run0"}, {"run_nonce": "run1", "epoch": 0}])
def test_a_process_of_an_earlier_start_is_stale(room: "Room", options: dict[str, Any]) -> None:
    head = room.head(epoch=1)
    error = refused(room, head, **options)
    assert cause(error) == "stale_process"
    assert room.hears(head, Rejected, kind="stale")[0].claims == 1
    room.node(head, run_nonce="run1", epoch=1)


def test_of_many_that_call_at_once_with_one_rank_one_comes_in(room: "Room") -> None:
    head = room.head()
    gate = threading.Barrier(8)

    def join(number: int) -> str:
        gate.wait()
        try:
            room.node(head, node_host=f"h{number}")
        except Disagreed as error:
            return cause(error)
        return "in"

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(join, range(8))) == ["in", *["node_duplicate"] * 7]
    room.hears(head, Rejected, 7, kind="duplicate")
    room.hears(head, Joined)
    assert not room.unasked(head, Joined)


def test_a_last_message_reaches_every_node_whenever_it_came(room: "Room") -> None:
    """Said while nodes are between their hello and their place, it must not pass anybody by."""
    head = room.head(nodes=17)
    gate = threading.Barrier(17)

    def join(rank: int) -> NodeLink:
        gate.wait()
        return room.node(head, node_rank=rank)

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(join, rank) for rank in range(1, 17)]
        gate.wait()
        room.hears(head, Joined, 2)
        head.send_last({"kind": "ended"})
        for joined in calls:
            assert room.hears(joined.result(), NodeMessage)[0].message == {"kind": "ended"}


def test_who_comes_after_the_last_message_receives_it(room: "Room") -> None:
    head = room.head()
    here = room.node(head, node_rank=1)
    head.send_last({"kind": "ended", "exit_code": 3})
    late = room.node(head, node_rank=2)
    twice = room.node(head, node_rank=1)
    for node in (here, late, twice):
        assert room.hears(node, NodeMessage)[0].message == {"kind": "ended", "exit_code": 3}
    assert {event.claims for event in room.hears(head, Rejected, 2, kind="late")} == {1, 2}


def test_the_head_closes_when_everybody_has_the_last_message(room: "Room") -> None:
    head = room.head()
    nodes = [room.node(head, node_rank=rank) for rank in (1, 2)]
    head.send_last({"kind": "ended"})
    began = time.monotonic()
    head.close(patience_s=LIMIT_CLOSE_S)
    assert time.monotonic() - began < LIMIT_CLOSE_S / 2
    for node in nodes:
        printed, left = room.hears(node, NodeMessage)[0], room.hears(node, Left)[0]
        assert printed.message == {"kind": "ended"}
        assert left == Left(0, "127.0.0.1", "it closed the connection", clean=True)
    assert [left.clean for left in room.hears(head, Left, 2)] == [True, True]


def test_all_that_was_sent_before_a_goodbye_arrives(room: "Room") -> None:
    head = room.head()
    node = room.node(head)
    for number in range(200):
        node.send({"number": number, "text": "x" * 10_000})
    node.close()
    assert [printed.message["number"] for printed in room.hears(head, NodeMessage, 200)] == list(range(200))
    assert room.hears(head, Left) == [Left(1, "host1", "it closed the connection", clean=True)]


def test_sending_to_who_is_gone_is_not_an_error(room: "Room") -> None:
    head = room.head()
    node = room.node(head)
    head.send(2, {"kind": "note"})
    node.close()
    node.send({"kind": "late"})
    node.close()
    head.close(patience_s=1)
    head.broadcast({"kind": "late"})
    head.send_last({"kind": "late"})
    head.close(patience_s=1)
    assert not [t for t in threading.enumerate() if t.name == "unisono.guard.control"]


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a\x1b[2J", "", "a" * 256, "ü"])
def test_a_node_without_a_proper_name_does_not_call(room: "Room", name: str) -> None:
    with pytest.raises(UsageError, match="not a valid host name"):
        room.node(room.head(), node_host=name)


def test_the_head_can_have_an_address_of_version_6(room: "Room") -> None:
    try:
        head = room.head(host="::1")
    except Disagreed:
        pytest.skip("needs IPv6")
    assert room.node(head).local_address == "::1"
    assert room.hears(head, Joined) == [Joined(1, "host1", "::1")]


def test_only_the_chosen_address_listens(room: "Room") -> None:
    head = room.head(host="127.0.0.2")
    assert head.address[0] == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", head.address[1]), 5):
        pass
    for everywhere in ("", "0.0.0.0", "::"):
        with pytest.raises(UsageError, match="all networks"):
            room.head(host=everywhere)

"""Files on their way to the head: whole or not at all, and never in the way of anything.

Run: pytest tests/guard/control/test_transfer.py
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import needs
from tests.guard.control.test_security import dial, greeted, hello, rest
from tests.jobs.nproc.disks import on_a_device
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.control.connection import FileReceived, Left, NodeMessage
from unisono.guard.control.file_transfer import (
    AT_ONCE,
    MAX_OPEN,
    PER_NODE,
    WINDOW,
    Content,
    FileReceiver,
    FileSender,
    Offer,
    OfferRefused,
    TransferOutcome,
)
from unisono.guard.control.protocol import (
    PIECE_BYTES,
    PROVEN_BYTES,
    TO_HEAD,
    FrameParser,
    Malformed,
    Piece,
    Seal,
    decode,
    decode_frame,
    encode,
    encode_piece,
    hello_seal,
    session_seal,
)
from unisono.guard.facts.processes import stuck_threads

if TYPE_CHECKING:
    from tests.guard.control.conftest import Room

LIMIT_S = 30.0
MIB = 1 << 20


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Where the head keeps what comes."""
    folder = tmp_path / "head"
    folder.mkdir()
    return folder


def keep_in(desk: Path) -> dict[str, Any]:
    return {"test": lambda offer: (desk, offer.label["name"])}


def outcome_of(transfers: FileSender) -> TransferOutcome:
    """The next one."""
    assert select.select([transfers.fileno()], [], [], LIMIT_S)[0], f"no outcome in {LIMIT_S:.0f} s"
    [outcome] = transfers.outcomes()
    return outcome


def wait_for_part(desk: Path, name: str, *, size: int = 0) -> None:
    """Until so many bytes of a file are at the head."""
    part, until = desk / f".{name}.part", time.monotonic() + LIMIT_S
    while not part.exists() or part.stat().st_size < size:
        assert time.monotonic() < until, f"nothing of {name} came"
        time.sleep(0.005)


def label(name: str) -> dict[str, Any]:
    return {"kind": "test", "name": name}


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * WINDOW * PIECE_BYTES + 7])
def test_a_file_and_a_buffer_arrive_as_they_were(room: "Room", tmp_path: Path, desk: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    head = room.head()
    node = room.node(head)
    with FileReceiver(head, keep_in(desk)), FileSender(node) as transfers:
        transfers.send(tmp_path / "file", label("a"), Content.of(data))
        assert outcome_of(transfers).error == ""
        transfers.send(memoryview(data), label("b"))
        assert outcome_of(transfers).error == ""
        transfers.send(tmp_path / "file", label("c"))
        assert outcome_of(transfers).error == ""
        arrived = room.hears(head, FileReceived, 3)
    assert {path.name: path.read_bytes() for path in desk.iterdir()} == dict.fromkeys("abc", data)
    assert [event.path for event in arrived] == [desk / name for name in "abc"]
    assert {(event.bytes, event.xxh3_128) for event in arrived} == {(size, Content.of(data).xxh3_128)}


def test_the_head_hears_of_a_file_before_the_words_that_follow_it(room: "Room", desk: Path) -> None:
    head = room.head()
    node = room.node(head)
    with FileReceiver(head, keep_in(desk)), FileSender(node) as transfers:
        for number in range(20):
            transfers.send(b"x" * 1000, label(str(number)))
            outcome_of(transfers)
            node.send({"n": number})
        received: list[Any] = []
        while len(received) < 40:
            received += [
                event for event in head.receive(LIMIT_S) if isinstance(event, FileReceived | NodeMessage)
            ]
    assert [type(event) for event in received] == [FileReceived, NodeMessage] * 20


def test_a_changed_byte_is_found_on_arrival_and_nothing_is_kept(
    room: "Room", tmp_path: Path, desk: Path
) -> None:
    data = bytearray(os.urandom(2 * MIB))
    written = Content.of(bytes(data))
    data[MIB + 5] ^= 4
    (tmp_path / "file").write_bytes(data)
    head = room.head()
    with FileReceiver(head, keep_in(desk)), FileSender(room.node(head)) as transfers:
        transfers.send(tmp_path / "file", label("a"), written)
        error = outcome_of(transfers).error
        [event] = room.hears(head, FileReceived)
    assert error == event.error
    assert "it has changed since node 1 (host1) wrote it" in error
    assert written.xxh3_128 in error
    assert event.path is None
    assert not list(desk.iterdir())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("gone", "file: it cannot be read: No such file or directory"),
        ("short", "it has 10 bytes, 1000 were written"),
        ("link", "it cannot be read: Too many levels of symbolic links"),
        ("taken", "is there already"),
        ("unknown kind", "the head does not accept files of kind 'other'"),
        ("no such place", "the head no longer waits for it"),
        ("link as place", "the head no longer waits for it"),
        ("refused", "not for you"),
        ("unreadable label", "the head cannot read what kind of file it is"),
    ],
)
def test_what_cannot_be_sent_or_kept_is_asked_to_both_sides(
    room: "Room", tmp_path: Path, desk: Path, what: str, words: str
) -> None:
    source, content, of = tmp_path / "file", Content.of(b"x" * 1000), label("a")
    if what != "gone":
        source.write_bytes(b"x" * (10 if what == "short" else 1000))
    if what == "link":
        source.rename(tmp_path / "other")
        source.symlink_to(tmp_path / "other")
    if what == "taken":
        (desk / "a").write_text("before")
    if what == "link as place":
        (desk / "folder").symlink_to(tmp_path)
    of = {"unknown kind": {"kind": "other"}, "unreadable label": {"kind": "test"}}.get(what, of)

    def place(offer: Offer) -> tuple[Path, str]:
        if what == "refused":
            raise OfferRefused("not for you")
        folder = desk / "folder" if what in ("no such place", "link as place") else desk
        return folder, str(offer.label["name"])

    before = sorted(path.name for path in desk.iterdir())
    head = room.head()
    with FileReceiver(head, {"test": place}), FileSender(room.node(head)) as transfers:
        transfers.send(source, of, content)
        assert words in outcome_of(transfers).error
        if what not in ("gone", "short", "link"):
            assert words in room.hears(head, FileReceived)[0].error
        transfers.send(b"after", label("b"))  # the next one is not held up
        assert (outcome_of(transfers).error == "") == (
            what not in ("refused", "no such place", "link as place")
        )
    assert sorted(path.name for path in desk.iterdir() if path.name != "b") == before
    assert not (tmp_path / "a").exists()
    if what == "taken":
        assert (desk / "a").read_text() == "before"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Four MiB of disk."""
    with needs.small_disk(tmp_path / "small", "size=4m") as disk:
        yield disk


def test_a_disk_that_is_full_at_the_head_is_reported_in_plain_words(room: "Room", small_disk: Path) -> None:
    head = room.head()
    with FileReceiver(head, keep_in(small_disk)), FileSender(room.node(head)) as transfers:
        transfers.send(bytes(5 * MIB), label("a"))
        assert "no room on the head's node: 5.24 MB are needed in" in outcome_of(transfers).error
        transfers.send(bytes(2 * MIB), label("b"))
        assert outcome_of(transfers).error == ""
    assert [path.name for path in small_disk.iterdir()] == ["b"]


def test_a_disk_that_fills_up_while_files_arrive_keeps_whole_ones_only(
    room: "Room", small_disk: Path
) -> None:
    """Both fit when they are offered."""
    head = room.head()
    gate = threading.Barrier(2, timeout=LIMIT_S)

    def place(offer: Offer) -> tuple[Path, str]:
        gate.wait()
        return small_disk, str(offer.label["name"])

    nodes = [room.node(head, node_rank=rank) for rank in (1, 2)]
    with FileReceiver(head, {"test": place}), FileSender(nodes[0]) as one, FileSender(nodes[1]) as two:
        one.send(bytes(3 * MIB), label("a"))
        two.send(bytes(3 * MIB), label("b"))
        errors = sorted(outcome_of(transfers).error for transfers in (one, two))
    assert "No space left on device" in errors[1] or "no room on the head's node" in errors[1]
    assert {path.name for path in small_disk.iterdir()} <= {"a", "b"}
    assert all(path.stat().st_size == 3 * MIB for path in small_disk.iterdir())


def test_several_nodes_send_at_once(room: "Room", desk: Path) -> None:
    """More than are taken at the same time: the others wait."""
    head = room.head(nodes=13)
    data = {f"f{rank}": os.urandom(2 * MIB + rank) for rank in range(1, 13)}
    with FileReceiver(head, keep_in(desk)):
        senders = [FileSender(room.node(head, node_rank=rank)) for rank in range(1, 13)]
        for transfers, name in zip(senders, data, strict=True):
            transfers.send(data[name], label(name))
        assert [outcome_of(transfers).error for transfers in senders] == [""] * 12
        for transfers in senders:
            transfers.close()
    assert {path.name: path.read_bytes() for path in desk.iterdir()} == data


def test_words_are_not_stuck_behind_a_large_file(room: "Room", tmp_path: Path, desk: Path) -> None:
    """Both ways, while a file goes as fast as it can.

    The bound is loose: this machine may be busy.
    """
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(192 * MIB)
    head = room.head()
    node = room.node(head)
    waited: list[float] = []
    with FileReceiver(head, keep_in(desk)), FileSender(node) as transfers:
        transfers.send(large, label("a"), None)
        while not (ended := transfers.outcomes()):
            at = time.monotonic()
            node.send({"at": at})
            room.hears(head, NodeMessage)
            head.send(1, {"at": at})
            while not node.receive(LIMIT_S):
                pass
            waited.append(time.monotonic() - at)
        assert ended[0].error == ""
    assert len(waited) >= 2
    assert sorted(waited)[len(waited) // 2] < 1.0
    assert max(waited) < 5.0
    assert not head.silences()


def test_a_place_that_blocks_holds_up_neither_words_nor_other_files(room: "Room", desk: Path) -> None:
    """A disk that does not answer: nothing of the file is sent, so nothing piles up."""
    head = room.head()
    answers = threading.Event()

    def place(offer: Offer) -> tuple[Path, str]:
        if offer.label["name"] == "slow":
            answers.wait(LIMIT_S)
        return desk, str(offer.label["name"])

    node, other = room.node(head), room.node(head, node_rank=2)
    with FileReceiver(head, {"test": place}), FileSender(node) as one, FileSender(other) as two:
        one.send(bytes(64 * MIB), label("slow"))
        two.send(b"quick", label("quick"))
        assert outcome_of(two).error == ""
        node.send({"still": "here"})
        room.hears(head, NodeMessage)
        assert not one.outcomes()
        answers.set()
        assert outcome_of(one).error == ""


def test_a_frozen_disk_holds_no_thread_of_the_head_in_the_kernel(room: "Room", tmp_path: Path) -> None:
    """A process with such a thread cannot end before the disk answers."""
    head = room.head()
    node = room.node(head)
    with on_a_device(tmp_path / "head", tmp_path / "image", size=64 * MIB) as disk:
        with FileReceiver(head, keep_in(disk.path)), FileSender(node) as transfers:
            disk.hang()
            transfers.send(b"late", label("file"))
            until = time.monotonic() + LIMIT_S
            while not any(stuck_threads(child.pid) for child in psutil.Process().children()):
                assert time.monotonic() < until, "the disk was not looked at by a separate process"
                time.sleep(0.01)
            while stuck_threads(os.getpid()):  # for a moment, where one starts a process
                assert time.monotonic() < until, "a thread hangs in the kernel"
                time.sleep(0.01)
            assert not transfers.outcomes()
            disk.answer()
            assert outcome_of(transfers).error == ""
        assert (disk.path / "file").read_bytes() == b"late"


def test_a_node_that_dies_while_it_sends_leaves_nothing_at_the_head(room: "Room", desk: Path) -> None:
    head = room.head()
    with FileReceiver(head, keep_in(desk)):
        sender = room.process("sender", head.address[1], 1, 2048)
        wait_for_part(desk, "large", size=1)
        sender.send_signal(signal.SIGKILL)
        room.hears(head, Left)
        [event] = room.hears(head, FileReceived)
    assert event.error == "its node is gone"
    assert not list(desk.iterdir())


def test_the_end_of_a_start_ends_what_is_on_its_way(room: "Room", desk: Path) -> None:
    """At the head and at the node; what comes afterwards is of the next start."""
    head = room.head()
    node = room.node(head)
    offered = threading.Event()

    def place(offer: Offer) -> tuple[Path, str]:
        offered.set()
        return desk, str(offer.label["name"])

    first = FileReceiver(head, {"test": place})
    with FileSender(node) as transfers:
        transfers.send(bytes(256 * MIB), label("a"))
        transfers.send(bytes(MIB), label("b"))
        assert offered.wait(LIMIT_S)
        first.close()
        assert outcome_of(transfers).error == "the head has ended this start of the ranks"
        assert outcome_of(transfers).error == "the head is not accepting files now"
        with FileReceiver(head, keep_in(desk)):
            transfers.send(b"c", label("c"))
            assert outcome_of(transfers).error == ""
            transfers.send(bytes(256 * MIB), label("d"))
            wait_for_part(desk, "d")
            transfers.close()
            assert [outcome.error for outcome in transfers.outcomes()] == ["this node has ended the start"]
            room.hears(head, FileReceived, error="this node has ended the start")
            with FileSender(node) as again:
                again.send(b"e", label("e"))
                assert outcome_of(again).error == ""
    assert sorted(path.name for path in desk.iterdir()) == ["c", "e"]


def test_a_head_that_goes_ends_what_is_on_its_way(room: "Room", tmp_path: Path) -> None:
    process = room.process("head", 3)
    assert process.stdout is not None
    node = room.node(("127.0.0.1", int(process.stdout.readline())))
    with FileSender(node) as transfers:
        process.kill()
        transfers.send(bytes(64 * MIB), label("a"))
        assert outcome_of(transfers).error.startswith(("the head is gone", "the head is not accepting files"))


def joined(head: HeadServer, token: bytes) -> tuple[socket.socket, Seal]:
    """A peer that knows the token and need not keep to the rest."""
    sock = dial(head)
    greeting = greeted(sock)
    me = hello(greeting)
    sock.sendall(hello_seal(token, greeting, sends=TO_HEAD).close(encode(me.to_body())))
    return sock, session_seal(token, greeting, me, sends=TO_HEAD)


def wait_for_credit(sock: socket.socket) -> None:
    """Until the head has asked for pieces of a file."""
    parser = FrameParser(limit=PROVEN_BYTES)
    while True:
        frame = parser.take()
        if frame is None:
            data = sock.recv(4096)
            assert data, "the head has hung up"
            parser.feed(data)
        elif decode(frame[1])["t"] == "more":
            return


def offer_body(size: int = 10 * MIB, *, number: int = 0, name: str = "a") -> dict[str, Any]:
    return Offer(0, "", number, Content(size, "0" * 32), label(name)).to_body()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([offer_body(), *[Piece(0, n * PIECE_BYTES, bytes(PIECE_BYTES)) for n in range(WINDOW + 1)]], "more of a file than was requested"),
        ([offer_body(), offer_body()], "offered a file twice"),
        ([offer_body(number=number) for number in range(MAX_OPEN + 1)], f"offered a file while {MAX_OPEN} of its files wait"),
        ([{**offer_body(), "bytes": -1}], "an invalid offer of a file"),
        ([{**offer_body(), "bytes": 1 << 63}], "an invalid offer of a file"),
        ([{**offer_body(), "xxh3_128": "../../etc"}], "an invalid offer of a file"),
        ([{**offer_body(), "label": {"name": "a"}}], "an invalid offer of a file"),
        ([{**offer_body(), "id": "0"}], "a frame of unknown type"),
        ([b"\0" + bytes(12)], "a piece of 0 bytes"),
        ([b"\0" + bytes(13 + PIECE_BYTES)], f"a piece of {PIECE_BYTES + 1} bytes"),
    ],
)  # fmt: skip
def test_a_peer_that_does_not_keep_to_the_rules_is_hung_up_on(
    room: "Room", desk: Path, frames: list[Any], why: str
) -> None:
    """It knows the token.

    The head's disk answers no sooner than all is sent, so that no credit helps it.
    """
    sent = threading.Event()

    def place(offer: Offer) -> tuple[Path, str]:
        sent.wait(LIMIT_S)
        return desk, str(offer.label["name"])

    head = room.head()
    sock, seal = joined(head, room.token)
    with FileReceiver(head, {"test": place}), sock:
        with contextlib.suppress(ConnectionError):  # it may hang up before it has heard all
            for frame in frames:
                body = encode_piece(frame) if isinstance(frame, Piece) else frame
                sock.sendall(seal.close(body if isinstance(body, bytes) else encode(body)))
        [left] = room.hears(head, Left)
        sent.set()
    assert why in left.why
    assert not list(desk.iterdir())


@pytest.mark.parametrize("offset", [1, PIECE_BYTES, (1 << 64) - 1])
def test_pieces_that_do_not_follow_each_other_are_refused(room: "Room", desk: Path, offset: int) -> None:
    head = room.head()
    sock, seal = joined(head, room.token)
    with FileReceiver(head, keep_in(desk)), sock:
        sock.sendall(seal.close(encode(offer_body())))
        wait_for_credit(sock)
        sock.sendall(seal.close(encode_piece(Piece(0, offset, b"x"))))
        [event] = room.hears(head, FileReceived)
    assert "are not contiguous" in event.error
    assert not list(desk.iterdir())


def test_more_than_was_offered_is_refused(room: "Room", desk: Path) -> None:
    head = room.head()
    sock, seal = joined(head, room.token)
    with FileReceiver(head, keep_in(desk)), sock:
        sock.sendall(seal.close(encode(offer_body(1))))
        wait_for_credit(sock)
        sock.sendall(seal.close(encode_piece(Piece(0, 0, b"xx"))))
        [event] = room.hears(head, FileReceived)
    assert "exceed the offered size" in event.error
    assert not list(desk.iterdir())


def test_a_node_that_offers_much_and_sends_nothing_keeps_nobody_waiting(room: "Room", desk: Path) -> None:
    head = room.head()
    sock, seal = joined(head, room.token)
    with FileReceiver(head, keep_in(desk)), sock:
        for number in range(2 * AT_ONCE):
            sock.sendall(seal.close(encode(offer_body(number=number, name=f"greedy{number}"))))
        for number in range(PER_NODE):
            wait_for_part(desk, f"greedy{number}")
        with FileSender(room.node(head, node_rank=2)) as transfers:
            transfers.send(b"x" * MIB, label("other"))
            assert outcome_of(transfers).error == ""
        assert len(list(desk.glob(".greedy*"))) == PER_NODE
    assert [path.name for path in desk.iterdir()] == ["other"]


def test_a_file_of_which_nothing_comes_is_given_up_and_its_place_is_free(room: "Room", desk: Path) -> None:
    head = room.head()
    sock, seal = joined(head, room.token)
    with FileReceiver(head, keep_in(desk), silent_s=0.2), sock:
        for number in range(AT_ONCE + 1):
            sock.sendall(seal.close(encode(offer_body(number=number, name=f"f{number}"))))
        arrived = room.hears(head, FileReceived, AT_ONCE + 1)
    assert {event.error for event in arrived} == {"no part of it has arrived for 0.2 s"}
    assert not list(desk.iterdir())


def test_invalid_or_escaping_names_are_refused_and_cost_no_place(
    room: "Room", tmp_path: Path, desk: Path
) -> None:
    head = room.head()
    with FileReceiver(head, keep_in(desk)), FileSender(room.node(head)) as transfers:
        for name in ("../a", "a/../../a", "..", "a\0b", "\ud800", "a\nb", "x" * 300):
            for _ in range(AT_ONCE):
                transfers.send(b"x", label(name))
                assert outcome_of(transfers).error.startswith("the name "), name
        transfers.send(b"x", label("a"))
        assert outcome_of(transfers).error == ""
    assert [path.name for path in desk.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_nobody_sends_a_piece_before_proof_or_from_the_head(room: "Room", desk: Path) -> None:
    head = room.head()
    piece = encode_piece(Piece(0, 0, b"x"))
    with FileReceiver(head, keep_in(desk)):
        with dial(head) as sock:
            greeting = greeted(sock)
            sock.sendall(hello_seal(room.token, greeting, sends=TO_HEAD).close(piece))
            rest(sock)
        node = room.node(head)
        from unisono.guard.control.connection import CHANNEL_THREAD

        CHANNEL_THREAD.post(head._head.send, 1, piece)
        [left] = room.hears(node, Left)
    assert "not JSON" in left.why


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: b"\0" + data))
def test_no_bytes_in_a_frame_raise_anything_but_malformed(data: bytes) -> None:
    words = ""
    try:
        decode_frame(data)
    except Malformed as error:
        words = str(error)
    assert words.isprintable()


values = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(), st.integers())


@given(st.dictionaries(st.sampled_from(["t", "id", "bytes", "xxh3_128", "label"]), values))
def test_no_value_in_an_offer_raises_anything_but_malformed(changed: dict[str, Any]) -> None:
    words = ""
    try:
        Offer.from_body({**offer_body(), **changed}, node_rank=1, host="b")
    except Malformed as error:
        words = str(error)
    assert words.isprintable()

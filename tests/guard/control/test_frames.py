"""The parser takes any bytes in any pieces, and never holds more than it may.

Run: pytest tests/guard/control/test_frames.py
"""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.control.protocol import (
    ANSWERS,
    CALLS,
    PROVEN_BYTES,
    TO_HEAD,
    TO_NODE,
    DifferentVersion,
    ForeignProtocol,
    Forged,
    FrameParser,
    Malformed,
    Seal,
    decode,
    encode,
    preamble,
)

KEY = b"k" * 32
bodies = st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.integers(), max_size=4).map(
    lambda fields: {**fields, "t": "say"}
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def read(parser: FrameParser, data: bytes, cuts: list[int]) -> list[tuple[bytes, bytes]]:
    frames = []
    for piece in pieces(data, cuts):
        parser.feed(piece)
        while (frame := parser.take()) is not None:
            frames.append(frame)
        assert parser.waiting_bytes <= 9 + 36 + parser.limit + len(piece)
    return frames


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6), st.integers(0, 64))
def test_any_bytes_in_any_pieces_raise_nothing_but_malformed(
    data: bytes, cuts: list[int], limit: int
) -> None:
    for side, head in ((CALLS, b""), (CALLS, preamble(CALLS)), (b"", b"")):
        words = ""
        try:
            for frame in read(FrameParser(side, limit=limit), head + data, cuts):
                Seal(KEY, sends=TO_NODE).open(frame)
        except Malformed as error:
            words = str(error)
        assert words.isprintable()


@given(st.lists(bodies, max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_what_one_side_seals_the_other_opens_whatever_the_pieces(sent: list[Any], cuts: list[int]) -> None:
    node, head = Seal(KEY, sends=TO_HEAD), Seal(KEY, sends=TO_NODE)
    data = preamble(CALLS) + b"".join(node.close(encode(body)) for body in sent)
    assert [head.open(frame) for frame in read(FrameParser(CALLS), data, cuts)] == sent


@given(bodies, st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_never_gives_a_body(body: dict[str, Any], place: int, change: int) -> None:
    data = bytearray(Seal(KEY, sends=TO_HEAD).close(encode(body)))
    data[place % len(data)] ^= change
    parser = FrameParser(limit=PROVEN_BYTES)
    try:
        parser.feed(bytes(data))
        frame = parser.take()
    except Malformed:
        return  # the length has become too large
    if frame is not None:
        with pytest.raises(Forged):
            Seal(KEY, sends=TO_NODE).open(frame)


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [0, 1, 0]])
def test_a_repeated_a_lost_and_a_late_frame_are_forged(order: list[int]) -> None:
    node, head = Seal(KEY, sends=TO_HEAD), Seal(KEY, sends=TO_NODE)
    frames = [node.close(encode({"t": "say", "n": n})) for n in range(3)]
    *before, last = [(frames[number][4:36], frames[number][36:]) for number in order]
    for frame in before:
        head.open(frame)
    with pytest.raises(Forged):
        head.open(last)


def test_a_frame_that_is_sent_back_is_forged() -> None:
    node = Seal(KEY, sends=TO_HEAD)
    frame = node.close(encode({"t": "ping"}))
    with pytest.raises(Forged):
        node.open((frame[4:36], frame[36:]))


def test_a_large_frame_is_refused_by_its_length_before_its_bytes_are_there() -> None:
    parser = FrameParser(limit=4096)
    parser.feed((4097).to_bytes(4, "big"))
    with pytest.raises(Malformed, match="4097 bytes where 4096"):
        parser.take()
    assert parser.waiting_bytes == 0


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-x", b"\x16\x03\x01", b"u", b"unisono<\x01"]
)
def test_the_first_wrong_byte_reports_a_stranger(data: bytes) -> None:
    parser = FrameParser(CALLS)
    if data == b"u":
        parser.feed(data)
        assert not parser.began
        return
    with pytest.raises(ForeignProtocol, match="it begins with `"):
        parser.feed(data)


def test_a_different_version_is_distinguished_from_a_stranger() -> None:
    with pytest.raises(DifferentVersion, match="version 9"):
        FrameParser(ANSWERS).feed(ANSWERS + b"\x09")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b"{}", b'{"t":1}', b"\xff", b"[" * 4000, b'{"t":"a","n":' + b"9" * 4500 + b"}"]
)
def test_what_is_not_an_object_with_a_type_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


def test_a_message_above_the_bound_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="8388608 is the maximum"):
        encode({"t": "say", "m": "x" * PROVEN_BYTES})
    assert json.loads(encode({"t": "say", "m": "\ud800"}))["m"] == "\ud800"

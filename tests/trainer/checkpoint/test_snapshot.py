"""Properties of what a rank keeps in memory. Run: pytest tests/trainer/checkpoint/test_snapshot.py"""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.checkpoint.snapshot import (
    SlotLayout,
    Slots,
    StepSnapshot,
    TensorEntry,
    needed_bytes,
    read_slots,
    slot_text,
)
from unisono.trainer.checkpoint.writer import ITEM_BYTES

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> SlotLayout:
    groups = ("trainable", "optimizer-adamw")
    entries = []
    for number in range(draw(st.integers(0, 6))):
        whole = draw(SHAPES)
        shape = tuple(draw(st.integers(0, n)) for n in whole)
        offsets = tuple(w - s for w, s in zip(whole, shape, strict=True))
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        entries.append(
            TensorEntry(draw(st.sampled_from(groups)), f"tensor {number}", dtype, shape, whole, offsets)
        )
    return SlotLayout(groups, tuple(entries))


class Rank:
    """Writes states of a layout; each is a function of its number."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self.memory = memoryview(
            bytearray(needed_bytes(layout, text_bytes=len(slot_text(self.values(0), self.lines(0)))))
        )
        self.slots = Slots(self.memory, layout)

    def values(self, number: int) -> dict[str, Any]:
        return {"train": {"step": number, "loss": number / 7, "odd": float("inf")}, "pair": (number, None)}

    def lines(self, number: int) -> list[dict[str, Any]]:
        return [{"step": number, "loss": number / 7}]

    def content(self, number: int) -> bytes:
        return random.Random(number).randbytes(self.layout.tensor_bytes)

    def write(self, number: int, *, until: int | None = None) -> None:
        """Writes a state as a rank does; a death comes after so many bytes of its tensors, or
        never.
        """
        writing = self.slots.begin(number)
        content = self.content(number)
        if until is not None:
            writing.tensors[:until] = content[:until]
            return
        for end in {len(content) // 2, len(content)}:
            writing.tensors[:end] = content[:end]
        writing.note(len(content) // 2)
        writing.note(len(content))
        self.slots.commit(writing, step=number, text=slot_text(self.values(number), self.lines(number)))

    def check(self, kept: StepSnapshot) -> None:
        """It is the state of its number, to the last bit."""
        assert kept.step == kept.sequence
        assert bytes(kept.tensors) == self.content(kept.step)
        assert (kept.values, kept.lines) == (self.values(kept.step), self.lines(kept.step))
        assert kept.layout == self.layout
        parts = [part for group in kept.layout.groups for part in kept.parts(group)]
        assert {part.name: len(part.read()) for part in parts} == {
            e.name: e.bytes for e in self.layout.entries
        }
        assert {part.name for part in parts if part.whole is not None} == {
            e.name for e in self.layout.entries if e.whole != e.shape
        }


@given(layouts(), st.integers(1, 9))
def test_the_newest_two_states_are_read_back_as_they_were_written(layout: SlotLayout, count: int) -> None:
    rank = Rank(layout)
    assert read_slots(rank.memory) == ([], [])
    for number in range(count):
        rank.write(number)
    found, damage = read_slots(rank.memory)
    assert [kept.step for kept in found] == [*range(count - 1, max(-1, count - 3), -1)]
    assert damage == []
    for kept in found:
        rank.check(kept)


@given(layouts(), st.integers(1, 9), st.data())
def test_a_death_while_a_state_is_written_leaves_the_one_before(
    layout: SlotLayout, count: int, data: st.DataObject
) -> None:
    rank = Rank(layout)
    for number in range(count):
        rank.write(number)
    rank.write(count, until=data.draw(st.integers(0, layout.tensor_bytes)))
    found, damage = read_slots(rank.memory)
    assert [kept.step for kept in found] == [count - 1]
    assert damage == []
    rank.check(found[0])


@given(layouts(), st.integers(2, 9), st.data())
def test_a_flipped_bit_is_found_and_the_other_slot_is_whole(
    layout: SlotLayout, count: int, data: st.DataObject
) -> None:
    rank = Rank(layout)
    for number in range(count):
        rank.write(number)
    rank.memory[data.draw(st.integers(0, len(rank.memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found, damage = read_slots(rank.memory)
    assert len(found) + len(damage) == 2
    assert found
    for kept in found:  # a bit where nothing stands changes nothing
        rank.check(kept)


@given(layouts(), st.integers(2, 9), st.data())
def test_a_flipped_bit_where_something_stands_is_refused(
    layout: SlotLayout, count: int, data: st.DataObject
) -> None:
    rank = Rank(layout)
    for number in range(count):
        rank.write(number)
    (newest, _), _ = read_slots(rank.memory)
    used = 128 + len(layout.to_bytes()) + layout.tensor_bytes + len(slot_text(newest.values, newest.lines))
    place = data.draw(st.one_of(st.integers(0, 71), st.integers(128, used - 1)))
    rank.memory[(newest.sequence % 2) * (len(rank.memory) // 2) + place] ^= 1 << data.draw(st.integers(0, 7))
    found, damage = read_slots(rank.memory)
    assert [kept.step for kept in found] == [newest.step - 1]
    assert len(damage) == 1


@given(st.binary(max_size=20_000))
def test_memory_of_something_else_is_not_a_state(content: bytes) -> None:
    assert read_slots(memoryview(content))[0] == []


def test_a_text_that_grew_too_long_is_reported_before_it_is_written() -> None:
    rank = Rank(SlotLayout(("trainable",), ()))
    assert rank.slots.fits(b" " * 60_000)
    assert not rank.slots.fits(b" " * 100_000)

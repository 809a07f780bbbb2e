"""The newest steps of a rank in shared memory that outlives it: layout, writing and reading.

Torch-free.

Two slots are written alternately, so that at least one of them is complete whenever the rank dies.

    slot = head, layout, tensors, text          each aligned to 64 bytes
    head     sequence, step, sizes and XXH3-128 digest of the rest, and a check of the head itself
    layout   JSON: the position of each tensor; written once, when the slots are created
    tensors  as in a checkpoint file
    text     JSON: the plain values of the step, and its lines in metrics.jsonl

The head is cleared before a slot is written, and written last. So an incomplete slot has no head; a
slot whose digest does not match its head is damaged, and is refused.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import xxhash

from unisono.trainer.checkpoint.writer import ITEM_BYTES, TensorPart, decode_values, encode_values

SLOTS = 2
ALIGNMENT = 64
_PAGE_BYTES = 4096
_SPARE_TEXT_BYTES = 1 << 16  # values grow: the list of skipped steps, evaluation metrics
_MAGIC = b"unisono1"
_HEAD = struct.Struct("<8sQQQQQ16s")
_CHECK = struct.Struct("<Q")
_HEAD_BYTES = ALIGNMENT * 2


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, or this rank's part of one.

    Attributes:
        shape: the shape of this part.
        whole: the shape of the full tensor.
        offsets: where the part begins in the full tensor.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold the rest of the tensor."""
        return self.whole != self.shape


@dataclass(frozen=True)
class SlotLayout:
    """The position of each tensor in a slot.

    Attributes:
        groups: all groups, including empty ones.
        entries: the tensors, in order.
        starts: the offset of each tensor, in bytes from the first.
        tensor_bytes: the size of all tensors with padding.
    """

    groups: tuple[str, ...]
    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...] = field(init=False)
    tensor_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        starts, end = [], 0
        for entry in self.entries:
            starts.append(end)
            end = _aligned(end + entry.bytes)
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "tensor_bytes", end)

    def to_bytes(self) -> bytes:
        """The serialized layout."""
        rows = [[e.group, e.name, e.dtype, e.shape, e.whole, e.offsets] for e in self.entries]
        text = json.dumps({"groups": self.groups, "entries": rows}, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % ALIGNMENT)

    @classmethod
    def from_bytes(cls, data: bytes) -> "SlotLayout":
        """The inverse of to_bytes.

        Raises:
            KeyError, TypeError, ValueError: if it is not valid.
        """
        value = json.loads(data)
        entries = tuple(
            TensorEntry(group, name, dtype, tuple(shape), tuple(whole), tuple(offsets))
            for group, name, dtype, shape, whole, offsets in value["entries"]
        )
        return cls(tuple(value["groups"]), entries)


@dataclass(frozen=True)
class StepSnapshot:
    """A complete step read from a slot.

    Attributes:
        sequence: number of snapshots before; equal on all ranks for the same state.
        layout: the position of each tensor.
        tensors: all tensors; not a copy.
        values: the non-tensor values, for state.json.
    """

    sequence: int
    step: int
    layout: SlotLayout
    tensors: memoryview = field(repr=False)
    values: Mapping[str, object] = field(repr=False)
    lines: list[dict[str, object]]

    def parts(self, group: str) -> list[TensorPart]:
        """The tensors of a group, as parts for a file."""
        placed = zip(self.layout.entries, self.layout.starts, strict=True)
        return [self._part(entry, start) for entry, start in placed if entry.group == group]

    def _part(self, entry: TensorEntry, start: int) -> TensorPart:
        content = self.tensors[start : start + entry.bytes]
        window = {"whole": entry.whole, "offsets": entry.offsets} if entry.is_part else {}
        return TensorPart(entry.name, entry.dtype, entry.shape, lambda: content, **window)


class Slots:
    """The slots of a rank, for writing.

    Attributes:
        tensors: for each slot, the memory for the tensors.
    """

    def __init__(self, memory: memoryview, layout: SlotLayout) -> None:
        """Initializes both slots; their previous content is lost.

        Args:
            memory: of the size that `needed_bytes` gives.
            layout: the position of each tensor.
        """
        text = layout.to_bytes()
        self.layout = layout
        self._begin_of_text = _HEAD_BYTES + len(text) + layout.tensor_bytes
        half = len(memory) // SLOTS
        self._slots = [memory[i * half : (i + 1) * half] for i in range(SLOTS)]
        self._primed = xxhash.xxh3_128(text)
        self._layout_bytes = len(text)
        self.tensors: list[memoryview] = []
        for slot in self._slots:
            _clear_head(slot)
            slot[_HEAD_BYTES : _HEAD_BYTES + len(text)] = text
            self.tensors.append(slot[_HEAD_BYTES + len(text) : self._begin_of_text])

    def begin(self, sequence: int) -> "SlotWrite":
        """Clears the head of the next slot; the other slot keeps the previous step."""
        number = sequence % SLOTS
        _clear_head(self._slots[number])
        return SlotWrite(number, sequence, self.tensors[number], self._primed.copy())

    def fits(self, text: bytes) -> bool:
        """Whether the text fits into a slot."""
        return self._begin_of_text + len(text) <= len(self._slots[0])

    def commit(self, writing: "SlotWrite", *, step: int, text: bytes) -> None:
        """Writes the text and, last, the head. All tensors must have been noted.

        Args:
            writing: from `begin`.
            text: from `slot_text`; it must fit.
        """
        assert writing.noted_bytes == self.layout.tensor_bytes, "a slot is complete or has no head"
        slot = self._slots[writing.number]
        slot[self._begin_of_text : self._begin_of_text + len(text)] = text
        writing.digest.update(text)
        sizes = (self._layout_bytes, self.layout.tensor_bytes, len(text))
        head = _HEAD.pack(_MAGIC, writing.sequence, step, *sizes, writing.digest.digest())
        slot[: _HEAD.size + _CHECK.size] = head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


@dataclass
class SlotWrite:
    """A slot that is being written.

    Attributes:
        sequence: the number of the snapshot.
        noted_bytes: number of digested bytes of the tensors.
    """

    number: int
    sequence: int
    tensors: memoryview
    digest: xxhash.xxh3_128
    noted_bytes: int = 0

    def note(self, end: int) -> None:
        """Digests everything written up to `end`, best while it is still in the CPU cache."""
        self.digest.update(self.tensors[self.noted_bytes : end])
        self.noted_bytes = end


def needed_bytes(layout: SlotLayout, *, text_bytes: int) -> int:
    """The size of the memory for both slots, with spare space for a growing text."""
    slot = _HEAD_BYTES + len(layout.to_bytes()) + layout.tensor_bytes + 2 * text_bytes + _SPARE_TEXT_BYTES
    return SLOTS * (slot + -slot % _PAGE_BYTES)


def slot_text(values: Mapping[str, object], lines: Sequence[Mapping[str, object]]) -> bytes:
    """The text of a slot.

    Args:
        values: as `state_text` takes them.
        lines: of metrics.jsonl, without NaN.

    Raises:
        TypeError: if the values hold an unsupported type.
    """
    body = {"values": encode_values(values, "state"), "lines": list(lines)}
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def read_slots(memory: memoryview) -> tuple[list[StepSnapshot], list[str]]:
    """The complete steps in a rank's memory, newest first; and the damage found in complete slots.

    Memory that was never written, and an incomplete slot, do not count as damage.
    """
    half = len(memory) // SLOTS
    snapshots: list[StepSnapshot] = []
    damage: list[str] = []
    for number in range(SLOTS):
        slot = memory[number * half : (number + 1) * half]
        try:
            kept = _read_slot(slot)
        except (KeyError, TypeError, ValueError) as error:
            damage.append(str(error))
        else:
            snapshots += [kept] if kept is not None else []
    return sorted(snapshots, key=lambda kept: -kept.sequence), damage


def _read_slot(slot: memoryview) -> StepSnapshot | None:
    if len(slot) < _HEAD_BYTES or not any(slot[:_HEAD_BYTES]):
        return None
    head = bytes(slot[: _HEAD.size])
    (check,) = _CHECK.unpack_from(slot, _HEAD.size)
    if check != xxhash.xxh3_64_intdigest(head):
        raise ValueError("the head of a slot does not match its checksum")
    magic, sequence, step, *sizes, digest = _HEAD.unpack(head)
    if magic != _MAGIC or _HEAD_BYTES + sum(sizes) > len(slot):
        raise ValueError("the head of a slot has an unknown format")
    body = slot[_HEAD_BYTES : _HEAD_BYTES + sum(sizes)]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ValueError(f"the snapshot of step {step} does not match its digest")
    layout = SlotLayout.from_bytes(bytes(body[: sizes[0]]))
    text = json.loads(bytes(body[sizes[0] + sizes[1] :]))
    return StepSnapshot(
        sequence,
        step,
        layout,
        body[sizes[0] : sizes[0] + sizes[1]],
        decode_values(text["values"]),
        text["lines"],
    )


def _clear_head(slot: memoryview) -> None:
    slot[:_HEAD_BYTES] = bytes(_HEAD_BYTES)


def _aligned(n_bytes: int) -> int:
    return n_bytes + -n_bytes % ALIGNMENT

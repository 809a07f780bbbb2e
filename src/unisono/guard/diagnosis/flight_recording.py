"""One recording of torch's flight recorder: JSON, or the pickle that NCCL's watchdog leaves.

Foreign data: every field is checked and bounded.
"""

import json
import pickletools
import re
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unisono.base.text import one_line
from unisono.guard.diagnosis.line_prefixes import who_is_file
from unisono.guard.diagnosis.lines import shown
from unisono.guard.watch.rank_dumps import GroupProgress

MOST_BYTES = 256 << 20
"""A longer file is not the recording of one rank."""
MOST_RANKS = 100_000
_PICKLE = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\}")
_FIELDS = re.compile(rb"collective_seq_id|pg_status|pg_config|comm_lib_version|nccl_version|profiling_name")
_SNIFF_BYTES = 4096
_LAST_NUMBER = re.compile(r"(\d{1,6})(?:\.(?:json|pkl|pickle|bin|txt|dump|gz))*$", re.IGNORECASE)
_NAME_CHARS = 120
_MOST_SIZES = 32
_NOT_USERS = ("site-packages/", "dist-packages/", "/torch/", "lib/python3", "<frozen", "<string>")


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective of one rank.

    Attributes:
        group: its process group, as "0:default_pg".
        inputs: elements that go in; outputs: that come out.
        sizes: of the tensors that go in, as "[[4, 512]]".
        dtypes: of those, as "BFloat16".
        state: scheduled, started or completed; gloo leaves it at "scheduled" forever.
        place: the user's line that called it, as "train.py:88 in step"; empty: not recorded.
        time: seconds since 1970 at which it was called; None: not recorded.
    """

    group: str
    seq: int
    kind: str
    backend: str
    inputs: int
    outputs: int
    sizes: str
    dtypes: str
    state: str
    place: str = ""
    time: float | None = None

    def __str__(self) -> str:
        return f"{self.kind} #{self.seq} {self.sizes}".rstrip()


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording of one rank.

    Attributes:
        name: the file's, as it is shown.
        rank: whose; None: the name does not say.
        groups: how far it is in each group, by "0:default_pg".
        members: the ranks of a group, where they are recorded.
        entries: by group and number.
    """

    name: str
    rank: int | None
    groups: Mapping[str, GroupProgress]
    members: Mapping[str, tuple[int, ...]]
    entries: Mapping[tuple[str, int], FlightEntry]

    def entry(self, group: str, seq: int) -> FlightEntry | None:
        """That collective, where the recorder still has it."""
        return self.entries.get((group, seq))

    @property
    def waits(self) -> dict[str, int]:
        """By group, the first collective that was begun and is not completed."""
        return {name: group.first for name, group in self.groups.items() if group.waits}


class NotARecordingError(ValueError):
    """A file that looks like a recording and cannot be read as one; the message says why."""


def is_recording(head: bytes) -> bool:
    """Whether a file that begins so is a recording.

    Args:
        head: its first 4 KiB or more.
    """
    head = head[:_SNIFF_BYTES]
    begins = head.lstrip()[:1] == b"{" or _PICKLE.match(head)
    return bool(begins and _FIELDS.search(head))


def read_recording(name: str, data: bytes) -> Recording:
    """The recording that a file holds.

    Args:
        name: the file's; the rank is in it.
        data: all of its bytes.

    Raises:
        NotARecordingError: if it is none, is torn, or is a pickle that asks for more than plain
            values.
    """
    if len(data) > MOST_BYTES:
        raise NotARecordingError(
            f"{one_line(name)} has {len(data) >> 20} MiB; a recording has at most {MOST_BYTES >> 20}"
        )
    try:
        value = read_pickle(data) if data[:1] == b"\x80" else json.loads(data.decode("utf-8", "replace"))
        return _recording(name, value)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise NotARecordingError(
            f"{one_line(name)} is not a readable flight recording: {one_line(str(error), limit=300)}"
        ) from error


def rank_of_name(name: str) -> int | None:
    """The rank of a recording, by the file's name: nccl_trace_rank_3, flight-rank-00003.json,
    dump.3.
    """
    rank = who_is_file(name).rank
    if rank is None and (match := _LAST_NUMBER.search(name)):
        rank = int(match[1])
    return rank


def _recording(name: str, value: Mapping[str, Any]) -> Recording:
    raw = [entry for entry in value.get("entries") or () if not entry.get("is_p2p")]
    entries: dict[tuple[str, int], FlightEntry] = {}
    labels: dict[str, str] = {}
    for one in raw:
        entry = _entry(one)
        labels[str(one["pg_id"])[:_NAME_CHARS]] = entry.group
        entries.setdefault((entry.group, entry.seq), entry)  # of coalesced ones the first
    groups = dict(_groups(value.get("pg_status") or {}, labels))
    # Before torch 2.4 there is no status.
    for (label, seq), entry in entries.items() if not groups else ():
        old = groups.get(label, GroupProgress(label, 0, None))
        done = seq if entry.state == "completed" else 0
        groups[label] = GroupProgress(label, max(old.enqueued, seq), max(old.completed or 0, done) or None)
    return Recording(
        name, rank_of_name(name), groups, _members(value.get("pg_config") or {}, groups), entries
    )


def _groups(status: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[tuple[str, GroupProgress]]:
    for number, one in status.items():
        group = GroupProgress.of(str(number), one)
        label = labels.get(str(number)) or ("0:default_pg" if str(number) == "0" else f"{number}:")
        if group.enqueued > 0:
            yield one_line(label, limit=_NAME_CHARS), group


def _members(config: Mapping[str, Any], groups: Mapping[str, GroupProgress]) -> dict[str, tuple[int, ...]]:
    members = {}
    for label in groups:
        name = label.partition(":")[0]
        ranks = str((config.get(name) or {}).get("ranks") or "")[: 8 * MOST_RANKS]
        numbers = tuple(sorted({int(number) for number in re.findall(r"\d{1,6}", ranks)}))
        if numbers:
            members[label] = numbers
    return members


def _entry(one: Mapping[str, Any]) -> FlightEntry:
    backend, _, kind = str(one["profiling_name"])[:_NAME_CHARS].rpartition(":")
    inputs, outputs = _sizes(one.get("input_sizes")), _sizes(one.get("output_sizes"))
    created = one.get("time_created_ns")
    return FlightEntry(
        group=one_line(
            ":".join(str(part)[:_NAME_CHARS] for part in one["process_group"][:2]), limit=_NAME_CHARS
        ),
        seq=int(one["collective_seq_id"]),
        kind=one_line(kind),
        backend=one_line(backend),
        inputs=_elements(inputs),
        outputs=_elements(outputs),
        sizes=str(inputs) if inputs else "",
        dtypes=one_line(
            ",".join(str(name)[:20] for name in (one.get("input_dtypes") or ())[:_MOST_SIZES]),
            limit=_NAME_CHARS,
        ),
        state=one_line(str(one.get("state") or "")[:20]),
        place=_place(one.get("frames")),
        time=created / 1e9 if isinstance(created, int) and created > 0 else None,
    )


def _sizes(value: Any) -> list[list[int]]:
    return [[int(dim) for dim in tensor[:_MOST_SIZES]] for tensor in (value or ())[:_MOST_SIZES]]


def _elements(sizes: list[list[int]]) -> int:
    total = 0
    for tensor in sizes:
        count = 1
        for dim in tensor:
            count *= dim
        total += count
    return total


def _place(frames: Any) -> str:
    """The innermost line that is not torch's or another package's."""
    for frame in (frames or ())[:200]:
        file = str(frame.get("filename") or "")[:500]
        if file and not any(part in file for part in _NOT_USERS):
            return shown(
                f"{file.rpartition('/')[2]}:{int(frame.get('line') or 0)} in"
                f" {one_line(str(frame.get('name'))[:100])}"
            )
    return ""


MOST_STEPS: Final = 50_000_000
_PICKLE_MARK: Final = object()


class RefusedPickleError(ValueError):
    """A pickle that is broken, or asks for more than dict, list, tuple, str, int, float, bool and
    None.
    """


def read_pickle(data: bytes) -> Any:
    """The value that a pickle holds.

    Raises:
        RefusedPickleError: if it is broken or asks for anything else; the message says what it asks
            for.
    """
    reader = _PickleReader(data)
    try:
        return reader.read()
    except (
        IndexError,
        KeyError,
        struct.error,
        UnicodeDecodeError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        if isinstance(error, RefusedPickleError):
            raise
        raise RefusedPickleError(f"byte {reader.place}: the pickle is broken or cut short") from error


class _PickleReader:
    """The stack machine of pickle, of which only the harmless steps are built."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, steps = self._data, _PICKLE_STEPS
        for _ in range(MOST_STEPS):
            code = data[self.place]
            self.place += 1
            if code == 0x2E:  # STOP
                value = self._stack.pop()
                if value is _PICKLE_MARK:
                    raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
                return value
            step = steps.get(code)
            if step is None:
                raise RefusedPickleError(self._refusal(code))
            step(self)
        raise RefusedPickleError(f"it has more than {MOST_STEPS} steps")

    def take(self, form: str) -> Any:
        """The next number of that form."""
        size = struct.calcsize(form)
        (value,) = struct.unpack_from(form, self._data, self.place)
        self.place += size
        return value

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        if count < 0 or self.place + count > len(self._data):
            raise RefusedPickleError(f"byte {self.place}: the pickle is cut short")
        self.place += count
        return self._data[self.place - count : self.place]

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self._stack.append(value)

    def since_mark(self) -> list[Any]:
        """The values above the last mark, which goes with them."""
        stack = self._stack
        mark = len(stack) - 1
        while stack[mark] is not _PICKLE_MARK:
            mark -= 1
            if mark < 0:
                raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
        values = stack[mark + 1 :]
        del stack[mark:]
        return values

    def pop(self) -> Any:
        """The value on top."""
        value = self._stack.pop()
        if value is _PICKLE_MARK:
            raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
        return value

    def extend(self, items: list[Any]) -> None:
        """Adds items to the list on top."""
        top = self._stack[-1]
        if type(top) is not list:
            raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
        top.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Adds keys and values to the dict on top."""
        top = self._stack[-1]
        if type(top) is not dict or len(items) % 2:
            raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
        top.update(_pickled_pairs(items))

    def tuple_of(self, count: int) -> None:
        """Makes a tuple of the values on top."""
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def keep(self, number: int) -> None:
        """Remembers the value on top."""
        self._memo[number] = self._stack[-1]

    def remember(self) -> None:
        """Remembers it under the next number."""
        self.keep(len(self._memo))

    def recall(self, number: int) -> None:
        """Puts a remembered value on the stack."""
        self.push(self._memo[number])

    def long(self, form: str) -> None:
        """A whole number of any length."""
        self.push(int.from_bytes(self.bytes(self.take(form)), "little", signed=True))

    def text(self, form: str) -> None:
        """A string."""
        self.push(self.bytes(self.take(form)).decode("utf-8", "surrogatepass"))

    def _refusal(self, code: int) -> str:
        opcode = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
        asks = opcode.name if opcode else f"0x{code:02x}"
        if asks in ("GLOBAL", "INST"):
            names = self._data[self.place : self.place + 200].split(b"\n")[:2]
            asks += " " + ".".join(name.decode("utf-8", "replace") for name in names)
        return (
            f"byte {self.place - 1}: it asks for {asks}; a recording contains only plain values, and none of"
            " it was executed"
        )


def _pickled_pairs(items: list[Any]) -> dict[Hashable, Any]:
    keys = items[::2]
    if not all(isinstance(key, str | int | float | None) for key in keys):
        raise RefusedPickleError(
            "a key is not a plain value"
        )  # to hash a tuple of a million tuples ends Python
    return dict(zip(keys, items[1::2], strict=True))


_PICKLE_STEPS: Final[dict[int, Callable[[_PickleReader], None]]] = {
    0x80: lambda r: r.take("<B"),  # PROTO
    0x95: lambda r: r.take("<Q"),  # FRAME
    ord("("): lambda r: r.push(_PICKLE_MARK),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("J"): lambda r: r.push(r.take("<i")),
    ord("K"): lambda r: r.push(r.take("<B")),
    ord("M"): lambda r: r.push(r.take("<H")),
    0x8A: lambda r: r.long("<B"),
    0x8B: lambda r: r.long("<i"),
    ord("G"): lambda r: r.push(r.take(">d")),
    ord("X"): lambda r: r.text("<I"),
    0x8C: lambda r: r.text("<B"),
    0x8D: lambda r: r.text("<Q"),
    ord("]"): lambda r: r.push([]),
    ord("}"): lambda r: r.push({}),
    ord(")"): lambda r: r.push(()),
    ord("l"): lambda r: r.push(r.since_mark()),
    ord("t"): lambda r: r.push(tuple(r.since_mark())),
    ord("d"): lambda r: r.push(_pickled_pairs(r.since_mark())),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("a"): lambda r: r.extend([r.pop()]),
    ord("e"): lambda r: r.extend(r.since_mark()),
    ord("s"): lambda r: r.set_items([r.pop(), r.pop()][::-1]),
    ord("u"): lambda r: r.set_items(r.since_mark()),
    ord("q"): lambda r: r.keep(r.take("<B")),
    ord("r"): lambda r: r.keep(r.take("<I")),
    0x94: lambda r: r.remember(),
    ord("h"): lambda r: r.recall(r.take("<B")),
    ord("j"): lambda r: r.recall(r.take("<I")),
}

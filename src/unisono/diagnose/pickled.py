"""Reads a pickle that holds plain values, and refuses all others: nothing in it can be imported, made or called here, since this knows no such step.

Dumps of NCCL's flight recorder are pickles, and come from anybody.
"""

import pickletools
import struct
from collections.abc import Callable, Hashable
from typing import Any, Final

MOST_STEPS: Final = 50_000_000
_MARK: Final = object()


class RefusedPickleError(ValueError):
    """A pickle that is broken, or asks for more than dict, list, tuple, str, int, float, bool and None."""


def read_pickle(data: bytes) -> Any:
    """The value that a pickle holds.

    Raises:
        RefusedPickleError: if it is broken or asks for anything else; the message says what it asks for.
    """
    reader = _Reader(data)
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


class _Reader:
    """The stack machine of pickle, of which only the harmless steps are built."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, steps = self._data, _STEPS
        for _ in range(MOST_STEPS):
            code = data[self.place]
            self.place += 1
            if code == 0x2E:  # STOP
                value = self._stack.pop()
                if value is _MARK:
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
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise RefusedPickleError(f"byte {self.place - 1}: the pickle is broken")
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def pop(self) -> Any:
        """The value on top."""
        value = self._stack.pop()
        if value is _MARK:
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
        top.update(_pairs(items))

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
        known = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
        asks = known.name if known else f"0x{code:02x}"
        if asks in ("GLOBAL", "INST"):
            names = self._data[self.place : self.place + 200].split(b"\n")[:2]
            asks += " " + ".".join(name.decode("utf-8", "replace") for name in names)
        return f"byte {self.place - 1}: it asks for {asks}; a recording holds plain values only, and nothing of it was run"


def _pairs(items: list[Any]) -> dict[Hashable, Any]:
    keys = items[::2]
    if not all(isinstance(key, str | int | float | None) for key in keys):
        raise RefusedPickleError("a key is no plain value")  # to hash a tuple of a million tuples ends Python
    return dict(zip(keys, items[1::2], strict=True))


_STEPS: Final[dict[int, Callable[[_Reader], None]]] = {
    0x80: lambda r: r.take("<B"),  # PROTO
    0x95: lambda r: r.take("<Q"),  # FRAME
    ord("("): lambda r: r.push(_MARK),
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
    ord("d"): lambda r: r.push(_pairs(r.since_mark())),
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

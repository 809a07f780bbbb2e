"""A queue from the channel's thread to a front, with a file descriptor that is readable while something waits."""

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Thread-safe. `take` empties it; `fileno` can be selected on together with pipes of ranks."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._readable, self._writable = os.pipe()
        self._closed = False

    def put(self, item: Item) -> None:
        """Adds an item; the descriptor becomes readable."""
        with self._changed:
            if not self._items and not self._closed:
                os.write(self._writable, b"!")
            self._items.append(item)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Item]:
        """All that waits, in order; waits for the first until `timeout_s` is over, then gives an empty list."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout=max(0.0, timeout_s))
            items = list(self._items)
            if items and not self._closed:
                os.read(self._readable, 1)
            self._items.clear()
            return items

    def fileno(self) -> int:
        """The descriptor. Nobody but `take` reads from it."""
        return self._readable

    def close(self) -> None:
        """Gives the descriptors back; what waits can still be taken."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for fd in (self._readable, self._writable):
                    with contextlib.suppress(OSError):
                        os.close(fd)
            self._changed.notify_all()

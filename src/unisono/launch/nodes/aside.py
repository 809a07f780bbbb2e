"""Work that takes long, in a thread of its own, while the front listens to the other nodes."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from unisono.events import Message

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """Starts at once. What the work shows waits in `shown`, so that only the front's own thread speaks to people.

    The thread is a daemon: a front that ends does not wait for it, and the task that it may have started ends with it.
    """

    def __init__(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outcome: list[Result] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), name="aside", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def shown(self) -> list[Message]:
        """What the work has shown since the last call."""
        found = []
        while not self._messages.empty():
            found.append(self._messages.get())
        return found

    def result(self) -> Result:
        """What came of it; raises what the work raised."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._outcome[0]

    def _run(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        try:
            self._outcome.append(work(self._messages.put))
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the front's thread
            self._error.append(error)

"""The one background thread in which all connections of this process live."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """An asyncio loop in a daemon thread. It starts with its first user and ends with its last."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="unisono.control", daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        """One user less. The last one waits until the thread is over."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, run there and waited for here."""
        assert self._loop is not None, "enter first"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def post(self, work: Callable[..., object], *args: object) -> None:
        """Runs a function there, later, in the order of posting. Does nothing once the thread is over."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work, *args)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


SHARED = LoopThread()

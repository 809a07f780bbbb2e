"""Small file operations in order on a background thread, for callers that must not wait for a disk."""

import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]

_REPORTED_AFTER_S = 5.0


class BackgroundThread:
    """Runs work soon, or not at all if the disk fails or hangs; callers never wait, and a failure is reported once.

    The thread is a daemon: work that is not done when the process exits stays undone.

    Attributes:
        thread_id: the kernel's id of the thread; 0 before the first work.
    """

    def __init__(
        self, name: str, on_failure: Callable[[str], None] = lambda _: None, *, most: int = 1000
    ) -> None:
        """Starts no thread yet.

        Args:
            name: of the thread, as shown by process viewers.
            on_failure: called once, from any thread, when work fails or does not finish.
            most: limit of the queue; further work is dropped.
        """
        self.thread_id = 0
        self._name = name
        self._on_failure = on_failure
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._since: float | None = None  # when the current work began
        self._dropped = 0
        self._is_reported = self._is_over = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return self._since is None and not self._waiting

    def do(self, work: Work) -> bool:
        """Queues work; False if it is dropped. Never waits for the disk."""
        with self._changed:
            taken = not self._is_over and len(self._waiting) < self._most
            if taken:
                self._waiting.append(work)
                self._changed.notify_all()
            else:
                self._dropped += 1
            if self._thread is None and taken:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            since = self._since
        if since is not None and (idle_s := time.monotonic() - since) > _REPORTED_AFTER_S:
            self._report(f"the storage has not responded for {idle_s:.0f} s")
        return taken

    def finish(self, limit_s: float) -> bool:
        """Waits until all work is done, at most `limit_s` seconds; False if some is left. More work may follow."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.is_idle, limit_s)
        if not done:
            self._report(
                f"the storage does not respond, and {self._dropped + len(self._waiting) + 1} writes are lost"
            )
        return done

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                work, self._since = self._waiting.popleft(), time.monotonic()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the edge of the thread: reported, and the thread takes no more work
                self._give_up(error)
            finally:
                with self._changed:
                    self._since = None
                    self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Stops after a failure, e.g. a full disk: writes after a gap are of little use."""
        with self._changed:
            self._is_over = True
            self._dropped += 1 + len(self._waiting)
            self._waiting.clear()
        self._report((isinstance(error, OSError) and error.strerror) or repr(error))

    def _report(self, why: str) -> None:
        with self._changed:
            first, self._is_reported = not self._is_reported, True
        if first:
            self._on_failure(why)

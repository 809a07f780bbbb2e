"""Small work on files, done in order by a thread of its own, for somebody who must not wait for a disk."""

import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]

_REPORTED_AFTER_S = 5.0


class BackgroundThread:
    """What is given to it is done soon, or, where the disk fails or hangs, not at all; nobody waits, and it is told once.

    The thread holds up nobody's end: what is not done by then stays undone.

    Attributes:
        thread_id: the kernel's number of the thread; 0 before there is work.
    """

    def __init__(
        self, name: str, on_trouble: Callable[[str], None] = lambda _: None, *, most: int = 1000
    ) -> None:
        """Begins no thread yet.

        Args:
            name: of the thread, for who looks at the process.
            on_trouble: is told once, by any thread, when work fails for the storage's sake, or does not come to an end.
            most: so much may wait; what comes then is missed.
        """
        self.thread_id = 0
        self._name = name
        self._on_trouble = on_trouble
        self._most = most
        self._news = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._since: float | None = None  # when the piece in work was begun
        self._missed = 0
        self._is_told = self._is_over = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was given has been done."""
        return self._since is None and not self._waiting

    def do(self, work: Work) -> bool:
        """Has it done after what was given before; False if it is missed. Never waits for the disk."""
        with self._news:
            taken = not self._is_over and len(self._waiting) < self._most
            if taken:
                self._waiting.append(work)
                self._news.notify_all()
            else:
                self._missed += 1
            if self._thread is None and taken:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            since = self._since
        if since is not None and (idle_s := time.monotonic() - since) > _REPORTED_AFTER_S:
            self._tell(f"the storage does not answer: nothing for {idle_s:.0f} s")
        return taken

    def finish(self, limit_s: float) -> bool:
        """Waits until all is done, at most `limit_s` seconds; False if something was left. More may be given then."""
        with self._news:
            done = self._news.wait_for(lambda: self.is_idle, limit_s)
        if not done:
            self._tell(
                f"the storage does not answer, and {self._missed + len(self._waiting) + 1} writes are lost"
            )
        return done

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting)
                work, self._since = self._waiting.popleft(), time.monotonic()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the edge of the thread: told, and nothing more is done
                self._give_up(error)
            finally:
                with self._news:
                    self._since = None
                    self._news.notify_all()

    def _give_up(self, error: Exception) -> None:
        """A disk that is full or gone: what would be written after a gap is worth little."""
        with self._news:
            self._is_over = True
            self._missed += 1 + len(self._waiting)
            self._waiting.clear()
        self._tell((isinstance(error, OSError) and error.strerror) or repr(error))

    def _tell(self, why: str) -> None:
        with self._news:
            first, self._is_told = not self._is_told, True
        if first:
            self._on_trouble(why)

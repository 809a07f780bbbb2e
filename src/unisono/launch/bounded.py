"""Work of the front on files that may hang: done in a thread of its own, and not waited for when that thread does not move any more."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from unisono.events import Message
from unisono.facts.threads import ThreadLook, look_at_thread

Result = TypeVar("Result")

STUCK_S = 10.0
_POLL_S = 0.2


class Hung(Exception):  # noqa: N818 - named for what happened, as RankDied is
    """Some work on files has not moved for too long. Its thread is left behind.

    Attributes:
        look: the thread.
    """

    def __init__(self, look: ThreadLook | None, seconds: float) -> None:
        self.look = look
        super().__init__(
            f"nothing has moved for {seconds:.0f} s: {look or 'its thread is not seen any more'}"
        )


def unless_stuck(work: Callable[[], Result], *, stuck_s: float = STUCK_S) -> Result:
    """What `work` gives, however long it takes while it moves.

    Args:
        work: to be done; what it raises is raised here.
        stuck_s: seconds without a sign of life after which it is given up.

    Raises:
        Hung: if it does not move.
    """
    running = _Running(work)
    moves, since = None, time.monotonic()
    while not running.done.wait(_POLL_S):
        look = look_at_thread(os.getpid(), running.number)
        if look is None or look.moves != moves:
            moves, since = look.moves if look else None, time.monotonic()
        elif time.monotonic() - since > stuck_s:
            raise Hung(look, stuck_s)
    return running.result()


class RunsDisk:
    """The run's directory, as the front writes into it at the end. Once it has hung nothing more is tried.

    Attributes:
        hung: how it hung, if it did.
    """

    def __init__(self, show: Callable[[Message], None]) -> None:
        self.hung: Hung | None = None
        self._show = show

    def write(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Has it written; None if the storage fails or does not answer, which is said: how a run ended does not depend on it.

        Args:
            what: is written, for people.
            work: writes it.
        """
        if self.hung is not None:
            return None
        try:
            return unless_stuck(work)
        except Hung as hung:
            self.hung = hung
            self._warn("storage_blocked", f"{what} cannot be written into the run's directory: {hung}")
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._warn("storage_failed", f"{what} cannot be written: {error.strerror or error}{where}")
        return None

    def _warn(self, code: str, text: str) -> None:
        fix = "mend or free the storage of output_dir, and run the same command again"
        self._show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": fix})


def leave(exit_code: int) -> NoReturn:
    """Ends this process without touching files again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class _Running(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self.done = threading.Event()
        self.number = 0
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="files", daemon=True).start()

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        self.number = threading.get_native_id()
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        finally:
            self.done.set()

"""File operations of the front that may hang: done in a separate thread, and given up when that thread stops moving."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from unisono.errors import UnfitError, storage_reason, storage_remedy, storage_words
from unisono.events import Message
from unisono.facts.processes import read_thread
from unisono.facts.storage import responds
from unisono.files import BackgroundThread

Result = TypeVar("Result")

STUCK_S = 10.0
_POLL_S = 0.2
_FIX = "fix or free the storage of output_dir, then run the same command again"


class Hung(Exception):  # noqa: N818 - named for what happened, as RankDied is
    """A file operation has not moved for too long. Its thread is left behind."""


def unless_stuck(
    work: Callable[[], Result], *, thread: BackgroundThread | None = None, stuck_s: float = STUCK_S
) -> Result:
    """The result of `work`, however long it takes while its thread moves.

    Args:
        work: what to do; its exceptions are raised here.
        thread: that does it, after its earlier jobs; a new one by default.
        stuck_s: seconds without a sign of life after which `work` is given up.

    Raises:
        Hung: if the thread does not move.
    """
    thread, job = thread or BackgroundThread("files"), _Job(work)
    thread.do(job)
    moves, since = None, time.monotonic()
    while not job.done.wait(_POLL_S):
        look = read_thread(os.getpid(), thread.thread_id)
        if look is None or look.moves != moves:
            moves, since = look.moves if look else None, time.monotonic()
        elif time.monotonic() - since > stuck_s:
            raise Hung(f"nothing has moved for {stuck_s:.0f} s: {look}")
    return job.result()


def refuse_if_silent(root: Path) -> None:
    """Checks that the disk of a directory responds before the front does anything there that could hang.

    Args:
        root: the directory; if it does not exist yet, its nearest parent is checked.

    Raises:
        UnfitError: if the disk does not answer.
    """
    there = root.absolute()
    while responds(there, limit_s=STUCK_S):
        if there.exists():  # a process has just looked it up and returned
            return
        there = there.parent
    raise UnfitError.of(
        "nothing was started: the storage of output_dir does not answer",
        where=str(there),
        why=f"no response for {STUCK_S:.0f} s",
        fix=_FIX,
    )


class RunsDisk:
    """The run's directory, which the front writes to while the ranks run and at the end. After it has hung, the front writes nothing more.

    Attributes:
        hung: how it hung, if it did.
        is_lost: whether its path no longer leads to the run's directory: then nothing is written there.
    """

    def __init__(self, root: Path, show: Callable[[Message], None]) -> None:
        self.hung: Hung | None = None
        self.is_lost = False
        self.root = root
        self._show = show
        self._thread = BackgroundThread("files")

    def later(self, work: Callable[[], object]) -> None:
        """Schedules work before the next write, if the storage responds. Does not wait: ranks write there too, and report what is wrong with it."""

        def if_storage_answers() -> None:
            if not self.is_lost and responds(self.root, limit_s=STUCK_S):
                work()

        self._thread.do(_Job(if_storage_answers))

    def write(self, what: str, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None, with a warning, if the storage fails or does not answer: how a run ended does not depend on it.

        Args:
            what: is written, for messages.
        """
        if self.is_lost:
            return None
        try:
            return self._written(work)
        except Hung as hung:
            if self.hung is None:
                self.hung = hung
                self._warn("storage_blocked", f"{what} cannot be written into the run's directory: {hung}")
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            text = f"{what} cannot be written: {storage_words(error)}{where}; {storage_reason(error)}"
            self._warn("storage_failed", text, fix=storage_remedy(error, full=_FIX, else_=_FIX))
        return None

    def need(self, what: str, work: Callable[[], Result]) -> Result:
        """Like `write`, for files that a start needs.

        Raises:
            UnfitError: if the storage does not answer.
            OSError: from the file system.
        """
        try:
            return self._written(work)
        except Hung as hung:
            self.hung = self.hung or hung
            raise UnfitError.of(
                f"{what} cannot be written", where=str(self.root), why=str(hung), fix=_FIX
            ) from hung

    def _written(self, work: Callable[[], Result]) -> Result:
        if self.hung is not None:
            raise self.hung
        # Checked first, by a separate process: a thread that hangs in the kernel would keep this whole process from ending.
        if not responds(self.root, limit_s=STUCK_S):
            raise Hung(f"the storage does not answer: nothing for {STUCK_S:.0f} s")
        return unless_stuck(work, thread=self._thread)

    def _warn(self, code: str, text: str, *, fix: str = _FIX) -> None:
        self._show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": fix})


def leave(exit_code: int) -> NoReturn:
    """Ends this process without touching files again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class _Job(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self.done = threading.Event()
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        finally:
            self.done.set()

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]

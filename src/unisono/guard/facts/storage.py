"""Storage that can hang: checks of an output folder (writable, free space, shared with the head) in
a child process, and file operations in a thread.

Both are given up when the child or the thread stops moving.
"""

import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from unisono.base.errors import UnfitError, storage_reason, storage_remedy, storage_words
from unisono.base.files import BackgroundThread, write_text
from unisono.base.messages import Message
from unisono.base.text import one_line
from unisono.guard.facts import path_probes
from unisono.guard.facts.processes import read_thread

_PREFIX = ".unisono-head-"
_CACHE_PATIENCE_S = 5.0
"""How long a network file system may keep what it knew of a folder (acdirmax of NFS is longer, but
listing queries it again).
"""
Result = TypeVar("Result")

STUCK_S = 10.0
_POLL_S = 0.2
_FIX = "fix the storage of output_dir, then run the same command again"


@dataclass(frozen=True)
class StorageFacts:
    """An output folder as seen by this node; None: not tested in time.

    Attributes:
        writable: whether a file could be written, synced, renamed, read back and removed in it, or
            in its nearest parent.
        trouble: why not, or why it could not be tested.
        shared: whether the head's file is in it; None also if not requested.
        file_system: its type, as `ext4` or `nfs4`.
    """

    path: str
    writable: bool | None
    trouble: str
    shared: bool | None
    free_bytes: int | None
    file_system: str


def probe_storage(
    folder: Path, *, nonce: str | None = None, limit_s: float = 5.0, program: tuple[str, ...] | None = None
) -> StorageFacts:
    """Tests a folder in a child process, which is abandoned if the storage does not respond.

    Leaves nothing behind: for a folder that does not exist yet its nearest parent is tested.

    Args:
        nonce: the name of the file that the head left in it; None: it is not looked for.
        limit_s: maximum silence. A network file system that responds gets five more seconds for its
            caches.
        program: the child's command; tests use a slow one.
    """
    command = [*(program or _PROBE), str(folder)]
    if nonce is not None:
        command += [nonce, str(_CACHE_PATIENCE_S)]
    answer, in_time = _run_child(command, limit_s)
    late = "" if in_time else f"the storage does not answer: nothing for {limit_s:g} s"
    return StorageFacts(
        path=str(folder),
        writable=answer.get("writable"),
        trouble=one_line(
            str(answer.get("trouble") or late or ("" if "writable" in answer else answer.get("error", "")))
        ),
        shared=answer.get("shared"),
        free_bytes=answer.get("free_bytes"),
        file_system=str(answer.get("file_system") or path_probes.file_system_of(folder)),
    )


def leave_nonce(folder: Path) -> str:
    """Creates the file in the head's folder by which other nodes recognize a shared folder; returns
    its name.

    Raises:
        OSError: what the file system says.
    """
    # A head that was killed left them; the caller has the folder's lock.
    for old in folder.glob(f"{_PREFIX}*"):
        old.unlink(missing_ok=True)
    name = _PREFIX + secrets.token_hex(8)
    write_text(folder / name, "unisono's head created this file for the start; it can be deleted\n")
    return name


def sees_nonce(folder: Path, name: str, *, limit_s: float = 5.0) -> bool | None:
    """Whether this node's folder is the head's; None where the storage does not answer.

    A name that is not one of `leave_nonce` is never looked for: it comes from another machine.
    """
    return probe_storage(folder, nonce=name, limit_s=limit_s).shared if is_nonce(name) else None


def is_nonce(name: str) -> bool:
    """Whether a name can be one that `leave_nonce` gave."""
    digits = name.removeprefix(_PREFIX)
    return digits != name and len(digits) == 16 and set(digits) <= set("0123456789abcdef")


def remove_nonce(folder: Path, name: str) -> None:
    """Removes the file, if it exists.

    Raises:
        OSError: what the file system says.
    """
    if is_nonce(name):
        (folder / name).unlink(missing_ok=True)


def responds(path: Path, *, limit_s: float | None = 5.0) -> bool:
    """Whether touching a file or folder completes, successfully or not, within the limit.

    Done in a child process, which is abandoned if it hangs: a process that hangs in a write cannot
    even exit.

    Args:
        path: of what is there already.
        limit_s: None: it is waited for.
    """
    _, in_time = _run_child([*_TOUCH, str(path)], limit_s)
    return in_time


# A millisecond, where Python would take twenty-five: the lock of a run is touched every few
# seconds.
_TOUCH = (
    ("touch", "-c", "--")
    if shutil.which("touch")
    else (sys.executable, "-I", "-S", "-c", "import os, sys; os.utime(sys.argv[1])")
)

# Isolated and without site: nothing of the user's own setup is imported, and it starts in a
# hundredth of a second.
_PROBE = (sys.executable, "-I", "-S", path_probes.__file__)


def _run_child(command: list[str], limit_s: float | None) -> tuple[dict[str, Any], bool]:
    """The child's findings, and whether it ended without a silence of more than `limit_s`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[bytes] = []
    with process.stdout as pipe:
        in_time = _read_to_end(pipe.fileno(), lines, limit_s)
    if not in_time:
        process.kill()
    # In the kernel's D state it outlives even SIGKILL: nobody waits for it here.
    threading.Thread(target=process.wait, name="reap", daemon=True).start()
    answer: dict[str, Any] = {}
    for line in b"".join(lines).decode(errors="replace").splitlines():
        try:
            answer |= json.loads(line)
        except (ValueError, TypeError):
            answer["error"] = line  # the last line of a traceback has the error
    return answer, in_time


def _read_to_end(fd: int, into: list[bytes], limit_s: float | None) -> bool:
    """Reads until the other end is closed; False if it said nothing for `limit_s`."""
    with (
        selectors.DefaultSelector() as selector
    ):  # select() knows no file above 1,024, and a head has that many
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(limit_s):
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return True
            into.append(chunk)
    return False


class Hung(Exception):  # noqa: N818 - named for what happened, as RankDied is
    """A file operation has not moved for too long. Its thread is left behind."""


def unless_stuck(work: Callable[[], Result], *, thread: BackgroundThread | None = None) -> Result:
    """The result of `work`, however long it takes while its thread moves.

    Args:
        work: what to do; its exceptions are raised here.
        thread: that does it, after its earlier jobs; a new one by default.

    Raises:
        Hung: if the thread does not move.
    """
    thread, job = thread or BackgroundThread("files"), _StorageJob(work)
    thread.do(job)
    moves, since = None, time.monotonic()
    while not job.done.wait(_POLL_S):
        look = read_thread(os.getpid(), thread.thread_id)
        if look is None or look.moves != moves:
            moves, since = look.moves if look else None, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            raise Hung(f"nothing has moved for {STUCK_S:.0f} s: {look}")
    return job.result()


def refuse_if_silent(root: Path) -> None:
    """Checks that the disk of a directory responds before the front does anything there that could
    hang.

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
    """The run's directory, which the front writes to while the ranks run and at the end.

    After it has hung, the front writes nothing more.

    Attributes:
        hung: how it hung, if it did.
        is_lost: whether its path no longer leads to the run's directory: then nothing is written
            there.
    """

    def __init__(self, root: Path, show: Callable[[Message], None]) -> None:
        self.hung: Hung | None = None
        self.is_lost = False
        self.root = root
        self._show = show
        self._thread = BackgroundThread("files")

    def later(self, work: Callable[[], object]) -> None:
        """Schedules work before the next write, if the storage responds.

        Does not wait: ranks write there too, and report what is wrong with it.
        """

        def if_storage_answers() -> None:
            if not self.is_lost and responds(self.root, limit_s=STUCK_S):
                work()

        self._thread.do(_StorageJob(if_storage_answers))

    def write(self, what: str, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None, with a warning, if the storage fails or does not answer: how
        a run ended does not depend on it.

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
            self._warn("storage_failed", text, fix=storage_remedy(error, else_=_FIX))
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
        # Checked first, by a separate process: a thread that hangs in the kernel would keep this
        # whole process from ending.
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


class _StorageJob(Generic[Result]):
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

"""checkpoint.storage: a small object before the ranks start, uploads of published checkpoints
beside them, and the first copy read back during the rehearsal.

Uploads are made in a child process, one at a time.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import IntegrityError, Problem, RankDied, UnfitError, UnisonoError
from unisono.base.messages import Message, Show, notify
from unisono.base.text import parse_seconds, show_bytes, show_seconds
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs, child_environment
from unisono.guard.supervise.codec import encode
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.rank_supervisor import RunObserver
from unisono.guard.supervise.task_process import TaskProcess, cannot_start
from unisono.jobs.remote_checkpoint.verification import at_most, how_many_more, slow_after, steps_due
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import CopyRead, ReadCopy, TryStorage, UploadCheckpoint, Uploaded

STALLED_S = 120.0
"""An upload without progress for this long is ended; the next checkpoint is uploaded again."""
_STAYS = "it is complete in output_dir; the next start that resumes the run uploads it"
_RESULT_S = 0.5
_NOTE_EVERY_S = 10.0


def storage_url(storage: str, output_dir: Path) -> str:
    """The URL of this run's copies: the storage and the directory's name."""
    return f"{storage.rstrip('/')}/{output_dir.name}"


@dataclass(frozen=True)
class CopyResult:
    """The result of one upload.

    Attributes:
        bytes: the uploaded bytes; 0 if it was already there.
        seconds: the duration.
        error: why it failed; None if it succeeded.
    """

    path: Path
    bytes: int = 0
    seconds: float = 0.0
    checksum: str = ""
    error: UnisonoError | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return _step_of(self.path)


class Uploads:
    """A companion for all attempts of one start of the run.

    As a context manager it ends its child process.
    """

    def __init__(
        self,
        plan: RunPlan,
        run: RunDir,
        *,
        programs: Programs,
        leftovers: dict[str, str],
        interrupts: Interrupts,
        show: Show,
    ) -> None:
        """Starts with the latest published checkpoint, which may not be uploaded yet.

        Args:
            interrupts: stop signals.
        """
        assert plan.config.checkpoint.storage is not None
        self._plan = plan
        self._run = run
        self._url = storage_url(plan.config.checkpoint.storage, run.root)
        self._programs = programs
        self._leftovers = leftovers
        self._interrupts = interrupts
        self._show = show
        self._due: Path | None = self._newest()
        self._task: TaskProcess | None = None
        self._path = Path()
        self._done_bytes = self._of_bytes = 0
        self._progress_at = 0.0
        self._ending = False
        self._expected: int | None = None
        self.first: CopyResult | None = None
        """The result of the expected copy."""
        self.uploaded: Path | None = None

    @property
    def url(self) -> str:
        """The URL of the copies of all runs in this directory."""
        return self._url

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def on_message(self, rank: int, message: Message) -> None:
        """Queues a published checkpoint as the next upload."""
        if rank == 0 and message["kind"] == "checkpoint":
            if self._due is not None and self._task is not None:
                text = (
                    f"{self._due.name} is not copied to {self._url}: uploads are slower than checkpoints, and"
                    " there is a newer one"
                )
                self._notify(text)
            self._due = Path(str(message["path"]))

    def expect(self, step: int) -> None:
        """Puts the result of the next copy of this step or a later one into `first`, for the caller
        to check; a failure is then no warning.
        """
        self._expected, self.first = step, None

    def expect_nothing(self) -> None:
        """Makes each failure a warning again."""
        self._expected = None

    def look(self) -> UnisonoError | None:
        """Continues the upload; a failing storage does not end the run."""
        if self._task is None:
            self._begin()
            return None
        try:
            for message in self._task.new_messages():
                self._take(message)
                if self._task is None:
                    return None
        except UnisonoError as error:
            self._failed(error)
            return None
        if time.monotonic() - self._progress_at > STALLED_S:
            self._failed(self._stalled())
        return None

    def finish(self) -> None:
        """Nothing: the ranks have ended, but the run may continue. `wait` ends the uploads."""

    def wait(self) -> None:
        """Waits until the latest checkpoint is uploaded, while its upload makes progress; after a
        stop signal, for the rest of `grace`.

        If the run ended because its first copy failed, it does not wait.
        """
        if self.first is not None and self.first.error is not None:
            self._close()
            return
        newest = self._newest()
        if newest is not None and newest not in (self.uploaded, self._path if self._task else None):
            self._due = newest
        self._ending = True
        noted = time.monotonic()
        while self._task is not None or self._due is not None:
            limit = self._end_of_grace()
            if self._interrupts.twice or time.monotonic() >= limit:
                break
            self.look()
            if time.monotonic() - noted > _NOTE_EVERY_S:
                noted = time.monotonic()
                at_most = f"; at most {show_seconds(limit - noted)} more" if limit < math.inf else ""
                self._notify(f"waiting for {self._progress()}{at_most}")
            time.sleep(0.05)
        if self._task is not None or self._due is not None:
            left = self._due or self._path
            self._warn(
                f"the latest checkpoint, {left}, is not in {self._url}: its upload did not finish in time",
                _STAYS,
            )
        self._close()

    def _end_of_grace(self) -> float:
        """The end of the wait in monotonic seconds; a stop signal may arrive during it."""
        if self._interrupts.first is None:
            return math.inf
        return self._interrupts.at + parse_seconds(self._plan.config.grace) - _RESULT_S

    def _newest(self) -> Path | None:
        checkpoints = [path for path in self._run.checkpoints.glob("step-*") if path.name[5:].isdigit()]
        return max(checkpoints, key=_step_of, default=None)

    def _begin(self) -> None:
        if self._due is None:
            return
        self._path, self._due = self._due, None
        if not self._path.is_dir():  # pruned before its upload started
            return
        request = UploadCheckpoint(
            url=self._url,
            run_id=self._plan.run_id,
            path=self._path,
            keep=self._plan.config.checkpoint.keep,
            keep_every=self._plan.keep_every,
            best=self._plan.config.checkpoint.best,
            beside=self._run.root,
        )
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks use the other cores
        self._done_bytes = self._of_bytes = 0
        try:
            self._task = TaskProcess(
                "storage", encode(request), programs=self._programs, environment=environment
            )
        except OSError as error:  # /tmp is full or there are no more processes: no reason to end training
            self._failed(cannot_start("storage", error))
        self._progress_at = time.monotonic()

    def _take(self, message: Message) -> None:
        self._progress_at = time.monotonic()
        if message["kind"] == "progress":
            self._done_bytes, self._of_bytes = int(message["bytes"]), int(message["of"])
        elif message["kind"] == "result":
            self._close()
            done = cast("Uploaded", message)
            if done["pruned"]:
                text = (
                    f"{self._path.name} is not copied to {self._url}: it was pruned here before its upload"
                    " started; checkpoints are faster than uploads"
                )
                self._notify(text)
                return
            self.uploaded = self._path
            if self._is_expected():
                self.first = CopyResult(self._path, done["bytes"], done["seconds"], done["checksum"])
                self._expected = None
            if done["bytes"]:
                size, seconds = show_bytes(done["bytes"]), show_seconds(done["seconds"])
                self._notify(f"{self._path.name} is in {self._url}/{self._plan.run_id}: {size} in {seconds}")

    def _is_expected(self) -> bool:
        return self._expected is not None and _step_of(self._path) >= self._expected

    def _stalled(self) -> UnfitError:
        text = f"no progress for {show_seconds(STALLED_S)} ({self._progress()})"
        return UnfitError.of(text, where="checkpoint.storage", fix="check the storage and the network")

    def _failed(self, error: UnisonoError) -> None:
        """Warns of a failed upload, or stores it as the result of the expected copy."""
        self._close()
        if self._is_expected() and not isinstance(
            error, RankDied
        ):  # a dead task says nothing about the storage
            self.first, self._expected = CopyResult(self._path, error=error), None
            return
        what = f"{self._path.name} was not copied to {self._url}: "
        problem = error.problems[0]
        self._warn(
            what + "; ".join(part for part in (problem.what, problem.why) if part),
            f"{problem.fix or 'see there'}; {self._consequence()}",
        )

    def _consequence(self) -> str:
        return _STAYS if self._ending else "training continues, and the next checkpoint is uploaded again"

    def _progress(self) -> str:
        share = (
            f", {self._done_bytes / self._of_bytes:.0%} of {show_bytes(self._of_bytes)}"
            if self._of_bytes
            else ""
        )
        return f"the upload of {(self._due or self._path).name}{share}"

    def _close(self) -> None:
        if self._task is not None:
            self._task.close(patience_s=0)
            self._task = None

    def _notify(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})

    def _warn(self, text: str, fix: str) -> None:
        self._show(
            {"kind": "warning", "time": time.time(), "code": "upload_failed", "text": text, "fix": fix}
        )


def _step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(path.name[len("step-") :])


def storage_observers(
    plan: RunPlan, uploading: Uploads | None, *, programs: Programs, leftovers: dict[str, str], show: Show
) -> tuple[RunObserver, ...]:
    """The companions of one attempt with a storage: the uploads, and the check of the first
    copy.
    """
    if uploading is None:
        return ()
    return uploading, FirstCopy(plan, uploading, programs=programs, leftovers=leftovers, show=show)


class FirstCopy:
    """The rehearsal of the copies, beside the ranks: takes the result of the first upload, and has
    the copy read back.
    """

    def __init__(
        self, plan: RunPlan, uploading: Uploads, *, programs: Programs, leftovers: dict[str, str], show: Show
    ) -> None:
        """For one attempt.

        Args:
            uploading: makes the copies, and reports a failure of the first one here instead of on
                the screen.
            programs: the program of the task that reads it back.
        """
        self._plan = plan
        self._uploading = uploading
        self._programs = programs
        self._leftovers = leftovers
        self._show = show
        self._task: TaskProcess | None = None
        self._began = 0.0
        self._error: UnisonoError | None = None
        self._is_over = plan.rehearsed_step is None
        if plan.rehearsed_step is not None:
            uploading.expect(plan.rehearsed_step)

    def on_message(self, rank: int, message: Message) -> None:
        """Nothing: `Uploads` reports when a copy is done."""

    def look(self) -> UnisonoError | None:
        """The error that ends the run, once there is one."""
        copied = self._uploading.first
        if self._is_over or copied is None:
            return self._error
        try:
            if copied.error is not None:
                self._end()
                self._error = self._not_copied(copied, copied.error)
            else:
                self._read_back(copied)
        except RankDied as error:  # says nothing about the copy
            self._end()
            self._warn("rehearsal_died", f"the first copy was not read back: {error}", error.problems[0].fix)
        except UnisonoError as error:
            self._end()
            if copied.path.exists():  # otherwise it was pruned, possibly in the storage as well
                self._error = self._not_read_back(copied, error)
        return self._error

    def finish(self) -> None:
        """Ends the rehearsal with the run."""
        self._end()

    def _read_back(self, copied: CopyResult) -> None:
        if self._task is None:
            self._start(copied)
        assert self._task is not None
        for message in self._task.new_messages():
            if message["kind"] == "result":
                self._end()
                self._report_copy(copied, cast("CopyRead", message))
                return
        self._warn_if_slow(copied)

    def _start(self, copied: CopyResult) -> None:
        url, run_id = self._uploading.url, self._plan.run_id
        request = ReadCopy(url=url, run_id=run_id, step=copied.step, checksum=copied.checksum)
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks use the other cores
        self._began = time.monotonic()
        try:
            self._task = TaskProcess(
                "storage", encode(request), programs=self._programs, environment=environment
            )
        except OSError as error:
            raise cannot_start("storage", error) from error

    def _end(self) -> None:
        self._is_over = True
        self._uploading.expect_nothing()
        if self._task is not None:
            self._task.close(patience_s=0)
            self._task = None

    def _report_copy(self, copied: CopyResult, read_back: CopyRead) -> None:
        text = summary(self._plan, copied, read_back, location=self._place(copied))
        self._show({"kind": "note", "time": time.time(), "text": text})
        needed, free = more_bytes(self._plan, copied, read_back), read_back["free_bytes"]
        if free is not None and needed > free:
            self._warn(
                "copies_do_not_fit",
                f"the copies of this run do not fit into {self._uploading.url}: they need"
                f" {show_bytes(needed)} more, and {show_bytes(free)} are free",
                "free space there, or lower checkpoint.keep; a copy without space is a warning, and training"
                " continues",
            )

    def _warn_if_slow(self, copied: CopyResult) -> None:
        patience = slow_after(copied.seconds)
        if time.monotonic() - self._began < patience:
            return
        self._end()
        self._warn(
            "rehearsal_is_slow",
            f"the first copy was not read back within {show_seconds(patience)}: {self._place(copied)} took"
            f" {show_seconds(copied.seconds)} to write",
            "check the storage and the network: resuming from a copy takes as long",
        )

    def _not_copied(self, copied: CopyResult, error: UnisonoError) -> UnisonoError:
        problem = error.problems[0]
        why = (
            "it is made after the first step so that a run that relies on copies does not train for hours"
            " without them"
        )
        fix = problem.fix or "test this disk and the memory of this machine, then start again with --fresh"
        return self._refusal(
            copied,
            error,
            what=f"the first copy was not made: {problem.what}",
            why="; ".join(filter(None, (problem.why, why))),
            fix=fix,
        )

    def _not_read_back(self, copied: CopyResult, error: UnisonoError) -> UnisonoError:
        problem = error.problems[0]
        why = "; ".join(filter(None, (problem.why, "it was read from the storage in a new process")))
        fix = problem.fix or "check that storage, or set checkpoint.storage to a different one"
        return self._refusal(
            copied,
            error,
            what=f"the first copy differs when read back: {problem.what}",
            why=why,
            fix=fix,
        )

    def _refusal(
        self, copied: CopyResult, error: UnisonoError, *, what: str, why: str, fix: str
    ) -> UnisonoError:
        """The error in its class: damage, or a storage failure.

        Its location names the storage, as on all nodes.
        """
        ways = (
            f"{fix}; or train without copies: checkpoint.storage=null. The same command then resumes the run"
        )
        problem = Problem(what, self._place(copied), why, ways)
        if isinstance(error, IntegrityError):
            return IntegrityError(problem)
        verdict = Verdict(
            cause="storage_unfit",
            when="during",
            hosts=(self._plan.host,),
            summary=what,
            phase="save",
            step=copied.step,
            evidence=(Evidence(where=problem.where, text=why),),
            fix=(ways,),
        )
        return UnfitError(problem, verdict=verdict)

    def _place(self, copied: CopyResult) -> str:
        return f"{self._uploading.url}/{self._plan.run_id}/{copied.path.name}"

    def _warn(self, code: str, text: str, fix: str) -> None:
        self._show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": fix})


def summary(plan: RunPlan, copied: CopyResult, read_back: CopyRead, *, location: str) -> str:
    """A line about the cost of all copies of the run.

    Args:
        copied: the first copy.
        read_back: result of reading it back.
    """
    size, duration = show_bytes(read_back["bytes"]), show_seconds(copied.seconds)
    rate = f"{show_bytes(copied.bytes / max(copied.seconds, 1e-3))}/s"
    made = f"{size} in {duration} ({rate})" if copied.bytes else f"{size}, already there"
    line = f"rehearsal: copy of {made}, read back completely from {location} in {show_seconds(read_back['seconds'])}"
    due = steps_due(plan, copied.step)
    if not due:
        return f"{line}; it is the only one"
    at_once = at_most(plan, read_back["steps"], due)
    room = f" of {show_bytes(read_back['free_bytes'])} free" if read_back["free_bytes"] is not None else ""
    in_all = f"; {show_seconds(len(due) * copied.seconds)} in all" if copied.bytes else ""
    return (
        f"{line}; {how_many_more(plan, due)}, at most {at_once} there:"
        f" {show_bytes(more_bytes(plan, copied, read_back))} more{room}{in_all}"
    )


def more_bytes(plan: RunPlan, copied: CopyResult, read_back: CopyRead) -> int:
    """The bytes that the copies need at most, besides the existing ones."""
    more = at_most(plan, read_back["steps"], steps_due(plan, copied.step)) - len(read_back["steps"])
    return max(0, more) * read_back["bytes"]


PATIENCE_S = 60.0
"""How long to wait for the storage once everything else is prepared."""
_NOTE_AFTER_S = 2.0
_POLL_S = 0.02


@contextlib.contextmanager
def storage_tried(
    config: RunConfig,
    run: RunDir,
    run_id: str,
    *,
    programs: Programs,
    leftovers: Mapping[str, str],
    show: Show,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """Writes, reads and removes a small object in the storage, in a task beside the context; waits
    for it at the end.

    Without checkpoint.storage nothing happens. A storage that does not answer or cannot be tested
    is a warning and does not stop the run.

    Args:
        run: the run's directory; its name is part of the copies' URL.
        patience_s: how long to wait for it at the end.

    Raises:
        UnfitError: if the storage cannot be reached, written, read or deleted from, or its package
            is missing.
        DataError: if its URL has no known scheme.
    """
    if config.checkpoint.storage is None:
        yield
        return
    url = storage_url(config.checkpoint.storage, run.root)
    request = encode(TryStorage(url=url, run_id=run_id))
    try:
        environment = child_environment(threads=1, without=dict(leftovers))
        task = TaskProcess("storage", request, programs=programs, environment=environment)
    except OSError as error:
        _warn(show, url, str(cannot_start("storage", error)))
        yield
        return
    try:
        yield
        _wait(task, url, show, patience_s)
    finally:
        task.close(patience_s=0)


def _wait(task: TaskProcess, url: str, show: Show, patience_s: float) -> None:
    began, noted = time.monotonic(), False
    while (waited := time.monotonic() - began) < patience_s:
        try:
            if any(message["kind"] == "result" for message in task.new_messages()):
                return
        except RankDied as error:  # says nothing about the storage
            _warn(show, url, str(error))
            return
        except UnfitError as error:
            raise UnfitError(*map(_with_local_option, error.problems)) from error
        if waited > _NOTE_AFTER_S and not noted:
            noted = True
            notify(show, f"waiting for {url} to answer; at most {show_seconds(patience_s - waited)} more")
        time.sleep(_POLL_S)
    _warn(show, url, f"no answer within {show_seconds(patience_s)}")


def _with_local_option(problem: Problem) -> Problem:
    """The problem, with the option to train without copies."""
    fix = f"{problem.fix}; or train without copies: checkpoint.storage=null"
    return Problem(problem.what, problem.where, problem.why, fix)


def _warn(show: Show, url: str, why: str) -> None:
    text = (
        f"{url} was not tested before the first step: {why}; training starts, and each failed copy is"
        " reported"
    )
    fix = "check the storage and the network"
    show({"kind": "warning", "time": time.time(), "code": "storage_untried", "text": text, "fix": fix})

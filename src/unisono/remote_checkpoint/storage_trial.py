"""Tests of checkpoint.storage: a small object before the ranks start, and the first copy read back during the rehearsal."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from unisono.causes import Evidence, Verdict
from unisono.config import RunConfig
from unisono.errors import IntegrityError, Problem, RankDied, UnfitError, UnisonoError
from unisono.events import Message, Show, notify
from unisono.plan import RunPlan
from unisono.remote_checkpoint.first_checkpoint import at_most, how_many_more, slow_after, steps_due
from unisono.remote_checkpoint.upload import CopyResult, Uploads, storage_url
from unisono.rundir import RunDir
from unisono.supervise.child_process import Programs, child_environment
from unisono.supervise.rank_supervisor import RunObserver
from unisono.supervise.task_process import TaskProcess, cannot_start
from unisono.text import show_bytes, show_seconds


def storage_observers(
    plan: RunPlan, uploading: Uploads | None, *, programs: Programs, leftovers: dict[str, str], show: Show
) -> tuple[RunObserver, ...]:
    """The companions of one attempt with a storage: the uploads, and the check of the first copy."""
    if uploading is None:
        return ()
    return uploading, FirstCopy(plan, uploading, programs=programs, leftovers=leftovers, show=show)


class FirstCopy:
    """The rehearsal of the copies, beside the ranks: takes the result of the first upload, and has the copy read back."""

    def __init__(
        self, plan: RunPlan, uploading: Uploads, *, programs: Programs, leftovers: dict[str, str], show: Show
    ) -> None:
        """For one attempt.

        Args:
            uploading: makes the copies, and reports a failure of the first one here instead of on the screen.
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
                self._report_copy(copied, message)
                return
        self._warn_if_slow(copied)

    def _start(self, copied: CopyResult) -> None:
        request = {
            "action": "read_back",
            "url": self._uploading.url,
            "run_id": self._plan.run_id,
            "step": copied.step,
            "checksum": copied.checksum,
        }
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks use the other cores
        self._began = time.monotonic()
        try:
            self._task = TaskProcess("storage", request, programs=self._programs, environment=environment)
        except OSError as error:
            raise cannot_start("storage", error) from error

    def _end(self) -> None:
        self._is_over = True
        self._uploading.expect_nothing()
        if self._task is not None:
            self._task.close(patience_s=0)
            self._task = None

    def _report_copy(self, copied: CopyResult, found: Message) -> None:
        text = summary(self._plan, copied, found, place=self._place(copied))
        self._show({"kind": "note", "time": time.time(), "text": text})
        needed, free = more_bytes(self._plan, copied, found), found["free_bytes"]
        if free is not None and needed > free:
            self._warn(
                "copies_do_not_fit",
                f"the copies of this run do not fit into {self._uploading.url}: they need {show_bytes(needed)} more, and {show_bytes(free)} are free",
                "free space there, or lower checkpoint.keep; a copy without space is a warning, and training continues",
            )

    def _warn_if_slow(self, copied: CopyResult) -> None:
        patience = slow_after(copied.seconds)
        if time.monotonic() - self._began < patience:
            return
        self._end()
        self._warn(
            "rehearsal_is_slow",
            f"the first copy was not read back within {show_seconds(patience)}: {self._place(copied)} took {show_seconds(copied.seconds)} to write",
            "check the storage and the network: resuming from a copy takes as long",
        )

    def _not_copied(self, copied: CopyResult, error: UnisonoError) -> UnisonoError:
        problem = error.problems[0]
        why = "it is made after the first step so that a run that relies on copies does not train for hours without them"
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
        """The error in its class: damage, or a storage failure. Its location names the storage, as on all nodes."""
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


def summary(plan: RunPlan, copied: CopyResult, found: dict[str, Any], *, place: str) -> str:
    """A line about the cost of all copies of the run.

    Args:
        copied: the first copy.
        found: the result of reading it back: seconds, bytes, existing steps, free_bytes or None.
    """
    size, duration = show_bytes(found["bytes"]), show_seconds(copied.seconds)
    rate = f"{show_bytes(copied.bytes / max(copied.seconds, 1e-3))}/s"
    made = f"{size} in {duration} ({rate})" if copied.bytes else f"{size}, already there"
    line = f"rehearsal: copy of {made}, read back completely from {place} in {show_seconds(found['seconds'])}"
    due = steps_due(plan, copied.step)
    if not due:
        return f"{line}; it is the only one"
    at_once = at_most(plan, found["steps"], due)
    room = f" of {show_bytes(found['free_bytes'])} free" if found["free_bytes"] is not None else ""
    in_all = f"; {show_seconds(len(due) * copied.seconds)} in all" if copied.bytes else ""
    return f"{line}; {how_many_more(plan, due)}, at most {at_once} there: {show_bytes(more_bytes(plan, copied, found))} more{room}{in_all}"


def more_bytes(plan: RunPlan, copied: CopyResult, found: dict[str, Any]) -> int:
    """The bytes that the copies need at most, besides the existing ones."""
    more = at_most(plan, found["steps"], steps_due(plan, copied.step)) - len(found["steps"])
    return max(0, more) * int(found["bytes"])


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
    """Writes, reads and removes a small object in the storage, in a task beside the context; waits for it at the end.

    Without checkpoint.storage nothing happens. A storage that does not answer or cannot be tested is a warning and does not stop the run.

    Args:
        run: the run's directory; its name is part of the copies' URL.
        patience_s: how long to wait for it at the end.

    Raises:
        UnfitError: if the storage cannot be reached, written, read or deleted from, or its package is missing.
        DataError: if its URL has no known scheme.
    """
    if config.checkpoint.storage is None:
        yield
        return
    url = storage_url(config.checkpoint.storage, run.root)
    request = {"action": "try", "url": url, "run_id": run_id}
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
    text = f"{url} was not tested before the first step: {why}; training starts, and each failed copy is reported"
    fix = "check the storage and the network"
    show({"kind": "warning", "time": time.time(), "code": "storage_untried", "text": text, "fix": fix})

"""checkpoint.storage tried before there are ranks, and the first copy of a rehearsed start read back: failures of hours later happen here."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from unisono.causes import Evidence, Verdict
from unisono.config import RunConfig
from unisono.errors import IntegrityError, Problem, RankDied, UnfitError, UnisonoError
from unisono.events import Message, Show, say
from unisono.plan import RunPlan
from unisono.remote_checkpoint.first_checkpoint import at_most, how_many_more, slow_after, steps_due
from unisono.remote_checkpoint.upload import CopyResult, Uploads, storage_url
from unisono.rundir import RunDir
from unisono.supervise.child_process import Programs, child_environment
from unisono.supervise.rank_supervisor import Companion
from unisono.supervise.task_process import TaskProcess, cannot_start
from unisono.text import show_bytes, show_seconds


def storage_companions(
    plan: RunPlan, uploading: Uploads | None, *, programs: Programs, leftovers: dict[str, str], show: Show
) -> tuple[Companion, ...]:
    """What is beside the ranks of one start where there is a storage: the uploads, and this look at the first."""
    if uploading is None:
        return ()
    return uploading, FirstCopy(plan, uploading, programs=programs, leftovers=leftovers, show=show)


class FirstCopy:
    """Beside the ranks: takes what came of the first upload, and has the copy read back."""

    def __init__(
        self, plan: RunPlan, uploading: Uploads, *, programs: Programs, leftovers: dict[str, str], show: Show
    ) -> None:
        """For one start of the ranks.

        Args:
            plan: of the start.
            uploading: makes the copies, and tells of the first one here instead of on the screen where it fails.
            programs: what is started to read it back.
            leftovers: variables that a task is not to see.
            show: sees what is said.
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

    def heard(self, rank: int, message: Message) -> None:
        """Nothing: the uploads tell when one is done."""

    def look(self) -> UnisonoError | None:
        """What the run cannot live with, once that is known."""
        copied = self._uploading.first
        if self._is_over or copied is None:
            return self._error
        try:
            if copied.error is not None:
                self._end()
                self._error = self._not_copied(copied, copied.error)
            else:
                self._read_back(copied)
        except RankDied as error:  # it says nothing of the copy
            self._end()
            self._warn("rehearsal_died", f"the first copy was not read back: {error}", error.problems[0].fix)
        except UnisonoError as error:
            self._end()
            if copied.path.exists():  # else it was pruned meanwhile, and perhaps there as well
                self._error = self._not_read_back(copied, error)
        return self._error

    def finish(self) -> None:
        """A run that is over before its rehearsal has nothing to fear for."""
        self._end()

    def _read_back(self, copied: CopyResult) -> None:
        if self._task is None:
            self._start(copied)
        assert self._task is not None
        for message in self._task.news():
            if message["kind"] == "result":
                self._end()
                self._tell(copied, message)
                return
        self._tell_if_slow(copied)

    def _start(self, copied: CopyResult) -> None:
        request = {
            "action": "read_back",
            "url": self._uploading.url,
            "run_id": self._plan.run_id,
            "step": copied.step,
            "checksum": copied.checksum,
        }
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks have the other cores
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

    def _tell(self, copied: CopyResult, found: Message) -> None:
        text = summary(self._plan, copied, found, place=self._place(copied))
        self._show({"kind": "note", "time": time.time(), "text": text})
        needed, free = more_bytes(self._plan, copied, found), found["free_bytes"]
        if free is not None and needed > free:
            self._warn(
                "copies_do_not_fit",
                f"the copies of this run do not fit into {self._uploading.url}: {show_bytes(needed)} will come on top of what is there, and {show_bytes(free)} are free",
                "free some there, or lower checkpoint.keep; a copy that finds no room costs a warning, and training goes on",
            )

    def _tell_if_slow(self, copied: CopyResult) -> None:
        patience = slow_after(copied.seconds)
        if time.monotonic() - self._began < patience:
            return
        self._end()
        self._warn(
            "rehearsal_is_slow",
            f"the first copy was not read back within {show_seconds(patience)}: {self._place(copied)} took {show_seconds(copied.seconds)} to write",
            "look at the storage and the network: to go on from a copy takes as long",
        )

    def _not_copied(self, copied: CopyResult, error: UnisonoError) -> UnisonoError:
        problem = error.problems[0]
        why = "it is made after the first step so that a run which relies on copies does not train for hours without"
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
        why = "; ".join(filter(None, (problem.why, "it was read again in a fresh process, from the storage")))
        fix = problem.fix or "look at that storage, or set checkpoint.storage to another one"
        return self._refusal(
            copied,
            error,
            what=f"the first copy is not read back as it was written: {problem.what}",
            why=why,
            fix=fix,
        )

    def _refusal(
        self, copied: CopyResult, error: UnisonoError, *, what: str, why: str, fix: str
    ) -> UnisonoError:
        """In the class of what was found: damage, or a storage that fails. The storage is named for all nodes."""
        ways = f"{fix}; or train without copies: checkpoint.storage=null. The same command then goes on with the run"
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
    """What is known now about all copies of the run, in a line.

    Args:
        plan: of the start.
        copied: the first copy.
        found: what reading it back gave: seconds, bytes, steps that are there, free_bytes or None.
        place: where it is.
    """
    size, took = show_bytes(found["bytes"]), show_seconds(copied.seconds)
    rate = f"{show_bytes(copied.bytes / max(copied.seconds, 1e-3))}/s"
    made = f"{size} in {took} ({rate})" if copied.bytes else f"{size}, there already"
    line = f"rehearsal: copy of {made}, read back whole from {place} in {show_seconds(found['seconds'])}"
    due = steps_due(plan, copied.step)
    if not due:
        return f"{line}; it is the only one"
    at_once = at_most(plan, found["steps"], due)
    room = f" of {show_bytes(found['free_bytes'])} free" if found["free_bytes"] is not None else ""
    in_all = f"; {show_seconds(len(due) * copied.seconds)} in all" if copied.bytes else ""
    return f"{line}; {how_many_more(plan, due)}, at most {at_once} there: {show_bytes(more_bytes(plan, copied, found))} more{room}{in_all}"


def more_bytes(plan: RunPlan, copied: CopyResult, found: dict[str, Any]) -> int:
    """What the copies will take at the most beside those that are there."""
    more = at_most(plan, found["steps"], steps_due(plan, copied.step)) - len(found["steps"])
    return max(0, more) * int(found["bytes"])


PATIENCE_S = 60.0
"""How long the storage is waited for once all else is prepared."""
_SAYS_AFTER_S = 2.0
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
    """Has a small object written where the copies will be, read back and removed, beside what is done in the context; waits for it at the end.

    Without checkpoint.storage nothing happens. One that does not answer, or cannot be tried, is a warning: it does not hold up the run.

    Args:
        config: with the storage.
        run: the run's directory; its name is part of the copies' place.
        run_id: of the run.
        programs: what is started.
        leftovers: variables that a task is not to see.
        show: sees what is said.
        patience_s: how long it is waited for at the end.

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
    began, said = time.monotonic(), False
    while (waited := time.monotonic() - began) < patience_s:
        try:
            if any(message["kind"] == "result" for message in task.news()):
                return
        except RankDied as error:  # it says nothing of the storage
            _warn(show, url, str(error))
            return
        except UnfitError as error:
            raise UnfitError(*map(_with_local_option, error.problems)) from error
        if waited > _SAYS_AFTER_S and not said:
            said = True
            say(show, f"waiting for {url} to answer; at most {show_seconds(patience_s - waited)} more")
        time.sleep(_POLL_S)
    _warn(show, url, f"it has not answered within {show_seconds(patience_s)}")


def _with_local_option(problem: Problem) -> Problem:
    """The same, with the way to train without it."""
    fix = f"{problem.fix}; or train without copies: checkpoint.storage=null"
    return Problem(problem.what, problem.where, problem.why, fix)


def _warn(show: Show, url: str, why: str) -> None:
    text = f"{url} was not tried before the first step: {why}; training begins, and each copy that fails will be told"
    fix = "look at the storage and the network"
    show({"kind": "warning", "time": time.time(), "code": "storage_untried", "text": text, "fix": fix})

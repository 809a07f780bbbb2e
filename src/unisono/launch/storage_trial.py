"""checkpoint.storage tried before there are ranks: what would fail at the first copy, hours later it may be, fails here."""

import contextlib
import time
from collections.abc import Iterator, Mapping

from unisono.config import RunConfig
from unisono.errors import Problem, RankDied, UnfitError
from unisono.launch.attempt import Show, say
from unisono.launch.command import Programs, child_environment
from unisono.launch.tasks import TaskProcess, cannot_start
from unisono.launch.uploading import storage_url
from unisono.rundir import RunDir
from unisono.units import show_seconds

PATIENCE_S = 60.0
"""How long the storage is waited for once all else is prepared."""
_SAYS_AFTER_S = 2.0
_POLL_S = 0.02


@contextlib.contextmanager
def storage_tried(
    config: RunConfig, run: RunDir, run_id: str, *, programs: Programs, leftovers: Mapping[str, str], show: Show, patience_s: float = PATIENCE_S
) -> Iterator[None]:  # fmt: skip
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
            raise UnfitError(*map(_before_the_first_step, error.problems)) from error
        if waited > _SAYS_AFTER_S and not said:
            said = True
            say(show, f"waiting for {url} to answer; at most {show_seconds(patience_s - waited)} more")
        time.sleep(_POLL_S)
    _warn(show, url, f"it has not answered within {show_seconds(patience_s)}")


def _before_the_first_step(problem: Problem) -> Problem:
    """The same, with the way to train without it."""
    fix = f"{problem.fix}; or train without copies: checkpoint.storage=null"
    return Problem(problem.what, problem.where, problem.why, fix)


def _warn(show: Show, url: str, why: str) -> None:
    text = f"{url} was not tried before the first step: {why}; training begins, and each copy that fails will be told"
    fix = "look at the storage and the network"
    show({"kind": "warning", "time": time.time(), "code": "storage_untried", "text": text, "fix": fix})

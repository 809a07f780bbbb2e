"""`--launcher slurm`, whole: checked, written, submitted, followed."""

import os
import time
from pathlib import Path
from typing import Any

from unisono.errors import UnfitError, UsageError
from unisono.facts import read_environment, read_machine, take_token
from unisono.facts.slurm import run_slurm
from unisono.launch.asked import TrainRequest, load_asked
from unisono.launch.attempt import Show, say
from unisono.launch.slurm.asked import JobAsked, job_asked, words_of
from unisono.launch.slurm.cluster import (
    Partition,
    gives_out_gpus,
    partitions,
    refuse_nodes_out_of_order,
    refuse_what_cannot_be,
)
from unisono.launch.slurm.ending import result_of_job
from unisono.launch.slurm.following import Follower
from unisono.launch.slurm.job import JobState
from unisono.launch.slurm.lines import Lines
from unisono.launch.slurm.script import batch_script, lines_of, log_of
from unisono.launch.slurm.submitting import submit_once
from unisono.rundir import RunDir
from unisono.rundir.lock import RunLock
from unisono.rundir.start import decide_start, set_aside

_NEW_S = 20.0
"""A job is new for so long: nodes that are out of order then are a reason not to begin; later one waits for them."""


def train_on_slurm(request: TrainRequest, show: Show) -> dict[str, Any]:
    """Carries a start from its config to the end of its job; gives the object of result.json.

    Raises:
        UnisonoError: if it is refused before a job is in the queue, or the job could never start.
    """
    began = time.monotonic()
    take_token()  # the job makes its own, and sbatch would keep this one
    loaded, known = load_asked(request), partitions()
    asked = job_asked(request, loaded.config, gpus=gives_out_gpus(words_of(request)))
    config = _text_of(request)

    def check() -> None:
        decide_start(
            asked.run, loaded.config, resume=request.resume, fresh=request.fresh, allow=request.allowed
        )
        refuse_what_cannot_be(asked, known)
        if request.fresh and asked.run.root.exists() and any(asked.run.root.iterdir()):
            say(show, f"the earlier run is now {_renamed(asked.run)}")

    _tell_inside(request, show)
    submitted = submit_once(asked, config, check=check, say=lambda text: say(show, text))
    if submitted.again:
        say(
            show,
            f"job {submitted.job} was submitted by an earlier command: it is followed again, from its beginning",
        )
    else:
        say(
            show,
            f"submitted as job {submitted.job}; its own words, and Slurm's: {log_of(asked.run.slurm, submitted.job)}",
        )
    follower = Follower(
        submitted.job, Lines(lines_of(asked.run.slurm, submitted.job)), show,
        refuse=_Refusing(asked, known, began, is_new=not submitted.again),
    )  # fmt: skip
    try:
        followed = follower.to_the_end()
    except (UsageError, UnfitError):
        run_slurm("scancel", submitted.job)
        raise
    result, verdict = result_of_job(followed, run=asked.run, seconds=time.monotonic() - began)
    if verdict is not None:
        show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
    if result.get("problems") and not result.get("verdict"):
        show({"kind": "refused", "time": time.time(), "problems": result["problems"]})
    show({"kind": "result", "time": time.time(), **result})
    return result


def script_for(request: TrainRequest) -> str:
    """The script that would be submitted; nothing is.

    Raises:
        UnisonoError: if the job is refused before it is submitted.
    """
    loaded, known = load_asked(request), partitions()
    asked = job_asked(request, loaded.config, gpus=gives_out_gpus(words_of(request)))
    refuse_what_cannot_be(asked, known)
    return batch_script(asked, _text_of(request))


def _renamed(run: RunDir) -> Path:
    """Renames the earlier run, if nobody trains it: its lock is taken for that moment.

    Raises:
        UsageError: if it lives, or cannot be renamed.
    """
    lock = RunLock(run.lock)
    lock.acquire(read_machine(lambda: ([], "")).host, os.getpid())
    try:
        return set_aside(run)
    finally:
        lock.release()


def _text_of(request: TrainRequest) -> str:
    """The config file's text, which has just been read and understood."""
    return request.config_path.read_text(encoding="utf-8-sig")


class _Refusing:
    """Ends what would wait for ever, as soon as the controller says so."""

    def __init__(self, asked: JobAsked, known: dict[str, Partition], began: float, *, is_new: bool) -> None:
        self._asked = asked
        self._known = known
        self._began = began
        self._is_new = is_new

    def __call__(self, state: JobState) -> None:
        """Called with each news of a job that waits.

        Raises:
            UsageError: if nothing will ever change its reason.
            UnfitError: if it is new, and too many nodes are out of order.
        """
        if state.never:
            raise UsageError.of(
                f"job {state.job} would never start, and is cancelled", where=f"Slurm says: {state.reason}",
                why="waiting does not change this reason",
                fix="change --nodes, --partition or --time; account and QOS are read from SBATCH_ACCOUNT and SBATCH_QOS",
            )  # fmt: skip
        if self._is_new and time.monotonic() - self._began < _NEW_S and "NotAvail" in state.reason:
            chosen = [self._known[name] for name in self._asked.partitions if name in self._known]
            refuse_nodes_out_of_order(
                self._asked, chosen or [each for each in self._known.values() if each.is_default]
            )


def _tell_inside(request: TrainRequest, show: Show) -> None:
    """A job that submits a job is seldom meant."""
    step = read_environment().slurm_step
    if step is not None:
        say(
            show,
            f"this is a task of Slurm step {step.name}, and --launcher slurm submits another job; to train here: srun {request.command}",
        )

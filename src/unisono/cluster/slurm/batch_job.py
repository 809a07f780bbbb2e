"""`--launcher slurm`, whole: checked, written, submitted, followed."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.causes import Evidence, Verdict, find_cause
from unisono.cluster.slurm.controller import (
    JobState,
    Partition,
    has_gpus,
    jobs_named,
    partitions,
    read_job,
    refuse_impossible,
    refuse_unusable_nodes,
    slurm_error,
)
from unisono.cluster.slurm.job_follower import JobEnd, JobFollower, JobOutput
from unisono.cluster.slurm.job_request import (
    JobRequest,
    batch_script,
    checked_partitions,
    job_request,
    log_file,
    output_file,
)
from unisono.errors import UnfitError, UsageError
from unisono.events import Show, say
from unisono.facts import read_environment, read_machine, take_token
from unisono.facts.slurm import NodeState, node_states, run_slurm, submitting_environment
from unisono.files import make_private_dir, read_object, write_json, write_text
from unisono.launch.outcome import NOTHING_DONE, Ending, result_of
from unisono.launch.run_records import read_progress
from unisono.launch.train_request import TrainRequest, load_asked
from unisono.rundir import RunDir
from unisono.rundir.lock import RunLock
from unisono.rundir.records import read_result
from unisono.rundir.start_decision import decide_start, set_aside
from unisono.supervise.interrupts import exit_code_of

_SUBMIT_S = 60.0


@dataclass(frozen=True)
class Submitted:
    """A job in the queue, or running.

    Attributes:
        job: its id.
        again: it was submitted by an earlier command.
    """

    job: str
    again: bool


def script_of(asked: JobRequest) -> Path:
    """Where the script is kept."""
    return asked.run.slurm / "job.sh"


def submit_once(
    asked: JobRequest, config: str, *, check: Callable[[], None], say: Callable[[str], None]
) -> Submitted:
    """Submits the job, or finds it where an earlier command has submitted the same one.

    Args:
        asked: the job.
        config: the text of the config file, which becomes part of the script.
        check: called before a new job is submitted; raises where there can be none.
        say: a line for people.

    Raises:
        UsageError: if sbatch refuses, or another job of this run is in the queue.
        UnfitError: if the controller does not answer.
    """
    script = batch_script(asked, config)
    digest = hashlib.sha256(script.encode()).hexdigest()
    if asked.run.slurm.exists():
        with _submission_lock(asked):
            found = _find_submitted(asked, digest)
            if found is not None:
                return found
    check()
    make_private_dir(asked.run.root)
    make_private_dir(asked.run.slurm)
    with _submission_lock(asked):
        found = _find_submitted(asked, digest)  # of a command that was quicker
        if found is not None:
            return found
        write_text(script_of(asked), script, mode=0o600)
        # Before it is submitted: a command that is killed in between finds its job by the name, and knows whose it is.
        write_json(_record(asked), {"schema": 1, "job": None, "digest": digest}, mode=0o600)
        say(f"the batch script, {script_of(asked)}:")
        for line in script.splitlines():
            say(f"  {line}")
        job = _submit(asked)
        write_json(_record(asked), {"schema": 1, "job": job, "digest": digest}, mode=0o600)
    return Submitted(job, again=False)


def _submit(asked: JobRequest) -> str:
    answer = run_slurm(
        "sbatch",
        "--parsable",
        str(script_of(asked)),
        limit_s=_SUBMIT_S,
        environment=submitting_environment(),
        umask=0o077,
    )
    job = answer.out.strip().partition(";")[0]
    if answer.ok and job.isdigit():
        return job
    raise slurm_error("sbatch does not take the job", answer)


def _find_submitted(asked: JobRequest, digest: str) -> Submitted | None:
    """The job of this run that waits or runs.

    Raises:
        UsageError: if it is not the job that is asked for now.
        UnfitError: if the controller does not say what has become of it.
    """
    record = read_object(_record(asked))
    known = record.get("job")
    named = jobs_named(asked.name)
    jobs = dict.fromkeys([*([known] if isinstance(known, str) else []), *(named or [])])
    states = {job: read_job(job) for job in jobs}
    if named is None or None in states.values():
        raise UnfitError.of(
            "Slurm does not say whether a job of this run lives, so none is submitted",
            where=str(asked.run.slurm),
            why="two jobs would train the same run",
            fix="scontrol ping   # and the same command again, once it answers",
        )
    for job, state in states.items():
        if state is None or state.ended or not _is_ours(state, asked):
            continue
        if record.get("digest") != digest:
            raise UsageError.of(
                f"job {job} of this run is {state.state.lower()}, and was submitted with another config or other options",
                where=str(asked.run.slurm),
                why="two jobs would train the same run",
                fix=f"scancel {job}   # then the same command again, or give the earlier command to follow it",
            )
        return Submitted(job, again=True)
    return None


def _is_ours(state: JobState, asked: JobRequest) -> bool:
    """Numbers come again, and names do: it is our script that makes it ours."""
    with contextlib.suppress(OSError):
        return Path(state.script).samefile(script_of(asked))
    return False


def _record(asked: JobRequest) -> Path:
    return asked.run.slurm / "job.json"


@contextlib.contextmanager
def _submission_lock(asked: JobRequest) -> Iterator[None]:
    """Two commands that are typed at once submit one job."""
    fd = os.open(asked.run.slurm / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


_CAUSES = {
    "TIMEOUT": "preempted_sigterm",
    "PREEMPTED": "preempted_sigterm",
    "CANCELLED": "preempted_sigterm",
    "DEADLINE": "preempted_sigterm",
    "NODE_FAIL": "node_unreachable",
    "BOOT_FAIL": "node_unreachable",
    "OUT_OF_MEMORY": "host_oom_killed",
}
_END_TEXTS = {
    "TIMEOUT": "its time limit was over before a checkpoint was saved",
    "PREEMPTED": "another job took its nodes",
    "CANCELLED": "it was cancelled (scancel)",
    "DEADLINE": "its deadline was over",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "a node's memory for it was used up",
    "FAILED": "its script failed",
    "GONE": "the controller has forgotten it",
}
_TAIL = 6


def result_of_job(followed: JobEnd, *, run: RunDir, seconds: float) -> tuple[dict[str, Any], Verdict | None]:
    """The object of result.json, and a verdict to be told, if the head could not tell one itself."""
    if followed.result is not None:
        told = {name: value for name, value in followed.result.items() if name not in ("kind", "time")}
        return told, None
    state = followed.state.state
    if followed.asked is not None or (state == "CANCELLED" and not followed.nodes):
        code = exit_code_of(followed.asked) if followed.asked is not None else 75
        return result_of(
            Ending(code, _known_progress(run)),
            run_id="",
            output_dir=str(run.root),
            restarts=[],
            seconds=seconds,
        ), None
    verdict = _verdict(followed)
    cause = find_cause(verdict.cause)
    code = cause.exit_code if cause is not None and verdict.cause != "undetermined" else 5
    ending = Ending(code, _known_progress(run), verdict)
    return result_of(ending, run_id="", output_dir=str(run.root), restarts=[], seconds=seconds), verdict


def _known_progress(run: RunDir) -> dict[str, Any]:
    """How far the run is: as whoever wrote how it ended has it, else by its files."""
    before = read_result(run)
    if before is not None:
        return {name: getattr(before, name) for name in NOTHING_DONE}
    try:
        return read_progress(run)
    except OSError:  # the directory may be of compute nodes alone
        return NOTHING_DONE


def _verdict(followed: JobEnd) -> Verdict:
    job, state = followed.state.job, followed.state.state
    ill = (
        [node for node in node_states(",".join(followed.nodes)) if not node.usable] if followed.nodes else []
    )
    evidence = [Evidence(where=f"Slurm job {job}", text=_job_line(followed))]
    evidence += [Evidence(where=f"Slurm node {node.name}", text=node.told) for node in ill]
    evidence += [Evidence(where=f"output of job {job}", text=line) for line in followed.tail[-_TAIL:]]
    cause = _CAUSES.get(state, "undetermined")
    named = _node_list(ill, followed.nodes) if cause == "node_unreachable" else ""
    known = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        hosts=tuple(node.name for node in ill) if cause == "node_unreachable" else (),
        summary=f"job {job} ended without a word of its head: {_END_TEXTS.get(state, state.lower())}{named}",
        evidence=tuple(evidence),
        confidence=0.7 if cause != "undetermined" else 0.3,
        fix=(
            "start the same command again: the run goes on from its newest checkpoint",
            *(known.remedy if known else ())[:1],
        ),
    )


def _job_line(followed: JobEnd) -> str:
    state = followed.state
    code = f", exit code {state.code}" if state.code is not None else ""
    reason = f", reason {state.reason}" if state.reason else ""
    where = f", nodes {','.join(followed.nodes)}" if followed.nodes else ""
    return f"{state.state}{reason}{code}{where}, requeued {state.restarts} times"


def _node_list(ill: list[NodeState], nodes: list[str]) -> str:
    names = [
        f"node {nodes.index(node.name)} ({node.name})" if node.name in nodes else node.name for node in ill
    ]
    return f": {', '.join(names)}" if names else ""


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
    asked = job_request(request, loaded.config, gpus=has_gpus(checked_partitions(request)))
    config = _text_of(request)

    def check() -> None:
        decide_start(
            asked.run, loaded.config, resume=request.resume, fresh=request.fresh, allow=request.allowed
        )
        refuse_impossible(asked, known)
        if request.fresh and asked.run.root.exists() and any(asked.run.root.iterdir()):
            say(show, f"the earlier run is now {_renamed(asked.run)}")

    _warn_inside_step(request, show)
    submitted = submit_once(asked, config, check=check, say=lambda text: say(show, text))
    if submitted.again:
        say(
            show,
            f"job {submitted.job} was submitted by an earlier command: it is followed again, from its beginning",
        )
    else:
        say(
            show,
            f"submitted as job {submitted.job}; its own words, and Slurm's: {log_file(asked.run.slurm, submitted.job)}",
        )
    follower = JobFollower(
        submitted.job,
        JobOutput(output_file(asked.run.slurm, submitted.job)),
        show,
        refuse=_WaitCheck(asked, known, began, is_new=not submitted.again),
    )
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
    asked = job_request(request, loaded.config, gpus=has_gpus(checked_partitions(request)))
    refuse_impossible(asked, known)
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


class _WaitCheck:
    """Ends what would wait for ever, as soon as the controller says so."""

    def __init__(self, asked: JobRequest, known: dict[str, Partition], began: float, *, is_new: bool) -> None:
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
                f"job {state.job} would never start, and is cancelled",
                where=f"Slurm says: {state.reason}",
                why="waiting does not change this reason",
                fix="change --nodes, --partition or --time; account and QOS are read from SBATCH_ACCOUNT and SBATCH_QOS",
            )
        if self._is_new and time.monotonic() - self._began < _NEW_S and "NotAvail" in state.reason:
            chosen = [self._known[name] for name in self._asked.partitions if name in self._known]
            refuse_unusable_nodes(
                self._asked, chosen or [each for each in self._known.values() if each.is_default]
            )


def _warn_inside_step(request: TrainRequest, show: Show) -> None:
    """A job that submits a job is seldom meant."""
    step = read_environment().slurm_step
    if step is not None:
        say(
            show,
            f"this is a task of Slurm step {step.name}, and --launcher slurm submits another job; to train here: srun {request.command}",
        )

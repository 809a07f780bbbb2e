"""`--launcher slurm` from start to end: the job is checked, written, submitted and end."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import UnfitError, UsageError
from unisono.base.files import make_private_dir, read_object, write_json, write_text
from unisono.base.messages import ResultMessage, Show, VerdictMessage, message_of, notify
from unisono.guard.facts import no_gpus, read_environment, read_machine, take_token
from unisono.guard.facts.slurm import NodeState, node_states, run_slurm, submitting_environment
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import Progress, RunResult, read_result
from unisono.guard.supervise.interrupts import exit_code_of
from unisono.jobs.launchers.slurm_controller import (
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
from unisono.jobs.launchers.slurm_job_follower import JobEnd, JobFollower, JobOutput
from unisono.jobs.launchers.slurm_job_request import (
    JobRequest,
    batch_script,
    checked_partitions,
    job_request,
    log_file,
    output_file,
)
from unisono.jobs.runs.run_records import Ending, read_progress, result_without_run
from unisono.jobs.runs.start_decision import decide_start, set_aside
from unisono.jobs.runs.train_request import TrainRequest, load_requested
from unisono.trainer.config import LoadedConfig
from unisono.trainer.config.yaml_file import read_config_text

_SUBMIT_S = 60.0


@dataclass(frozen=True)
class Submitted:
    """A queued or running job.

    Attributes:
        again: whether an earlier command submitted it.
    """

    job: str
    again: bool


def script_of(spec: JobRequest) -> Path:
    """The path of the batch script."""
    return spec.run.slurm / "job.sh"


def submit_once(
    spec: JobRequest, config: str, *, check: Callable[[], None], notify: Callable[[str], None]
) -> Submitted:
    """The job, submitted now or by an earlier command with the same script.

    Args:
        config: the text of the config file, which becomes part of the script.
        check: called before a new job is submitted; raises if it cannot run.

    Raises:
        UsageError: if sbatch refuses, or a different job of this run is queued or running.
        UnfitError: if the controller does not answer.
    """
    script = batch_script(spec, config)
    digest = hashlib.sha256(script.encode()).hexdigest()
    if spec.run.slurm.exists():
        with _submission_lock(spec):
            submitted = _find_submitted(spec, digest)
            if submitted is not None:
                return submitted
    check()
    make_private_dir(spec.run.root)
    make_private_dir(spec.run.slurm)
    with _submission_lock(spec):
        submitted = _find_submitted(spec, digest)  # submitted by a concurrent command
        if submitted is not None:
            return submitted
        write_text(script_of(spec), script, mode=0o600)
        # Written before the job is submitted: a command that is killed in between can still find
        # its job by name and identify it.
        write_json(_record(spec), {"schema": 1, "job": None, "digest": digest}, mode=0o600)
        notify(f"the batch script, {script_of(spec)}:")
        for line in script.splitlines():
            notify(f"  {line}")
        job = _submit(spec)
        write_json(_record(spec), {"schema": 1, "job": job, "digest": digest}, mode=0o600)
    return Submitted(job, again=False)


def _submit(spec: JobRequest) -> str:
    answer = run_slurm(
        "sbatch",
        "--parsable",
        str(script_of(spec)),
        limit_s=_SUBMIT_S,
        environment=submitting_environment(),
        umask=0o077,
    )
    job = answer.out.strip().partition(";")[0]
    if answer.ok and job.isdigit():
        return job
    raise slurm_error("sbatch rejected the job", answer)


def _find_submitted(spec: JobRequest, digest: str) -> Submitted | None:
    """The queued or running job of this run.

    Raises:
        UsageError: if it differs from the requested job.
        UnfitError: if the controller does not answer.
    """
    record = read_object(_record(spec))
    known = record.get("job")
    named = jobs_named(spec.name)
    jobs = dict.fromkeys([*([known] if isinstance(known, str) else []), *(named or [])])
    states = {job: read_job(job) for job in jobs}
    if named is None or None in states.values():
        raise UnfitError.of(
            "Slurm does not report whether a job of this run exists, so none is submitted",
            where=str(spec.run.slurm),
            why="two jobs would train the same run",
            fix="scontrol ping   # run the same command again once it answers",
        )
    for job, state in states.items():
        if state is None or state.ended or not _is_own_job(state, spec):
            continue
        if record.get("digest") != digest:
            raise UsageError.of(
                f"job {job} of this run is {state.state.lower()}, and was submitted with a different config"
                " or different options",
                where=str(spec.run.slurm),
                why="two jobs would train the same run",
                fix=(
                    f"scancel {job}   # then run this command again; or run the earlier command to follow"
                    " that job"
                ),
            )
        return Submitted(job, again=True)
    return None


def _is_own_job(state: JobState, spec: JobRequest) -> bool:
    """Whether the job runs our script: job ids and names may be reused."""
    with contextlib.suppress(OSError):
        return Path(state.script).samefile(script_of(spec))
    return False


def _record(spec: JobRequest) -> Path:
    return spec.run.slurm / "job.json"


@contextlib.contextmanager
def _submission_lock(spec: JobRequest) -> Iterator[None]:
    """A lock, so that two concurrent commands submit one job."""
    fd = os.open(spec.run.slurm / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
_STATE_TEXTS = {
    "TIMEOUT": "its time limit ended before a checkpoint was saved",
    "PREEMPTED": "a different job took its nodes",
    "CANCELLED": "it was cancelled (scancel)",
    "DEADLINE": "its deadline passed",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "its memory on a node was exhausted",
    "FAILED": "its script failed",
    "GONE": "the controller no longer has this job",
}
_TAIL = 6


def result_of_job(end: JobEnd, *, run: RunDir, seconds: float) -> tuple[RunResult, Verdict | None]:
    """The result, and a verdict if the head could not report one itself."""
    if end.result is not None:
        return RunResult.from_json(end.result), None
    state = end.state.state
    if end.signal is not None or (state == "CANCELLED" and not end.nodes):
        code = exit_code_of(end.signal) if end.signal is not None else 75
        ending = Ending(code, _known_progress(run))
        return result_without_run(ending, seconds=seconds, output_dir=str(run.root)), None
    verdict = _verdict(end)
    cause = find_cause(verdict.cause)
    code = cause.exit_code if cause is not None and verdict.cause != "undetermined" else 5
    ending = Ending(code, _known_progress(run), verdict)
    return result_without_run(ending, seconds=seconds, output_dir=str(run.root)), verdict


def _known_progress(run: RunDir) -> Progress:
    """The progress of the run: from its result, otherwise from its other files."""
    before = read_result(run)
    if before is not None:
        return Progress(**{one.name: getattr(before, one.name) for one in fields(Progress)})
    try:
        return read_progress(run)
    except OSError:  # the directory may be visible on compute nodes only
        return Progress()


def _verdict(end: JobEnd) -> Verdict:
    job, state = end.state.job, end.state.state
    unusable = [node for node in node_states(",".join(end.nodes)) if not node.usable] if end.nodes else []
    evidence = [Evidence(where=f"Slurm job {job}", text=_job_line(end))]
    evidence += [Evidence(where=f"Slurm node {node.name}", text=node.description) for node in unusable]
    evidence += [Evidence(where=f"output of job {job}", text=line) for line in end.tail[-_TAIL:]]
    cause = _CAUSES.get(state, "undetermined")
    named = _node_list(unusable, end.nodes) if cause == "node_unreachable" else ""
    known = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        hosts=tuple(node.name for node in unusable) if cause == "node_unreachable" else (),
        summary=(
            f"job {job} ended without a result from its head: {_STATE_TEXTS.get(state, state.lower())}{named}"
        ),
        evidence=tuple(evidence),
        confidence=0.7 if cause != "undetermined" else 0.3,
        fix=(
            "run the same command again: it resumes from the latest checkpoint",
            *(known.remedy if known else ())[:1],
        ),
    )


def _job_line(end: JobEnd) -> str:
    state = end.state
    code = f", exit code {state.code}" if state.code is not None else ""
    reason = f", reason {state.reason}" if state.reason else ""
    where = f", nodes {','.join(end.nodes)}" if end.nodes else ""
    return f"{state.state}{reason}{code}{where}, requeued {state.restarts} times"


def _node_list(unusable: list[NodeState], nodes: list[str]) -> str:
    names = [
        f"node {nodes.index(node.name)} ({node.name})" if node.name in nodes else node.name
        for node in unusable
    ]
    return f": {', '.join(names)}" if names else ""


_NEW_S = 20.0
"""A job counts as new for this long. Unusable nodes are then an error; later the job waits for
them.
"""


def train_on_slurm(
    request: TrainRequest, show: Show, *, partition: str | None, time_limit: str | None
) -> RunResult:
    """The result, after submitting the job of a request and following it to its end.

    Raises:
        UnisonoError: if it is refused before a job is queued, or the job could never start.
    """
    began = time.monotonic()
    take_token()  # the job makes its own; sbatch would store this one with the job
    loaded, known = load_requested(request), partitions()
    spec = _job_request(request, loaded, partition, time_limit)
    config = read_config_text(request.config_path)

    def check() -> None:
        decide_start(
            spec.run,
            loaded.config,
            resume=request.resume,
            fresh=request.fresh,
            allow=request.allowed,
            origins=loaded.origins,
        )
        refuse_impossible(spec, known)
        if request.fresh and spec.run.root.exists() and any(spec.run.root.iterdir()):
            notify(show, f"the earlier run is now {_renamed(spec.run)}")

    _warn_inside_step(request, show)
    submitted = submit_once(spec, config, check=check, notify=lambda text: notify(show, text))
    if submitted.again:
        notify(
            show,
            f"job {submitted.job} was submitted by an earlier command: following it again, from its"
            " beginning",
        )
    else:
        notify(
            show,
            f"submitted as job {submitted.job}; its log: {log_file(spec.run.slurm, submitted.job)}",
        )
    follower = JobFollower(
        submitted.job,
        JobOutput(output_file(spec.run.slurm, submitted.job)),
        show,
        refuse=_WaitCheck(spec, known, began, is_new=not submitted.again),
    )
    try:
        end = follower.follow()
    except (UsageError, UnfitError):
        run_slurm("scancel", submitted.job)
        raise
    result, verdict = result_of_job(end, run=spec.run, seconds=time.monotonic() - began)
    if verdict is not None:
        show(message_of(VerdictMessage, verdict.to_json()))
    if result.problems and not result.verdict:
        show({"kind": "refused", "time": time.time(), "problems": result.problems})
    show(message_of(ResultMessage, result.to_json()))
    return result


def script_for(request: TrainRequest, *, partition: str | None, time_limit: str | None) -> str:
    """The script that would be submitted; nothing is submitted.

    Raises:
        UnisonoError: if the job would be refused before submission.
    """
    loaded, known = load_requested(request), partitions()
    spec = _job_request(request, loaded, partition, time_limit)
    refuse_impossible(spec, known)
    return batch_script(spec, read_config_text(request.config_path))


def _job_request(
    request: TrainRequest, loaded: LoadedConfig, partition: str | None, time_limit: str | None
) -> JobRequest:
    gpus = has_gpus(checked_partitions(partition, time_limit))
    return job_request(request, loaded.config, partition=partition, time_limit=time_limit, gpus=gpus)


def _renamed(run: RunDir) -> Path:
    """The new path of the earlier run, renamed while its lock is held.

    Raises:
        UsageError: if it is running, or cannot be renamed.
    """
    lock = RunLock(run.lock)
    lock.acquire(read_machine(no_gpus).host, os.getpid())
    try:
        return set_aside(run)
    finally:
        lock.release()


class _WaitCheck:
    """Refuses a job that would wait forever, as soon as the controller shows it."""

    def __init__(self, spec: JobRequest, known: dict[str, Partition], began: float, *, is_new: bool) -> None:
        self._spec = spec
        self._known = known
        self._began = began
        self._is_new = is_new

    def __call__(self, state: JobState) -> None:
        """Checks each new state of a waiting job.

        Raises:
            UsageError: if its reason for waiting never changes.
            UnfitError: if the job is new and too many nodes are unusable.
        """
        if state.never:
            raise UsageError.of(
                f"job {state.job} could never start and is cancelled",
                where=f"Slurm reports: {state.reason}",
                why="this reason does not change with time",
                fix=(
                    "change --nodes, --partition or --time; account and QOS are read from SBATCH_ACCOUNT and"
                    " SBATCH_QOS"
                ),
            )
        if self._is_new and time.monotonic() - self._began < _NEW_S and "NotAvail" in state.reason:
            chosen = [self._known[name] for name in self._spec.partitions if name in self._known]
            refuse_unusable_nodes(
                self._spec, chosen or [each for each in self._known.values() if each.is_default]
            )


def _warn_inside_step(request: TrainRequest, show: Show) -> None:
    """Warns inside a Slurm step: a job that submits a job is rarely intended."""
    step = read_environment().slurm_step
    if step is not None:
        notify(
            show,
            f"this is a task of Slurm step {step.name}, and --launcher slurm submits a new job; to train in"
            f" this allocation: srun {request.command}",
        )

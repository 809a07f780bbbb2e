"""Writes the batch script, submits it once, and finds the job again that an earlier command has submitted."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UnfitError, UsageError
from unisono.facts.slurm import run_slurm, submitting_environment
from unisono.files import make_private_dir, read_object, write_json, write_text
from unisono.launch.slurm.asked import JobAsked
from unisono.launch.slurm.cluster import refused_by_slurm
from unisono.launch.slurm.job import JobState, jobs_named, read_job
from unisono.launch.slurm.script import batch_script

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


def script_of(asked: JobAsked) -> Path:
    """Where the script is kept."""
    return asked.run.slurm / "job.sh"


def submit_once(
    asked: JobAsked, config: str, *, check: Callable[[], None], say: Callable[[str], None]
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
        with _alone(asked):
            found = _find(asked, digest)
            if found is not None:
                return found
    check()
    make_private_dir(asked.run.root)
    make_private_dir(asked.run.slurm)
    with _alone(asked):
        found = _find(asked, digest)  # of a command that was quicker
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


def _submit(asked: JobAsked) -> str:
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
    raise refused_by_slurm("sbatch does not take the job", answer)


def _find(asked: JobAsked, digest: str) -> Submitted | None:
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
            "Slurm does not say whether a job of this run lives, so none is submitted", where=str(asked.run.slurm),
            why="two jobs would train the same run", fix="scontrol ping   # and the same command again, once it answers",
        )  # fmt: skip
    for job, state in states.items():
        if state is None or state.ended or not _is_ours(state, asked):
            continue
        if record.get("digest") != digest:
            raise UsageError.of(
                f"job {job} of this run is {state.state.lower()}, and was submitted with another config or other options",
                where=str(asked.run.slurm), why="two jobs would train the same run",
                fix=f"scancel {job}   # then the same command again, or give the earlier command to follow it",
            )  # fmt: skip
        return Submitted(job, again=True)
    return None


def _is_ours(state: JobState, asked: JobAsked) -> bool:
    """Numbers come again, and names do: it is our script that makes it ours."""
    with contextlib.suppress(OSError):
        return Path(state.script).samefile(script_of(asked))
    return False


def _record(asked: JobAsked) -> Path:
    return asked.run.slurm / "job.json"


@contextlib.contextmanager
def _alone(asked: JobAsked) -> Iterator[None]:
    """Two commands that are typed at once submit one job."""
    fd = os.open(asked.run.slurm / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

"""What Slurm cannot or will not give is said in seconds, in its own words, and nothing stays in the
queue.

Run: pytest tests/jobs/slurm/test_refusals.py. A real Slurm on network namespaces; skipped with the
reason where there is none.
"""

import shutil
from pathlib import Path

import pytest

from tests.jobs.slurm.harness import SlurmJob

pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine
TWO = ("--launcher", "slurm", "--nodes", "2", "--nproc", "1")


def refused(job: SlurmJob, *words: str, code: int = 2, **named: object) -> str:
    """Types it; gives what was said. Nothing is left: no job, no folder of a run."""
    front = job.type("--launcher", "slurm", *words, json=False, **named)  # type: ignore[arg-type]
    assert front.wait(limit_s=180) == code, front.text()
    assert "Traceback" not in front.text()
    job.until(lambda: not job.slurm.jobs(), what="the queue is empty", limit_s=30)
    assert not (job.out / "plan.json").exists()
    return front.text()


@pytest.mark.slow
def test_misspelt_or_too_large_requests_are_refused_before_submission(job: SlurmJob) -> None:
    printed = refused(job, "--partition", "mian", "--nodes", "2")
    assert "unknown partition mian" in printed
    assert "this cluster has closed, main, narrow, urgent" in printed
    printed = refused(job, "--nodes", "9")
    assert "9 nodes are requested, and partition main has 2 nodes" in printed
    printed = refused(job, "--nodes", "2", "--partition", "narrow")
    assert "partition narrow has 2 nodes, of which one job can have 1" in printed
    printed = refused(job, "--partition", "narrow", "--time", "1:00:00")
    assert "--time 1:00:00 is longer than partition narrow allows" in printed
    assert "MaxTime=00:05:00" in printed
    assert "ends before anything could be trained" in refused(job, "--time", "1")
    for words in (("--partition", "a;b"), ("--partition", "-x"), ("--time", "1 0"), ("--time", "$(date)")):
        assert "is not a valid name or limit for Slurm" in refused(job, *words)
    assert "remove --head" in refused(job, "--nodes", "2", "--head", "ada")
    assert not job.out.exists()


@pytest.mark.slow
def test_what_would_wait_for_ever_is_cancelled_and_refused_in_slurms_words(job: SlurmJob) -> None:
    printed = refused(job, "--partition", "closed")
    assert "could never start and is cancelled" in printed
    assert "can't use this partition (closed allows nobody)" in printed
    printed = refused(job, "--time", "tomorrow")
    assert "Slurm reports: " in printed
    assert "Invalid --time specification" in printed


@pytest.mark.slow
def test_nodes_that_are_out_of_order_are_named_with_their_reason(job: SlurmJob) -> None:
    job.slurm.run("scontrol", "update", "nodename=bob", "state=drain", "reason=disk is dying")
    printed = refused(job, *TWO[2:], code=6)
    assert "2 nodes are requested, and 1 of partition main are usable now" in printed
    assert "bob is IDLE+DRAIN: disk is dying" in printed


@pytest.mark.slow
def test_silent_controller_and_machine_without_slurm_are_distinguished(job: SlurmJob, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        job.slurm.conf.read_text().replace("SlurmctldPort=16817", "SlurmctldPort=16820")
        + "MessageTimeout=2\n"
    )
    printed = refused(job, code=6, env={"SLURM_CONF": str(tmp_path / "slurm.conf")})
    assert "Slurm does not answer" in printed
    printed = refused(job, env={"SLURM_CONF": ""})
    assert "this machine belongs to no Slurm cluster" in printed
    assert "SLURM_CONF" in printed
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "env"):
        (bare / name).symlink_to(shutil.which(name) or name)
    front = job.type("--launcher", "slurm", json=False, before=["env", f"PATH={bare}"])
    assert front.wait(limit_s=180) == 2, front.text()
    assert "needs sbatch, which is not installed here" in front.text()

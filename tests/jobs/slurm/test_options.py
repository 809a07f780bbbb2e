"""What the options of `--launcher slurm` come to: the script alone, a fresh run, fewer nodes.

Run: pytest -m long tests/jobs/slurm/test_options.py

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import pytest

from tests.jobs.slurm.harness import SlurmJob

TWO = ("--launcher", "slurm", "--nodes", "2", "--nproc", "1")
LONG_S = 1000.0
pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine


@pytest.mark.slow
def test_a_dry_run_shows_the_script_and_submits_nothing(job: SlurmJob) -> None:
    front = job.type(*TWO, "--time", "2:00:00", "--dry-run", json=False)
    assert front.wait() == 0, front.text()
    for line in ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --time=2:00:00", "#SBATCH --requeue"):
        assert line in front.text("out").splitlines()
    assert not job.slurm.jobs()
    assert not job.out.exists()


@pytest.mark.long
@pytest.mark.ranks
def test_fresh_start_and_its_requeue_keep_the_earlier_run_renamed(
    job: SlurmJob,
) -> None:
    first = job.type(*TWO)
    assert first.wait(limit_s=LONG_S) == 0, first.text()
    front = job.type(*TWO, "--fresh", json=False)
    assert front.wait(limit_s=LONG_S) == 0, front.text()
    old = job.out.with_name("out.old-1")
    assert f"the earlier run is now {old}" in front.text()
    for run in (job.out, old):
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert "--fresh" not in (job.out / "slurm/job.sh").read_text().split("#SBATCH", 1)[1]


@pytest.mark.long
@pytest.mark.ranks
def test_with_min_and_max_nodes_the_job_continues_without_one_that_is_lost(job: SlurmJob) -> None:
    job.config(
        duration="300 steps", batch={"global": 8, "micro": 1}, checkpoint={"every": "10 steps"},
        optim={"lr": 1e-3, "schedule": "constant", "warmup": "0 steps"},
    )  # fmt: skip
    front = job.type("--launcher", "slurm", "--nodes", "1:2", "--nproc", "1", "--restarts", "1")
    job.waits_for_step(12)
    number = job.slurm.jobs()
    job.slurm.stop_node(1)
    assert front.wait(limit_s=LONG_S) == 0, front.text()
    assert front.verdicts[0].hosts == ("bob",)
    assert "node 1 (bob)" in front.verdicts[0].summary
    assert [len(message["nodes"]) for message in front.messages("plan")] == [2, 1]
    assert [line["step"] for line in job.metrics()] == list(range(1, 301))
    reported = job.slurm.run("scontrol", "show", "job", number[0])
    assert "Restarts=0" in reported, "it is the same start of the same job"

"""What becomes of batch jobs: followed again, stopped, out of time, preempted, broken.

Run: pytest -m long tests/jobs/slurm/test_jobs.py

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import signal
from collections.abc import Callable

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback
from tests.jobs.slurm.harness import SlurmJob

pytestmark = [
    pytest.mark.long,
    pytest.mark.ranks,
    pytest.mark.timeout(1800),
]  # a cluster may take long to come up on a loaded machine
TWO = ("--launcher", "slurm", "--nodes", "2", "--nproc", "1")
FAR = "2000000 steps"
LONG_S = 1000.0


def slow(job: Job, duration: str, **sections: object) -> None:
    """Steps that take a while, and a learning rate that does not know how many there will be."""
    job.config(
        duration=duration, batch={"global": 8, "micro": 1}, optim={"lr": 1e-3, "schedule": "constant", "warmup": "0 steps"},
        checkpoint={"every": "10 steps"}, **sections,
    )  # fmt: skip


def once_each(job: Job) -> list[float]:
    """The losses of a run of which every step is there once."""
    steps = [line["step"] for line in job.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    return [line["loss"] for line in job.metrics()]


@pytest.fixture
def undisturbed(job: SlurmJob) -> Callable[[int], list[float]]:
    """The losses of the same run on this machine, with as many ranks and without Slurm."""

    def train(steps: int) -> list[float]:
        here = job.folder / "undisturbed"
        here.mkdir()
        other = Job(Loopback(), here, model=job.model, rows=job.rows, caches=job.caches, nodes=1)
        slow(other, f"{steps} steps")
        front = other.start(0, "--nproc", "2", topology=False)
        try:
            assert front.wait(limit_s=LONG_S) == 0, front.text()
            return once_each(other)
        finally:
            other.close()

    return train


def job_number(front: Front) -> str:
    """The number of the job that a command follows."""
    return next(
        line.text.split("job ")[1].split(";")[0].split()[0]
        for line in front.lines
        if "job " in line.text and "batch" not in line.text
    )


def test_killed_follower_leaves_the_job_and_the_same_command_follows_again(job: SlurmJob) -> None:
    slow(job, FAR)
    first = job.type(*TWO, json=False)
    job.waits_for_step(3)
    first.signal(signal.SIGKILL)
    first.wait()
    number = job.slurm.jobs()
    assert len(number) == 1
    other = job.type(*TWO, "--restarts", "0", json=False)
    assert other.wait() == 2, other.text()
    assert (
        f"job {number[0]} of this run is running, and was submitted with a different config or different"
        " options" in other.text()
    )
    again = job.type(*TWO, json=False)
    again.wait_for(f"job {number[0]} was submitted by an earlier command: following it again")
    again.wait_for("2: 1 on ada (--nproc), 1 on bob (--nproc)")
    again.wait_for("step ")
    assert job.slurm.jobs() == number
    again.signal(signal.SIGINT)
    assert again.wait(limit_s=LONG_S) == 130, again.text()
    assert "will save a checkpoint and end (scancel --signal=INT)" in again.text()
    assert job.read("result.json")["outcome"] == "interrupted"
    assert job.read("result.json")["checkpoint"]
    job.until(lambda: not job.slurm.jobs(), what="the queue is empty")
    job.wait_gone()
    once_each(job)


def test_job_at_its_time_limit_saves_requeues_and_continues_bit_equal(
    job: SlurmJob, undisturbed: Callable[[int], list[float]]
) -> None:
    slow(job, FAR, grace="10 seconds")
    front = job.type(*TWO, "--time", "3", json=False)
    front.wait_for("is back in the queue (once) and resumes from its checkpoint", limit_s=LONG_S)
    saved = len(once_each(job))
    assert saved
    log = "".join(path.read_text() for path in (job.out / "slurm").glob("*.log"))
    assert "the time limit is reached; the job is requeued and will resume from step-" in log
    job.waits_for_step(saved + 2)
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=LONG_S) == 75, front.text()
    losses = once_each(job)
    assert len(losses) >= saved + 2
    assert losses == undisturbed(len(losses))


def test_job_whose_nodes_go_to_an_urgent_one_continues_bit_equal(
    job: SlurmJob, undisturbed: Callable[[int], list[float]]
) -> None:
    slow(job, "60 steps")
    front = job.type(*TWO, json=False)
    job.waits_for_step(12)
    job.slurm.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    front.wait_for("is back in the queue (once) and resumes from its checkpoint", limit_s=LONG_S)
    assert front.wait(limit_s=LONG_S) == 0, front.text()
    assert once_each(job) == undisturbed(60)


def test_killed_worker_is_named_and_the_run_continues_until_cancelled(
    job: SlurmJob,
) -> None:
    """It continues in its allocation."""
    slow(job, FAR)
    front = job.type(*TWO, "--restarts", "1")
    job.waits_for_step(5)
    job.ranks()[1].kill()
    front.wait_for('"kind": "verdict"')
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_killed", (1,), ("bob",))
    number = job.slurm.jobs()[0]
    assert any(
        item.where == f"Slurm job {number}, step {number}.0" and "ada,bob" in item.text
        for item in verdict.evidence
    )
    front.wait_until(
        lambda: 0.0 if len(front.messages("plan")) == 2 else None, what="a second plan", limit_s=LONG_S
    )
    step = front.messages("step")[-1]["step"]
    job.waits_for_step(step + 2)
    job.slurm.run("scancel", number)
    assert front.wait(limit_s=LONG_S) == 75, front.text()
    assert front.result["outcome"] == "preempted"
    assert len(front.result["restarts"]) == 1
    job.until(lambda: not job.slurm.jobs(), what="the queue is empty")
    job.wait_gone()
    once_each(job)


def test_a_stopped_rank_is_named_and_a_node_that_drains_is_in_the_evidence(job: SlurmJob) -> None:
    slow(job, FAR)
    front = job.type(*TWO, "--restarts", "0", json=False)
    job.waits_for_step(5)
    job.slurm.run("scontrol", "update", "nodename=bob", "state=drain", "reason=fan is broken")
    front.wait_for("node 1 (bob) of this job is MIXED+DRAIN: fan is broken; the job continues to its end")
    job.ranks()[1].suspend()
    assert front.wait(limit_s=LONG_S) == 4, front.text()
    verdict = job.read("verdict.json")
    assert (verdict["cause"], verdict["ranks"], verdict["hosts"]) == ("rank_stopped", [1], ["bob"])
    cited = {item["where"]: item["text"] for item in verdict["evidence"]}
    assert cited["Slurm node bob"] == "node 1 (bob) is MIXED+DRAIN: fan is broken"
    assert "fan is broken" in front.text()
    job.wait_gone()


def test_node_that_goes_away_is_named_and_the_job_continues_with_it_back(job: SlurmJob) -> None:
    slow(job, FAR, restarts=0)
    front = job.type(*TWO, json=False)
    job.waits_for_step(5)
    job.slurm.stop_node(1)
    front.wait_for("is back in the queue (once) and resumes from its checkpoint", limit_s=LONG_S)
    front.wait_for("bob is DOWN")
    verdict = job.read("verdict.json")
    assert verdict["hosts"] == ["bob"]
    assert "node 1 (bob)" in verdict["summary"]
    saved = job.read("result.json")["step"]
    assert saved >= 5
    job.slurm.start_node(1)
    job.waits_for_step(saved + 2)
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=LONG_S) == 75, front.text()
    once_each(job)

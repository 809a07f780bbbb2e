"""Several ranks on one machine: `unisono train CONFIG --nproc N`.

Run: pytest tests/jobs/nproc/test_train.py
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.jobs.nodes.fronts import LIMIT_S
from tests.jobs.nodes.harness import Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LEFTOVERS = {
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1",
    "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def train(job: Job, *words: str, **named: object) -> Job:
    front = job.start(0, *words, topology=False, **named)  # type: ignore[arg-type]
    assert front.wait() == 0, front.text()
    job.wait_gone()
    return job


def test_two_ranks_leave_a_whole_record_despite_leftovers_of_a_launcher(solo: Job) -> None:
    """Seed 3: with these variables, other trainers wait for ranks that nobody starts."""
    train(solo, "--nproc", "2", env=LEFTOVERS)
    assert [line["step"] for line in solo.metrics()] == [1, 2, 3, 4]
    plan = solo.read("plan.json")
    assert set(LEFTOVERS) <= set(plan["ignored_variables"])
    assert (plan["world_size"], plan["strategy"], plan["epoch"]) == (2, "ddp", 0)
    assert [(place["rank"], place["node_rank"], place["local_rank"]) for place in plan["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert plan["nodes"][0]["nproc_origin"] == "--nproc"
    result = solo.read("result.json")
    assert (result["outcome"], result["exit_code"], result["step"], result["verdict"]) == (
        "completed",
        0,
        4,
        None,
    )
    agreement = solo.read("agreement.json")
    assert agreement["schema"] == 1
    assert [rank["rank"] for rank in agreement["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in agreement["ranks"]}) == 2
    assert {check["status"] for check in agreement["checks"]} <= {"pass", "warn", "unknown"}
    for rank in range(2):
        events = (solo.out / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        assert all("kind" in json.loads(line) for line in events)
        assert list((solo.out / "logs").glob(f"*-rank-{rank:05d}.log"))
    assert (solo.out / "adapter" / "adapter_model.safetensors").exists()
    assert not (solo.out / "verdict.json").exists()


def test_lone_node_with_too_few_open_files_is_unfit_and_does_not_disagree(
    solo: Job,
) -> None:
    words = [sys.executable, "-m", "unisono", "train", "c.yaml", "--nproc", "2"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *words], cwd=solo.home(0), capture_output=True, text=True, check=False,
        timeout=LIMIT_S,
    )  # fmt: skip
    reported = done.stdout + done.stderr
    assert done.returncode == 6, reported
    assert "only 128 open files per process (ulimit -n)" in reported
    assert "unfit: nothing was trained" in reported
    assert "disagreed" not in reported
    assert "any node" not in reported
    result = solo.read("result.json")
    assert (result["outcome"], result["exit_code"], result["verdict"]["cause"]) == ("unfit", 6, "ulimit")
    assert solo.read("verdict.json")["cause"] == "ulimit"


@pytest.mark.parametrize(("nproc", "size"), [(2, 5), pytest.param(4, 6, marks=pytest.mark.long)])
def test_batches_that_do_not_divide_train_what_one_rank_trains(
    solo_of: Callable[[], Job], nproc: int, size: int
) -> None:
    """Four ranks on two cores, too: slow, and right."""
    losses = []
    for words in ([], ["--nproc", str(nproc)]):
        job = solo_of()
        job.config(batch={"global": size})
        losses.append([line["loss"] for line in train(job, *words).metrics()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.long
def test_leftovers_of_a_launcher_make_no_process_group_for_one_device(solo: Job) -> None:
    train(solo, "--nproc", "1", env=LEFTOVERS)
    plan = solo.read("plan.json")
    assert (plan["world_size"], plan["strategy"]) == (1, "single")
    assert set(LEFTOVERS) <= set(plan["ignored_variables"])


@pytest.mark.long
def test_a_run_continues_with_a_different_number_of_ranks(solo: Job) -> None:
    train(solo, "--nproc", "2")
    train(solo, "--resume", "duration=6 steps")
    train(solo, "--nproc", "2", "--resume", "duration=8 steps")
    assert [line["step"] for line in solo.metrics()] == list(range(1, 9))

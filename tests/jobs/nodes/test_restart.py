"""A run that lost ranks or a node goes on, agreed again, with nothing lost.

Run: pytest tests/jobs/nodes/test_restart.py
"""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs.nodes.fronts import LIMIT_S, Front, together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.nproc.saved_checkpoints import published
from tests.jobs.resume.trained_rows import each_equally_often, rows_of, worlds

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 60
EITHER = ("--nodes", "2:3")


def prepared(job: Job, **sections: Any) -> Path:
    """Configures a run of some steps; gives the folder in which its ranks write down their rows."""
    folder = job.folder / "rows"
    folder.mkdir()
    job.config(
        duration=f"{STEPS} steps",
        checkpoint={"every": "2 steps"},
        adapter=None,
        optim={"lr": 1e-3},
        **sections,
    )
    return folder


def started(job: Job, rows: Path, *words: str, **named: Any) -> list[Front]:
    """All nodes; rank by rank they write down what they train on."""
    return job.start_all(*words, answers={"faults": {"write_rows": str(rows)}}, **named)


def undisturbed(job: Job) -> tuple[list[float], Any]:
    """The losses and rows of the same run on one node with one rank, which nobody disturbs."""
    rows = prepared(job)
    front = job.start(0, topology=False, answers={"faults": {"write_rows": str(rows)}})
    assert front.wait() == 0, front.text()
    return [line["loss"] for line in job.metrics()], rows_of(rows)


def assert_nothing_lost(job: Job, rows: Path, alone: Job) -> None:
    """Every step once, with the losses and the rows of the undisturbed run."""
    losses, wanted = undisturbed(alone)
    assert [line["step"] for line in job.metrics()] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in job.metrics()] == pytest.approx(losses, rel=1e-5)
    made = rows_of(rows)
    assert made == wanted
    assert each_equally_often(made)


@pytest.mark.fault("a front is killed (kill -9) of three nodes, --nodes 2:3")
def test_a_run_continues_without_the_node_that_was_lost(trio: Job, job_of: Any) -> None:
    rows = prepared(trio)
    fronts = started(trio, rows, *EITHER, json=False)
    trio.waits_for_step(5)
    trio.until(
        lambda: published(trio)[-1:] >= ["step-00000004"],
        what="the checkpoint of step 4, which is made beside the steps",
    )
    before = set(trio.ranks())
    old = [process.pid for process in trio.ranks().values()]
    fronts[1].signal(signal.SIGKILL)
    assert before == {0, 1, 2}
    assert together(fronts) == [0, -9, 0], trio.transcript()
    assert_nothing_lost(trio, rows, job_of(1))
    assert worlds(rows) == [3, 2]
    (restart,) = trio.read("result.json")["restarts"]
    assert (restart["verdict"]["cause"], restart["verdict"]["hosts"]) == (
        "node_unreachable",
        [fronts[1].host],
    )
    assert restart["from_step"] >= 4
    assert 0 < restart["cost_s"] < LIMIT_S
    line = (
        f"continues with 2 of 3 nodes, without {fronts[1].label}: 2 ranks instead of 3, the same 8 sequences"
        " per step"
    )
    for front in (fronts[0], fronts[2]):
        assert line in front.text(), trio.transcript()
    plan = trio.read("plan.json")
    assert (plan["epoch"], [node["node_rank"] for node in plan["nodes"]]) == (1, [0, 2])
    assert [(place["rank"], place["node_rank"]) for place in plan["ranks"]] == [(0, 0), (1, 2)]
    assert not any(psutil.pid_exists(pid) for pid in old)
    trio.wait_gone()


@pytest.mark.long
def test_job_that_needs_all_its_nodes_ends_and_reports_how_to_continue(trio: Job) -> None:
    prepared(trio)
    fronts = trio.start_all("duration=5000 steps", json=False)
    trio.waits_for_step(3)
    fronts[1].signal(signal.SIGKILL)
    assert together(fronts) == [4, -9, 4], trio.transcript()
    assert "with --nodes MIN:3 it could continue without that node" in fronts[0].text()
    assert trio.read("verdict.json")["hosts"] == [fronts[1].host]
    assert trio.read("result.json")["restarts"] == []
    trio.wait_gone()


@pytest.mark.long
@pytest.mark.fault("one of three nodes never comes, --nodes 2:3")
def test_enough_nodes_start_at_the_timeout_and_a_late_one_is_not_let_in(trio: Job, job_of: Any) -> None:
    rows = prepared(trio)
    words = (*EITHER, "--join-timeout", "15")
    slow = {"rank": 0, "step": 2, "seconds": 0.3}  # the late one is to find a run that goes on
    answers = {"faults": {"write_rows": str(rows), "slow": slow}}
    fronts = [trio.start(node, *words, json=False, answers=answers) for node in (0, 2)]
    trio.waits_for_step(2)
    late = trio.start(1, *words, json=False)
    assert late.wait() == 3, late.text()
    assert together(fronts) == [0, 0], trio.transcript()
    for front in fronts:
        assert "starting with 2 of 3 nodes: node 1 has never connected" in front.text(), trio.transcript()
    assert_nothing_lost(trio, rows, job_of(1))
    assert [node["node_rank"] for node in trio.read("plan.json")["nodes"]] == [0, 2]
    assert "is too late: the job has started without it" in late.text()
    trio.wait_gone()


@pytest.mark.long
@pytest.mark.fault("the cable of one of three nodes is pulled, --nodes 2:3")
def test_a_node_that_is_cut_off_ends_by_itself_and_the_others_continue(
    networks: Namespaces, trio: Job, job_of: Any
) -> None:
    rows = prepared(trio, parallel={"strategy": "fsdp"})
    fronts = started(trio, rows, *EITHER, json=False)
    trio.waits_for_step(3)
    networks.inside(1, "ip", "link", "set", "eth0", "down")
    assert together(fronts) == [0, 4, 0], trio.transcript()
    assert "lost the connection to the head" in fronts[1].text()
    assert_nothing_lost(trio, rows, job_of(1))
    assert worlds(rows) == [3, 2]
    assert trio.read("plan.json")["strategy"] == "fsdp"
    trio.wait_gone()


@pytest.mark.long
@pytest.mark.fault("a process of the ranks before still lives")
def test_node_with_old_ranks_is_named_on_all_nodes_and_nothing_is_started(pair: Job) -> None:
    """What stays alive is a stand-in for a rank that waits in the kernel: it has a rank's command
    line, and nobody kills it.
    """
    prepared(pair)
    fronts = pair.start_all("duration=5000 steps")
    pair.waits_for_step(3)
    words = ["import time; time.sleep(600)", "--events", "x", "--front-pid", str(fronts[1].pid)]
    with subprocess.Popen([sys.executable, "-c", *words]) as left:
        pair.ranks()[1].kill()
        codes = together(fronts)
        left.kill()
    assert codes == [3, 3], pair.transcript()
    reported = [verdict for verdict in fronts[0].verdicts if verdict.cause == "stale_process"]
    assert reported
    assert reported[0].hosts == (fronts[1].host,)
    assert f"pid {left.pid}" in reported[0].summary
    assert reported[0].summary in fronts[1].text()
    result = pair.read("result.json")
    assert (result["outcome"], result["verdict"]["cause"]) == ("disagreed", "stale_process")
    assert result["step"] >= 3
    assert result["checkpoint"]
    pair.wait_gone()


@pytest.mark.long
@pytest.mark.fault("one node does not see the head's checkpoints any more")
def test_a_node_whose_storage_is_gone_is_left_out_and_the_others_continue(
    networks: Namespaces, trio: Job, job_of: Any
) -> None:
    del networks
    rows = prepared(trio)
    trio.out.mkdir()
    answers = {"faults": {"write_rows": str(rows)}}
    seen = Own(binds=[(trio.out, trio.out)])
    fronts = [
        trio.start(node, *EITHER, json=False, answers=answers, own=seen if node == 1 else None)
        for node in range(3)
    ]
    trio.waits_for_step(3)
    empty = trio.folder / "empty"
    empty.mkdir()
    mount = ["mount", "--bind", str(empty), str(trio.out)]
    subprocess.run(["nsenter", "-t", str(fronts[1].pid), "-m", *mount], check=True)
    trio.ranks()[2].kill()
    assert together(fronts) == [0, 3, 0], trio.transcript()
    printed = f"{fronts[1].label} does not see the checkpoint to resume from"
    assert all(printed in front.text() for front in fronts), trio.transcript()
    assert_nothing_lost(trio, rows, job_of(1))
    trio.wait_gone()


@pytest.mark.long
@pytest.mark.fault("a rank is stopped, two nodes, restarts allowed")
def test_a_verdict_of_the_watch_is_followed_by_a_restart(pair: Job) -> None:
    prepared(pair)
    pair.config(duration="400 steps", restarts=1)
    fronts = pair.start_all()
    pair.waits_for_step(5)
    pair.ranks()[1].send_signal(signal.SIGSTOP)
    assert together(fronts) == [0, 0], pair.transcript()
    (restart,) = pair.read("result.json")["restarts"]
    assert (restart["verdict"]["cause"], restart["verdict"]["ranks"]) == ("rank_stopped", [1])
    assert [line["step"] for line in pair.metrics()] == list(range(1, 401))
    pair.wait_gone()

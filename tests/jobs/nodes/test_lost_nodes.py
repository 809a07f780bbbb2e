"""What becomes of the others when one ends. Run: pytest tests/jobs/nodes/test_lost_nodes.py"""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tests.jobs.nodes.injected.sitecustomize as injected
from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nodes.verdict_checks import named
from unisono.guard.control.connection import SILENCE_S

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FOREVER = "5000 steps"
INJECTED = {"PYTHONPATH": str(Path(injected.__file__).parent)}


def training(job: Job, *words: str, step: int = 3, **named: Any) -> list[Front]:
    """Starts all nodes on a run without a near end, and waits until it trains."""
    job.config(duration=FOREVER, restarts=0)
    fronts = job.start_all(*words, answers=PACED, **named)
    job.waits_for_step(step)
    return fronts


def struck(job: Job, rank: int, number: int) -> float:
    """Sends a signal to a rank; gives the moment."""
    process = job.ranks()[rank]
    moment = time.monotonic()
    process.send_signal(number)
    return moment


@pytest.mark.fault("a rank is killed (kill -9), two nodes")
def test_a_killed_rank_ends_all_nodes_and_is_named_on_each(pair: Job) -> None:
    fronts = training(pair)
    moment = struck(pair, 1, signal.SIGKILL)
    assert together(fronts, limit_s=60) == [5, 5], pair.transcript()
    found = named(fronts, since=moment)
    verdict = found.verdict
    assert f"rank 1, {fronts[1].label}" in verdict.summary
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_killed", (1,), (fronts[1].host,))
    assert verdict.when == "during"
    assert found.ended_s < 20
    assert pair.read("verdict.json")["ranks"] == [1]
    pair.wait_gone()


@pytest.mark.long
@pytest.mark.fault("an exception in one rank, two nodes")
def test_exception_in_one_rank_is_named_and_the_others_are_not_blamed(pair: Job) -> None:
    """Rank 0 loses its peer, and says so in its log; rank 1's own error is what every node
    prints.
    """
    fronts = training(pair, env=INJECTED)
    moment = struck(pair, 1, injected.RAISE)
    assert together(fronts, limit_s=60) == [5, 5], pair.transcript()
    verdict = named(fronts, since=moment).verdict
    assert f"rank 1, {fronts[1].label}" in verdict.summary
    assert (verdict.cause, verdict.ranks) == ("user_code_error", (1,))
    assert "a batch of nothing" in str(verdict.to_json())
    assert "rank 0" not in verdict.summary
    assert all("Connection closed by peer" not in front.text() for front in fronts), pair.transcript()
    pair.wait_gone()


@pytest.mark.long
@pytest.mark.fault("a rank leaves with exit status 0, two nodes")
def test_a_rank_that_leaves_early_ends_all_nodes(pair: Job) -> None:
    fronts = training(pair, env=INJECTED)
    moment = struck(pair, 1, injected.LEAVE)
    assert together(fronts, limit_s=60) == [5, 5], pair.transcript()
    verdict = named(fronts, since=moment).verdict
    assert f"rank 1, {fronts[1].label}" in verdict.summary
    assert verdict.ranks == (1,)
    pair.wait_gone()


@pytest.mark.long
def test_a_rank_that_refuses_ends_all_nodes_with_its_own_words(pair: Job) -> None:
    """A refusal is no verdict: what is wrong and how it is mended is what the rank said, and who
    said it stands beside.
    """
    fronts = training(pair, env=INJECTED)
    struck(pair, 1, injected.REFUSE)
    assert together(fronts, limit_s=60) == [2, 2], pair.transcript()
    (problem,) = fronts[0].result["problems"]
    assert problem["what"] == "a row that nobody wants"
    assert problem["where"] == f"rank 1, {fronts[1].label}: rows.jsonl:7"
    assert f"where: rank 1, {fronts[1].label}: rows.jsonl:7" in fronts[1].text()
    assert "fix:   take it out" in fronts[1].text()
    pair.wait_gone()


@pytest.mark.fault("a front is killed (kill -9)")
@pytest.mark.long  # test_restart has it with a run that goes on
def test_killed_front_takes_its_ranks_and_the_other_node_reports_it(pair: Job) -> None:
    fronts = training(pair)
    moment = time.monotonic()
    fronts[1].signal(signal.SIGKILL)
    assert fronts[0].wait(limit_s=60) in (4, 5), pair.transcript()
    verdict = named(fronts[:1], since=moment).verdict
    assert verdict.hosts == (fronts[1].host,), pair.transcript()
    assert fronts[1].label in verdict.summary
    pair.wait_gone()


@pytest.mark.fault("the head is killed (kill -9)")
def test_without_the_head_the_others_end_report_it_and_record_the_progress(pair: Job) -> None:
    fronts = training(pair, json=True, step=5)
    moment = time.monotonic()
    fronts[0].signal(signal.SIGKILL)
    assert fronts[1].wait(limit_s=60) == 4, pair.transcript()
    verdict = named(fronts[1:], since=moment).verdict
    assert fronts[0].label in verdict.summary
    assert (verdict.cause, verdict.hosts) == ("node_unreachable", (fronts[0].host,))
    assert pair.read("verdict.json")["summary"] == verdict.summary
    result = pair.read("result.json")
    assert (result["outcome"], result["exit_code"], result["run_id"]) == (
        "stalled",
        4,
        pair.read("plan.json")["run_id"],
    )
    assert result["step"] == pair.metrics()[-1]["step"] >= 5
    assert result["checkpoint"] == str(sorted((pair.out / "checkpoints").glob("step-????????"))[-1])
    assert fronts[1].result["checkpoint"] == result["checkpoint"]
    pair.wait_gone()


@pytest.mark.fault("a front is stopped for 8 s and more, and continued")
@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.long)])
def test_stopped_front_reports_what_the_others_have_reported_of_it(pair: Job, node: int) -> None:
    fronts = training(pair)
    fronts[node].signal(signal.SIGSTOP)
    assert fronts[1 - node].wait(limit_s=60) == 4, pair.transcript()
    fronts[node].signal(signal.SIGCONT)
    assert fronts[node].wait(limit_s=60) == 4, pair.transcript()
    verdict = named(fronts).verdict
    assert (verdict.cause, verdict.hosts) == ("node_unreachable", (fronts[node].host,))
    assert "silent for " in verdict.summary
    seconds = pair.read("verdict.json")["named_after_s"]
    assert seconds > SILENCE_S - 1, "counted from the last sign of life"
    pair.wait_gone()


def stopped(job: Job, node: int, number: signal.Signals, code: int, outcome: str) -> int:
    """Trains, signals one front, and gives the step after which all nodes have ended."""
    fronts = training(job)
    fronts[node].signal(number)
    assert together(fronts, limit_s=90) == [code] * job.nodes, job.transcript()
    result = job.read("result.json")
    assert (result["outcome"], result["verdict"]) == (outcome, None)
    step = int(result["step"])
    assert result["checkpoint"].endswith(f"step-{step:08d}")
    assert job.metrics()[-1]["step"] == step
    job.wait_gone()
    return step


def test_ctrl_c_on_the_head_saves_and_ends_all_nodes_after_the_same_step(pair: Job) -> None:
    stopped(pair, 0, signal.SIGINT, 130, "interrupted")


@pytest.mark.long
def test_sigterm_on_another_node_does_the_same_and_same_command_continues(pair: Job) -> None:
    more = stopped(pair, 1, signal.SIGTERM, 75, "preempted") + 2
    assert together(pair.start_all(f"duration={more} steps")) == [0, 0], pair.transcript()
    assert [line["step"] for line in pair.metrics()] == list(range(1, more + 1))


@pytest.mark.long
def test_a_second_start_is_refused_while_the_first_one_runs(pair: Job) -> None:
    fronts = training(pair)
    second = pair.start(0, "--join-timeout", "3", json=True)
    assert second.wait() in (2, 3), second.text()
    assert str(fronts[0].pid) in second.text() or "in use" in second.text(), second.text()
    assert [front.exit_code for front in fronts] == [None, None]
    fronts[0].signal(signal.SIGTERM)
    assert together(fronts, limit_s=90) == [75, 75], pair.transcript()


@pytest.mark.long
def test_killed_rank_continues_from_the_checkpoint_if_restarts_are_allowed(pair: Job) -> None:
    pair.config(duration="400 steps", checkpoint={"every": "3 steps"}, restarts=1)
    fronts = pair.start_all()
    pair.waits_for_step(8)
    pair.ranks()[1].kill()
    assert together(fronts) == [0, 0], pair.transcript()
    (restart,) = pair.read("result.json")["restarts"]
    assert restart["verdict"]["ranks"] == [1]
    assert restart["from_step"] >= 6
    assert pair.read("plan.json")["epoch"] == 1
    assert [line["step"] for line in pair.metrics()] == list(range(1, 401))
    pair.wait_gone()

"""Signals to one node of several, to a rank of one, or to all.

Run: pytest tests/jobs/nodes/test_preemption.py
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

Strike = Callable[[Job, list[Front]], None]


def to_front(node: int, number: signal.Signals = signal.SIGTERM) -> Strike:
    def strike(job: Job, fronts: list[Front]) -> None:
        del job
        fronts[node].signal(number)

    return strike


def to_rank(rank: int, number: signal.Signals) -> Strike:
    def strike(job: Job, fronts: list[Front]) -> None:
        del fronts
        job.ranks()[rank].send_signal(number)

    return strike


def to_node(node: int, number: signal.Signals = signal.SIGTERM) -> Strike:
    """The node's whole group: its front, and its rank itself."""

    def strike(job: Job, fronts: list[Front]) -> None:
        rank = job.ranks()[node]
        fronts[node].signal(number)
        rank.send_signal(number)

    return strike


def to_all(number: signal.Signals) -> Strike:
    """Every process of the job, in any order."""

    def strike(job: Job, fronts: list[Front]) -> None:
        blows = [to_node(node, number) for node in range(len(fronts))]
        random.SystemRandom().shuffle(blows)
        for blow in blows:
            blow(job, fronts)

    return strike


def own_disk(job: Job, node: int) -> Own:
    """The node's own disk, in place of what is shared."""
    disk = job.home(node) / "disk"
    disk.mkdir(exist_ok=True)
    job.out.mkdir(exist_ok=True)
    return Own(binds=[(disk, job.out)])


def training(job: Job, *, step: int = 3, apart: bool = False) -> list[Front]:
    """Starts all nodes on a run without a near end, and waits until it trains; the last node with a
    disk of its own if `apart`.
    """
    job.config(duration="5000 steps", restarts=0, checkpoint={"every": "2 steps"})
    last = job.nodes - 1
    fronts = [
        job.start(node, own=own_disk(job, node) if apart and node == last else None, answers=PACED)
        for node in range(job.nodes)
    ]
    job.waits_for_step(step)
    return fronts


def ended(job: Job, fronts: list[Front], *, code: int = 75, outcome: str = "preempted") -> int:
    """Asserts that all nodes ended alike with a checkpoint of the last step; gives that step."""
    assert together(fronts, limit_s=60) == [code] * job.nodes, job.transcript()
    job.wait_gone(limit_s=5)
    result = job.read("result.json")
    assert (result["outcome"], result["exit_code"], result["verdict"]) == (outcome, code, None)
    step = int(result["step"])
    assert result["checkpoint"].endswith(f"step-{step:08d}"), job.transcript()
    assert job.metrics()[-1]["step"] == step
    for front in fronts:
        if front.json:
            assert (front.result["outcome"], front.result["exit_code"]) == (outcome, code)
        else:
            assert f"{outcome}: step {step}" in front.text(), job.transcript()
    return step


@pytest.mark.fault("SIGTERM, SIGUSR1 or Ctrl-C to one process of several nodes, or to all")
@pytest.mark.parametrize(
    ("strike", "code", "outcome"),
    [
        pytest.param(to_rank(1, signal.SIGUSR1), 75, "preempted", id="the rank of another node"),
        pytest.param(to_node(1), 75, "preempted", id="another node", marks=pytest.mark.long),
        pytest.param(to_node(0), 75, "preempted", id="the head's node", marks=pytest.mark.long),
        pytest.param(
            to_node(1, signal.SIGUSR1), 75, "preempted", id="SIGUSR1 to another node", marks=pytest.mark.long
        ),
        pytest.param(to_all(signal.SIGTERM), 75, "preempted", id="all", marks=pytest.mark.long),
        pytest.param(to_all(signal.SIGUSR1), 75, "preempted", id="SIGUSR1 to all", marks=pytest.mark.long),
        pytest.param(to_front(0, signal.SIGINT), 130, "interrupted", id="Ctrl-C", marks=pytest.mark.long),
        pytest.param(
            to_front(1, signal.SIGINT),
            130,
            "interrupted",
            id="Ctrl-C on another node",
            marks=pytest.mark.long,
        ),
    ],
)
def test_whoever_gets_the_signal_every_node_ends_alike_with_a_checkpoint(
    networks: Namespaces, pair: Job, strike: Strike, code: int, outcome: str
) -> None:
    del networks
    fronts = training(pair, apart=True)
    sent = time.monotonic()
    strike(pair, fronts)
    ended(pair, fronts, code=code, outcome=outcome)
    assert time.monotonic() - sent < 25
    kept = (pair.home(1) / "disk" / "result.json").read_text()
    assert f'"outcome": "{outcome}"' in kept


@pytest.mark.long
def test_losing_one_of_three_nodes_saves_and_the_same_command_continues(trio: Job) -> None:
    trio.config(duration="30 steps", restarts=0, checkpoint={"every": "10 steps"})
    fronts = trio.start_all()
    trio.waits_for_step(4)
    to_node(2)(trio, fronts)
    ended(trio, fronts)
    assert together(trio.start_all()) == [0, 0, 0], trio.transcript()
    assert [line["step"] for line in trio.metrics()] == list(range(1, 31))


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_second_signal_on_any_node_leaves_at_once_everywhere(pair: Job, node: int) -> None:
    """The other node's rank is stopped, so no agreement can be made."""
    fronts = training(pair)
    pair.ranks()[1 - node].send_signal(signal.SIGSTOP)
    sent = time.monotonic()
    while fronts[node].exit_code is None:
        assert time.monotonic() - sent < 15, pair.transcript()
        fronts[node].signal(signal.SIGTERM)
        pair.until(lambda: time.monotonic() % 0.5 < 0.1, what="half a second")
    assert together(fronts, limit_s=15) == [75, 75], pair.transcript()
    assert time.monotonic() - sent < 15
    pair.wait_gone(limit_s=5)
    assert pair.read("result.json")["outcome"] == "preempted"
    assert "a second signal: ending the ranks; " in fronts[1].text("err"), pair.transcript()
    newest = pair.read("result.json")[
        "checkpoint"
    ]  # the last step that is kept in memory is saved after the ranks
    assert Path(newest).is_dir()
    assert f"checkpoint: {newest}" in fronts[1].text(), pair.transcript()


@pytest.mark.long
def test_one_signal_on_each_node_one_after_the_other_is_one_stop_request(pair: Job) -> None:
    """As somebody does who presses Ctrl-C in each terminal; a rank that is stopped for a while
    gives the time.
    """
    fronts = training(pair)
    pair.ranks()[1].send_signal(signal.SIGSTOP)
    sent = time.monotonic()
    fronts[0].signal(signal.SIGINT)
    pair.until(lambda: time.monotonic() - sent > 1.5, what="a second and a half")
    fronts[1].signal(signal.SIGINT)
    pair.until(lambda: time.monotonic() - sent > 2.5, what="a second more")
    pair.ranks()[1].send_signal(signal.SIGCONT)
    ended(pair, fronts, code=130, outcome="interrupted")


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_stopped_before_there_are_ranks_ends_all_alike(pair: Job, node: int) -> None:
    fronts = pair.start_all(json=False)
    fronts[node].wait_until(
        lambda: next((line.at for line in fronts[node].lines if line.text), None), what="its first line"
    )
    fronts[node].signal(signal.SIGTERM)
    assert together(fronts, limit_s=60) == [75, 75], pair.transcript()
    pair.wait_gone(limit_s=5)
    assert not list(pair.out.glob("checkpoints/step-*"))


@pytest.mark.long
def test_head_that_goes_first_after_all_were_asked_is_nobodys_fault(pair: Job) -> None:
    """Machines are taken back one after the other."""
    fronts = training(pair)
    pair.ranks()[1].send_signal(signal.SIGSTOP)
    for front in fronts:
        front.signal(signal.SIGTERM)
    fronts[1].wait_for("SIGTERM")
    fronts[0].signal(signal.SIGKILL)
    assert fronts[1].wait(limit_s=60) == 75, pair.transcript()
    assert "the run was stopped" in fronts[1].text("err")
    pair.wait_gone(limit_s=10)

"""A death or a stall costs an adapter's run no step. Run: pytest tests/jobs/nproc/test_rescue.py"""

import json
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job
from unisono.base.messages import read_message

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS, OFTEN_STEPS = 27, 45
LIMIT_S = 400.0
OFTEN = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
]  # a dozen starts, each of some forty seconds where the cores are busy
COMPARED = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "eval_loss")
Blow = Callable[[Job, random.Random], None]
Outcome = tuple[list[dict[str, Any]], bytes]


def configure(job: Job, *, strategy: str = "auto", restarts: int = 20, steps: int = STEPS) -> None:
    """Steps of some 100 ms on the tiny model, beside which its adapter is small.

    The only checkpoint is the one after the last step.

    They sleep for most of that time (see start), unless it is struck often: then any moment of a
    step is to be met.
    """
    job.config(
        duration=f"{steps} steps", batch={"global": 8 if steps == STEPS else 48, "micro": 2}, checkpoint={"every": "1000 steps"}, restarts=restarts,
        adapter={"rank": 2, "alpha": 4, "dropout": 0.1}, data={"eval": 0.2, "packing": False}, eval={"every": "5 steps"},
        parallel={"strategy": strategy},
    )  # fmt: skip


def start(
    job: Job,
    nproc: int,
    *words: str,
    json: bool = True,
    paced: bool = True,
    faults: dict[str, Any] | None = None,
) -> Front:
    ranks = ["--nproc", str(nproc)] if nproc > 1 else []
    answers = {"faults": {**(PACED["faults"] if paced else {}), **(faults or {})}}
    return job.start(0, *ranks, "--no-first-checkpoint", *words, topology=False, json=json, answers=answers)


def outcome(job: Job) -> Outcome:
    """metrics.jsonl without times, and the final weights."""
    found = map(json.loads, (job.out / "metrics.jsonl").read_text().splitlines())
    lines = [{name: line[name] for name in COMPARED if name in line} for line in found]
    return lines, (job.out / "adapter" / "adapter_model.safetensors").read_bytes()


def one_of(number: int) -> Blow:
    """Kills that rank."""

    def kill(job: Job, chance: random.Random) -> None:
        del chance
        job.ranks()[number].send_signal(signal.SIGKILL)

    return kill


def any_one(job: Job, chance: random.Random) -> None:
    chance.choice(list(job.ranks().values())).send_signal(signal.SIGKILL)


def all_of_them(job: Job, chance: random.Random) -> None:
    victims = list(job.ranks().values())
    chance.shuffle(victims)
    for victim in victims:
        victim.send_signal(signal.SIGKILL)


def stop_any(job: Job, chance: random.Random) -> None:
    """The rank lives on and does nothing, wherever it is; the other waits for it until the watch
    ends both.
    """
    chance.choice(list(job.ranks().values())).send_signal(signal.SIGSTOP)


def last_seen(job: Job, front: Front) -> int:
    """The last step that anybody can have seen."""
    steps = [int(message["step"]) for message in front.messages("step")]
    return max([*steps, *(int(line["step"]) for line in job.metrics())])


def strike(job: Job, front: Front, blow: Blow, chance: random.Random, *, after: int) -> int:
    """Strikes at a random moment of a step, and sees that the next start goes on from the last step
    that was seen; gives that step.
    """
    job.waits_for_step(after)
    time.sleep(chance.uniform(0, 0.15))  # not a wait: the moment is the point
    starts, seen = len(front.messages("plan")), last_seen(job, front)
    blow(job, chance)
    front.wait_until(lambda: 0.0 if len(front.messages("plan")) > starts else None, what="another start")
    plan = front.messages("plan")[-1]
    reported = [int(message["step"]) for message in front.messages("step") if message["time"] < plan["time"]]
    assert plan["resume"]["step"] == max(reported) >= seen, front.text()
    return max(reported)


def straight(job: Job, nproc: int, strategy: str, *, steps: int) -> Outcome:
    """What an undisturbed run ends with."""
    configure(job, strategy=strategy, steps=steps)
    front = start(job, nproc, paced=False)
    assert front.wait(limit_s=LIMIT_S) == 0, front.text()
    return outcome(job)


def goes_through(
    solo_of: Callable[[], Job], nproc: int, strategy: str, blows: list[Blow]
) -> list[dict[str, Any]]:
    """Sees that a run loses no step to any of the blows and ends like the one that nobody disturbs;
    gives its restarts.
    """
    steps = OFTEN_STEPS if len(blows) > 2 else STEPS
    wanted, job = straight(solo_of(), nproc, strategy, steps=steps), solo_of()
    configure(job, strategy=strategy, restarts=len(blows), steps=steps)
    front, chance = start(job, nproc, paced=steps == STEPS), random.Random(f"{strategy} {len(blows)}")
    reached = 0
    for blow, step in zip(blows, sorted(chance.sample(range(1, steps // 3), len(blows))), strict=True):
        # A second death before any new step would rightly be taken for deterministic, and end the
        # run.
        reached = strike(job, front, blow, chance, after=max(step, reached + 1))
    assert front.wait(limit_s=LIMIT_S) == 0, front.text()
    assert outcome(job) == wanted
    restarts: list[dict[str, Any]] = job.read("result.json")["restarts"]
    assert len(restarts) == len(blows)
    return restarts


@pytest.mark.parametrize(
    ("nproc", "strategy", "kills"),
    [
        (1, "auto", [one_of(0)]),
        (2, "ddp", [one_of(0), all_of_them]),
        pytest.param(2, "fsdp", [one_of(1)], marks=pytest.mark.long),  # in tests/jobs/nodes and tests/resume
        pytest.param(1, "auto", [one_of(0)] * 10, marks=OFTEN),
        pytest.param(2, "ddp", [any_one, any_one, all_of_them] * 4, marks=OFTEN),
        pytest.param(2, "fsdp", [any_one, any_one, all_of_them] * 4, marks=OFTEN),
    ],
    ids=["one rank", "replicas", "shards", "one rank, often", "replicas, often", "shards, often"],
)
def test_no_step_is_lost_and_the_end_is_that_of_an_undisturbed_run(
    solo_of: Callable[[], Job], nproc: int, strategy: str, kills: list[Blow]
) -> None:
    goes_through(solo_of, nproc, strategy, kills)


@pytest.mark.parametrize(
    ("strategy", "stops"),
    [
        ("fsdp", 1),  # the dearer: nobody else has what the stopped rank has
        pytest.param("ddp", 1, marks=pytest.mark.long),
        pytest.param("fsdp", 6, marks=OFTEN),
        pytest.param("ddp", 6, marks=OFTEN),
    ],
    ids=["shards", "replicas", "shards, often", "replicas, often"],
)
def test_no_step_is_lost_to_a_stalled_rank_until_the_watch_ends_the_ranks(
    solo_of: Callable[[], Job], strategy: str, stops: int
) -> None:
    restarts = goes_through(solo_of, 2, strategy, [stop_any] * stops)
    assert {restart["verdict"]["cause"] for restart in restarts} == {"rank_stopped"}


def test_a_run_that_ends_with_an_exception_continues_from_its_last_step(solo: Job) -> None:
    configure(solo, restarts=0)
    dies = {"die": {"rank": 1, "step": 5, "how": "exception"}}
    front = start(solo, 2, "parallel.strategy=ddp", json=False, faults=dies)
    assert front.wait() == 5, front.text()
    step = solo.metrics()[-1]["step"]
    printed = (
        f"rank 1, {front.label} died: step {step} was saved from memory as checkpoint step-{step:08d};"
        " nothing is lost"
    )
    assert printed in front.text()
    result = solo.read("result.json")
    assert (result["step"], Path(result["checkpoint"]).name) == (step, f"step-{step:08d}")
    again = start(solo, 2, "parallel.strategy=ddp")
    assert again.wait() == 0, again.text()
    assert again.messages("plan")[-1]["resume"]["step"] == step
    assert [line["step"] for line in solo.metrics()] == [*range(1, STEPS + 1)]


def measured(job: Job) -> Mapping[str, Any]:
    """What the rank has measured of keeping a step, if it has by now."""
    events = job.out / "events" / "rank-00000.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    messages = [
        message for line in lines if (message := read_message(line)) is not None
    ]  # the last may be half written
    return next((message for message in messages if message["kind"] == "kept"), {})


def test_costly_steps_are_kept_less_often_and_a_death_costs_as_planned(
    solo: Job,
) -> None:
    """The plan reports what a death costs at most."""
    configure(solo, restarts=1)
    solo.config(
        adapter={"rank": 256, "dropout": 0.0}, batch={"global": 1, "micro": 1}, checkpoint={"every": "1000 steps"},
        duration="150 steps", eval={"every": "1000 steps"},
    )  # fmt: skip
    front = start(solo, 1, json=False, paced=False)
    solo.waits_for_step(30)
    kept = measured(solo)
    every = kept["every"]
    assert kept["cost_s"] > 0.01 * kept["step_time_s"]
    assert kept["cost_s"] <= 0.01 * kept["step_time_s"] * every
    front.wait_until(
        lambda: 0.0 if solo.read("plan.json")["kept_every"] == every else None,
        what="the plan with what was measured",
    )
    solo.ranks()[0].send_signal(signal.SIGKILL)
    assert front.wait() == 0, front.text()
    printed = re.search(
        r"step (\d+) was saved from memory as checkpoint step-\d+; (?:nothing is lost|the (\d+) after it are"
        r" lost)",
        front.text(),
    )
    assert printed is not None, front.text()
    assert int(printed[2] or 0) <= every - 1
    assert re.search(r"a rank's death costs (?:no|at most \d+) (?:finished )?steps?", front.text())
    (restart,) = solo.read("result.json")["restarts"]
    assert restart["from_step"] == int(printed[1])
    assert [line["step"] for line in solo.metrics()] == [*range(1, 151)]

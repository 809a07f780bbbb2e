"""A run is killed again and again at chosen or random moments, and carried to its end.

For tests/jobs/resume and bench/resumes.py.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.resume.trained_rows import Rows, rows_of, start_folder

Kind = Literal["one rank", "all ranks", "the front", "the head's front"]
Aim = Literal["start", "step", "save"]
Moment = Literal["before step 1", "in training", "inside a save", "at the end"]

_METRICS = (
    "rewards_chosen",
    "rewards_rejected",
    "reward_margin",
    "reward_accuracy",
    "logps_chosen",
    "logps_rejected",
    "kl",
    "reward",
    "answer_tokens",
    "equal_groups",
    "entropy",
    "ratio",
    "sampler_kl",
)
COMPARED = (
    "step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "eval_loss", *_METRICS, *(f"eval_{name}" for name in _METRICS),
)  # fmt: skip
_COMMON: dict[str, Any] = {
    "batch": {"global": 4}, "checkpoint": {"every": "1 steps", "keep": 2}, "eval": {"every": "5 steps"},
    "data": {"eval": 1 / 6}, "restarts": 100,
}  # fmt: skip
_TUNING: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.1}},
    "plain": {
        "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0}
    },  # dropout falls otherwise where the ranks are others
    "full": {"adapter": None, "optim": {"lr": 1e-3}},
    "dpo": {"objective": "dpo", "adapter": {"rank": 4, "alpha": 8, "dropout": 0.1}},
    "kto": {"objective": "kto", "adapter": None, "optim": {"lr": 1e-3}},
    "grpo": {
        "objective": "grpo", "adapter": {"rank": 4, "alpha": 8}, "rewards": [{"use": "regex", "pattern": "[aeiou]{2}"}],
        "rollout": {"group": 2, "max_new_tokens": 6, "steps": 3, "resample": 1}, "grpo": {"truncated": "keep"},
    },
}  # fmt: skip
_POLL_S = 0.02  # there are few cores, and the ranks need them
_WATCH_S = 0.001  # a save may last a few milliseconds only
PATIENCE_S = 400.0  # four ranks on two busy cores make a step in ten seconds


@dataclass(frozen=True)
class Layout:
    """Where a run's ranks are and what they do.

    Attributes:
        strategy: single, ddp or fsdp.
        ranks: of all nodes together.
        nodes: with equally many ranks each.
        tuning: lora (with dropout), plain (LoRA without), full, dpo (with dropout), kto (full) or
            grpo (LoRA without dropout, three steps for the same answers).
    """

    strategy: str
    ranks: int
    tuning: str
    nodes: int = 1

    @property
    def name(self) -> str:
        """For people, in tables."""
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.strategy} {self.ranks} → {self.ranks}{where}, {self.tuning}"

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.strategy}{self.ranks}-{self.nodes}-{self.tuning}"

    def config(self, job: Job, *, steps: int) -> None:
        """Writes the run's config."""
        strategy = "auto" if self.strategy == "single" else self.strategy
        data = _COMMON["data"] | {"train": str(_rows_for(self.tuning, job))}
        job.config(
            **(_COMMON | {"data": data}), **_TUNING[self.tuning], duration=f"{steps} steps", parallel={"strategy": strategy}
        )  # fmt: skip

    def start(self, job: Job, **faults: Any) -> list[Front]:
        """The same command on every node; what its ranks train on goes to a folder of this start.

        Args:
            faults: beside that, as unisono.trainer.worker.injected_faults takes them.
        """
        each = ("--nproc", str(self.ranks // self.nodes))
        answers = {"faults": {"write_rows": str(start_folder(written(job), len(job.fronts))), **faults}}
        return job.start_all(*each, answers=answers, topology=self.nodes > 1)


def _rows_for(tuning: str, job: Job) -> Path:
    """The job's rows, as pairs, rated answers or prompts if the objective needs them."""
    if tuning not in ("dpo", "kto", "grpo"):
        return job.rows
    file = job.rows.with_name(
        f"{tuning}.jsonl"
    )  # the same for all jobs: its name is part of what ranks record
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    for i, row in enumerate(rows):
        if tuning == "grpo":
            del row["completion"]
        elif tuning == "kto":
            row["label"] = bool(i % 3)
        else:
            answer = row.pop("completion")
            row |= {"chosen": answer, "rejected": f"{answer} dog"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@dataclass(frozen=True)
class Blow:
    """What is to be killed, and when: while a start comes up, after some of its steps, or when it
    is next seen inside a save.

    Attributes:
        after_steps: that this start makes first.
        later_s: seconds from then to the blow.
        chance: in [0, 1), which of several ranks.
    """

    kind: Kind
    aim: Aim
    after_steps: int
    later_s: float
    chance: float


@dataclass
class Struck:
    """What a blow met, and what came of it.

    Attributes:
        layout: the run's.
        moment: in which it was hit, by what was there right after.
        step: the last one in metrics.jsonl then.
        resumed: the step from which the run went on; None: it did not, as it was complete.
        bit_equal: whether the run ended as the undisturbed one.
    """

    layout: str
    kind: Kind
    moment: Moment
    step: int
    resumed: int | None = None
    survived: bool = False
    bit_equal: bool = False

    @property
    def steps_lost(self) -> int | None:
        """Steps that were made again."""
        return None if self.resumed is None else max(0, self.step - self.resumed)


def draw_blows(each: Mapping[Kind, int], chance: random.Random, *, start_s: float) -> list[Blow]:
    """So many blows of each kind, in any order: half inside a save, one in ten while a start comes
    up.

    Args:
        each: how many, by kind.
        chance: what is random comes from it.
        start_s: seconds that a start takes to its first step.
    """
    blows = []
    for kind, count in each.items():
        for number in range(count):
            aim: Aim = "save" if number % 2 == 0 else "start" if chance.random() < 0.2 else "step"
            later_s = chance.uniform(0.0, {"start": start_s, "step": 0.05, "save": 0.002}[aim])
            blows.append(Blow(kind, aim, chance.randint(1, 3), later_s, chance.random()))
    chance.shuffle(blows)
    return blows


MIX: dict[Layout, dict[Kind, int]] = {
    Layout("ddp", 2, "full"): {"one rank": 10, "all ranks": 15, "the front": 10},
    Layout("ddp", 2, "lora"): {"one rank": 10, "all ranks": 10, "the front": 10},
    Layout("fsdp", 2, "full"): {"one rank": 10, "all ranks": 10, "the front": 10},
    Layout("fsdp", 2, "lora"): {"one rank": 10, "all ranks": 10, "the front": 10},
    Layout("fsdp", 4, "full"): {"one rank": 5, "all ranks": 5, "the front": 5},
    Layout("single", 1, "lora"): {"one rank": 5, "the front": 5},
    Layout("ddp", 2, "full", nodes=2): {"the head's front": 25},
    Layout("fsdp", 2, "lora", nodes=2): {"the head's front": 25},
}
"""Fifty of each kind, over layouts and tunings."""

PREFERENCES: dict[Layout, dict[Kind, int]] = {
    Layout("ddp", 2, "dpo"): {"one rank": 5, "all ranks": 5, "the front": 5},
    Layout("single", 1, "dpo"): {"one rank": 5, "the front": 5},
    Layout("fsdp", 2, "kto"): {"one rank": 5, "all ranks": 5, "the front": 5},
    Layout("ddp", 2, "kto"): {"all ranks": 5, "the front": 5},
}
"""Runs with a reference, which is computed before step 1 and read again after a kill."""


ANSWERS: dict[Layout, dict[Kind, int]] = {
    Layout("ddp", 2, "grpo"): {"one rank": 10, "all ranks": 10, "the front": 5},
    Layout("single", 1, "grpo"): {"one rank": 10, "the front": 5},
}
"""Forty of runs that sample answers: while these are sampled and rewarded, and between the steps that
train on them.
"""


def mix(each: int) -> dict[Layout, dict[Kind, int]]:
    """About so many of each kind; of every layout at least one."""
    return {
        layout: {kind: max(1, round(count * each / 50)) for kind, count in of_layout.items()}
        for layout, of_layout in MIX.items()
    }


def written(job: Job) -> Path:
    """Where a run's ranks write down which rows they take, each start for itself."""
    return job.folder / "rows"


def outcome_of(job: Job) -> dict[str, Any]:
    """What must be equal: the lines of metrics.jsonl without times, and the bytes of the final
    weights.
    """
    lines = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    files = sorted([*job.out.glob("adapter/*.safetensors"), *job.out.glob("model/*.safetensors")])
    assert files, "the run left no weights"
    return {
        "lines": [{key: line[key] for key in COMPARED if key in line} for line in lines],
        "weights": {path.name: path.read_bytes() for path in files},
    }


def steps_once(outcome: dict[str, Any], steps: int) -> bool:
    """Whether metrics.jsonl has every step, once and in order."""
    return [line["step"] for line in outcome["lines"] if "loss" in line] == list(range(1, steps + 1))


@dataclass
class Undisturbed:
    """A run that nobody killed: its outcome, which rows its ranks wrote down, and seconds to its
    first step.
    """

    outcome: dict[str, Any]
    rows: Rows
    start_s: float


def undisturbed(job: Job, layout: Layout, *, steps: int) -> Undisturbed:
    """Does the run that others are compared with."""
    layout.config(job, steps=steps)
    fronts = layout.start(job)
    first = fronts[0].wait_for('"kind": "step"', limit_s=PATIENCE_S)
    assert [front.wait(limit_s=PATIENCE_S) for front in fronts] == [0] * len(fronts), job.transcript()
    outcome = outcome_of(job)
    rows = rows_of(written(job))
    assert steps_once(outcome, steps)
    assert list(rows) == list(range(1, steps + 1)), "not every step wrote down its rows"
    return Undisturbed(outcome, rows, first - fronts[0].started)


@dataclass
class Beaten:
    """A run under blows."""

    job: Job
    layout: Layout
    steps: int
    struck: list[Struck] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    is_complete: bool = False
    _plans: int = 0
    """Plans that the head's front had told when it was last struck."""

    def run(self, blows: Sequence[Blow]) -> list[Blow]:
        """Carries the run to its end under blows; gives those that came too late for it."""
        self.layout.config(self.job, steps=self.steps)
        self._start()
        left = list(blows)
        while left and not self.is_complete:
            if self._await(left[0]) and self._strike(left[0]):
                left.pop(0)
            self._go_on()
        if not self.is_complete:
            assert self._ended() == [0] * len(self.fronts), self.job.transcript()
        # A start that is quicker than the one by which blows were drawn is over before the first
        # that is left: that must come sooner.
        return [replace(left[0], later_s=left[0].later_s / 2), *left[1:]] if left else []

    @property
    def _head(self) -> Front:
        return self.fronts[0]

    def _start(self) -> None:
        self.fronts = self.layout.start(self.job)

    def _ended(self) -> list[int]:
        return [front.wait(limit_s=PATIENCE_S) for front in self.fronts]

    def _await(self, blow: Blow) -> bool:
        """Waits for the blow's moment; False if the run ended before it."""
        plans = self._plans_shown()
        if blow.aim == "start":
            if "rank" in blow.kind and not self._until(lambda: len(self.job.ranks()) == self.layout.ranks):
                return False
            time.sleep(blow.later_s)
            return self._head.exit_code is None
        if not self._until(lambda: self._steps_of_this_start() >= blow.after_steps):
            return False
        if blow.aim == "save" and not self._until(lambda: bool(self._temporary()), every_s=_WATCH_S):
            return False
        time.sleep(blow.later_s)  # the random part of the moment
        return self._head.exit_code is None and self._plans_shown() == max(plans, 1)

    def _until(
        self, seen: Callable[[], bool], *, limit_s: float = PATIENCE_S, every_s: float = _POLL_S
    ) -> bool:
        """Whether it was seen, before the limit and before the head's front ended."""
        limit = time.monotonic() + limit_s
        while self._head.exit_code is None and time.monotonic() < limit:
            if seen():
                return True
            time.sleep(every_s)
        return False

    def _plans_shown(self) -> int:
        """How many starts of ranks this front has told of."""
        return sum('"kind": "plan"' in line.text for line in list(self._head.lines))

    def _steps_of_this_start(self) -> int:
        """Steps that were told since the newest plan."""
        count = 0
        for line in reversed(list(self._head.lines)):
            if '"kind": "plan"' in line.text:
                break
            count += '"kind": "step"' in line.text
        return count

    def _temporary(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.job.out / "checkpoints") if ".tmp-" in name]  # noqa: PTH208 - the quickest look
        except FileNotFoundError:
            return []

    def _strike(self, blow: Blow) -> bool:
        """Kills; False if there was nothing left to kill."""
        ranks = self.job.ranks() if "rank" in blow.kind else {}
        if blow.aim == "save" and ranks and not self._temporary():  # the look at the processes took its time
            self._until(lambda: bool(self._temporary()), limit_s=5.0, every_s=_WATCH_S)
        victims = list(ranks.values())
        if blow.kind == "one rank" and victims:
            victims = [victims[int(blow.chance * len(victims))]]
        if not victims and "rank" in blow.kind:
            return False
        self._plans = self._plans_shown()
        for process in victims:
            _kill(process)
        if "front" in blow.kind:
            _kill(psutil.Process(self._head.pid))
        saving = bool(self._temporary())
        psutil.wait_procs(victims, timeout=30)
        if "front" in blow.kind:
            assert self._head.wait() == -9
        self.struck.append(
            Struck(self.layout.name, blow.kind, self._moment(saving=saving), last_step(self.job))
        )
        return True

    def _moment(self, *, saving: bool) -> Moment:
        if saving:
            return "inside a save"
        if (self.job.out / "adapter").exists() or (self.job.out / "model").exists():
            return "at the end"
        return "in training" if last_step(self.job) else "before step 1"

    def _go_on(self) -> None:
        """Waits until the run that was struck goes on, by itself or started again; or is
        complete.
        """
        last = self.struck[-1] if self.struck else None
        pending = last is not None and not last.survived
        if pending:
            self._until(lambda: self._plans_shown() > self._plans)
        if self._head.exit_code is not None:
            self._start_again()
        if last is not None and pending:
            last.survived = True
            last.resumed = None if self.is_complete else self._resumed_from()

    def _start_again(self) -> None:
        codes = self._ended()
        if codes[0] == 0:
            self.is_complete = True
            return
        assert codes[0] in (5, -9), self.job.transcript()
        self.job.wait_gone(limit_s=30)
        self._start()
        if not self._until(lambda: self._plans_shown() > 0):
            # Killed between the result and the end of the front: the run is complete, and a further
            # start is refused.
            assert self._ended() == [2] * len(self.fronts), self.job.transcript()
            assert self.job.read("result.json")["outcome"] == "completed", self.job.transcript()
            self.is_complete = True

    def _resumed_from(self) -> int:
        resume = self._head.messages("plan")[-1]["resume"]
        return int(resume["step"]) if resume else 0


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def last_step(job: Job) -> int:
    """The last whole step in metrics.jsonl; 0 where there is none."""
    path = job.out / "metrics.jsonl"
    if not path.exists():
        return 0
    whole = path.read_text().rpartition("\n")[0].splitlines()
    return max((line["step"] for line in map(json.loads, whole)), default=0)


def beat(
    job_of: Callable[[], Job],
    layout: Layout,
    blows: Sequence[Blow],
    wanted: Undisturbed,
    *,
    steps: int,
    a_run: int = 10,
) -> Iterator[Struck]:
    """Gives all blows, at most `a_run` to a run; what each came to, once its run has ended and was
    compared.
    """
    left = list(blows)
    while left:
        beaten = Beaten(job_of(), layout, steps)
        left = beaten.run(left[:a_run]) + left[a_run:]
        outcome = outcome_of(beaten.job)
        equal = outcome == wanted.outcome and steps_once(outcome, steps)
        equal = equal and rows_of(written(beaten.job)) == wanted.rows
        for struck in beaten.struck:
            struck.bit_equal = equal
            yield struck
        beaten.job.wait_gone()
        beaten.job.close()

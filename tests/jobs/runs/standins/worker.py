"""A rank without a model: counts steps, saves real checkpoints, and does at a step what plan.faults
says.

kill, raise, exit, segfault, oom: at this step, in the first start only unless `always` wait: before
this step it waits for a signal, and says so with a phase deaf: ignores signals; unready: does not
listen to them yet; refuse: refuses before step 1; weighs: bytes of a checkpoint; flood: prints this
many kilobytes a step says: prints this line before step 2
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from unisono.base.causes import Verdict
from unisono.base.child import leave, parse_child_arguments, run_child
from unisono.base.errors import ModelError, RankDied
from unisono.base.events import Reporter
from unisono.base.messages import EvalMessage, StepMessage, message_of
from unisono.base.user_key import user_key
from unisono.guard.facts import read_environment
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import truncate_after
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.schedule import factor_at

STOPS = {signal.SIGTERM: ("preempted", 75), signal.SIGINT: ("interrupted", 130)}


class Rank:
    """One start."""

    def __init__(self, plan: RunPlan, report: Reporter) -> None:
        self.plan, self.report = plan, report
        self.run = RunDir(Path(plan.output_dir))
        self.store = CheckpointStore(self.run.checkpoints, key=user_key(read_environment().settings_dir))
        self.begin = plan.resume.step if plan.resume else 0
        self.step = self.begin
        self.requested: tuple[str, int] | None = None
        self.training = False

    def train(self) -> dict[str, Any]:
        faults = self.plan.faults
        for number in STOPS if "unready" not in faults else ():
            signal.signal(number, self.note)
        print("loading", flush=True)
        if "refuse" in faults:
            raise ModelError.of("the model lacks lm_head", fix="take another")
        if "oom" in faults:
            raise RankDied.of(
                "memory ran out", verdict=Verdict(cause="cuda_oom", when="during", summary="memory ran out")
            )
        self.wait_before(0)
        facts = {"parameters": 1000, "trainable": 100, "layout": "flat", "peak_bytes": 10**6}
        self.report.send({"kind": "ready", "facts": facts})
        self.training = True
        truncate_after(self.run.metrics, self.begin)
        outcome, code = "completed", 0
        with self.run.metrics.open("a") as metrics:
            while self.step < self.plan.total_steps:
                self.wait_before(self.step + 1)
                self.fault(self.step + 1)
                self.step += 1
                line = {
                    "step": self.step,
                    "loss": 1.0 / self.step,
                    "lr": self.plan.config.optim.lr * factor_at(self.plan, self.step),
                    "tokens": 160 * self.step,
                    "tokens_per_second": 1e3,
                }
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                self.report.send(message_of(StepMessage, line))
                if self.step == 2 and self.plan.eval_every:
                    self.report.send(message_of(EvalMessage, {"step": 2, "eval_loss": 0.5}))
                if (
                    self.requested
                    or self.step % self.plan.checkpoint_every == 0
                    or self.step == self.plan.total_steps
                ):
                    self.save()
                if self.requested:
                    outcome, code = self.requested
                    break
        return {
            "outcome": outcome, "exit_code": code, "step": self.step, "tokens": 160 * self.step, "loss": 1.0 / self.step,
            "eval": {"loss": 0.5}, "tokens_per_second": 1e3, "checkpoint": str(self.store.path(self.step)), "verdict": None,
            "weights": None,
        }  # fmt: skip

    def save(self) -> None:
        def write(directory: Path) -> None:
            (directory / "state.json").write_text(str(self.step))
            (directory / "trainable.safetensors").write_bytes(os.urandom(self.plan.faults.get("weighs", 0)))

        path = self.store.save(
            self.step, write, run_id=self.plan.run_id, config_digest=self.plan.config_digest, world_size=1,
            threads=self.plan.threads, holder=self.plan.host,
        )  # fmt: skip
        self.report.send(
            {"kind": "checkpoint", "step": self.step, "path": str(path), "bytes": 1, "seconds": 0.0}
        )

    def note(self, number: int, _frame: object) -> None:
        if "deaf" in self.plan.faults:
            return
        if not self.training:
            os._exit(STOPS[signal.Signals(number)][1])
        self.requested = STOPS[signal.Signals(number)]

    def wait_before(self, step: int) -> None:
        if self.plan.faults.get("wait") != step:
            return
        self.report.phase("waiting", f"waiting before step {step}")
        while self.requested is None:
            signal.sigtimedwait([], 0.01)

    def fault(self, step: int) -> None:
        faults = self.plan.faults
        print("x" * 1024 * faults.get("flood", 0), flush=True)
        if step == 2 and "says" in faults:
            print(faults["says"], flush=True)
        if self.begin and not faults.get("always"):
            return
        if faults.get("kill") == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.get("raise") == step:
            raise ZeroDivisionError("a batch of nothing")
        if faults.get("exit") == step:
            os._exit(3)


if __name__ == "__main__":
    arguments = parse_child_arguments(sys.argv[1:], named=False)
    plan = RunPlan.model_validate(json.loads(arguments.file.read_text()))
    leave(run_child(lambda report: Rank(plan, report).train(), arguments))

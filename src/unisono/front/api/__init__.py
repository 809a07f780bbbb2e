"""The Python interface: `unisono.train` and similar functions, each of which starts a front in a
separate process.

`unisono` itself names what is public, and imports it on first use. Here is how a run
ended; nothing in this room imports torch but `loading`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unisono.base.causes import Verdict
from unisono.base.errors import Problem, UsageError
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import RunResult, read_metrics, read_result
from unisono.guard.supervise.task_process import refusal


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        record: the contents of result.json.
    """

    record: RunResult

    @classmethod
    def from_run(cls, run: str | Path) -> Self:
        """Returns the result of a run that has ended.

        Raises:
            UsageError: if the directory has none.
        """
        record = read_result(RunDir(Path(run)))
        if record is None:
            raise UsageError.of(
                f"{run} has no result",
                where=str(RunDir(Path(run)).result),
                why="it is not a run, has not ended, or its front was killed",
                fix="pass output_dir of a run; the call or command that started it resumes it",
            )
        return cls(record if record.output_dir else record.model_copy(update={"output_dir": str(run)}))

    def __repr__(self) -> str:
        verdict = f", verdict={self.verdict.cause!r}" if self.verdict is not None else ""
        loss = f", loss={self.loss:.4g}" if self.loss is not None else ""
        return (
            f"Result({self.outcome}, step {self.step}{loss}{verdict}, output_dir={self.record.output_dir!r})"
        )

    @property
    def outcome(self) -> str:
        """completed, interrupted, preempted, disagreed, stalled, died, unfit, corrupt or failed."""
        return self.record.outcome

    @property
    def exit_code(self) -> int:
        """The exit code of the same command."""
        return self.record.exit_code

    @property
    def output_dir(self) -> Path:
        """The run's directory."""
        return Path(self.record.output_dir or "")

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.record.step

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.record.loss

    @property
    def evaluation(self) -> dict[str, Any]:
        """The metrics of the last evaluation, and of the one before training."""
        return self.record.eval

    @property
    def verdict(self) -> Verdict | None:
        """Why the run failed; None if it did not fail."""
        return Verdict.from_json(self.record.verdict) if self.record.verdict else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one for each step, with `loss`, and one for each evaluation,
        with `eval_loss`.
        """
        return read_metrics(RunDir(self.output_dir).metrics) if self.record.output_dir else []

    @property
    def checkpoint(self) -> Path | None:
        """The directory of the newest checkpoint; None without one."""
        return Path(self.record.checkpoint) if self.record.checkpoint else None

    @property
    def adapter(self) -> Path | None:
        """The directory of the trained adapter in peft's layout; None without one."""
        return _directory(RunDir(self.output_dir).adapter) if self.record.output_dir else None

    @property
    def model(self) -> Path | None:
        """The directory of the model in the Hugging Face layout; None without full fine-tuning."""
        return _directory(RunDir(self.output_dir).model) if self.record.output_dir else None

    def raise_for_outcome(self) -> Self:
        """Returns this result if the run is completed, and raises its error otherwise.

        Raises:
            UnisonoError: in the class of the exit code, with the verdict.
        """
        if self.record.is_completed:
            return self
        verdict = self.verdict
        problem = Problem(
            f"the run ended: {self.outcome}" + (f": {verdict.summary}" if verdict else ""),
            self.record.output_dir or "",
            "; ".join(f"{item.where}: {item.text}" for item in verdict.evidence[:2]) if verdict else "",
            "; ".join(verdict.fix) if verdict else "the same call resumes from the newest checkpoint",
        )
        error = refusal({"kind": "refused", "exit_code": self.exit_code})
        raise type(error)(problem, verdict=verdict)


def _directory(path: Path) -> Path | None:
    return path if path.is_dir() else None

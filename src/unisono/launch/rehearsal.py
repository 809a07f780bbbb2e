"""The whole path before the long run: data, training, evaluation, checkpoint, resume, export; small, and elsewhere."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.events import Message, Show, notify
from unisono.launch.session import plan_only, train
from unisono.launch.train_request import TrainRequest
from unisono.plan import RunPlan
from unisono.rundir import RunDir
from unisono.rundir.records import read_metrics
from unisono.supervise.task_process import run_task
from unisono.text import show_bytes, show_seconds

ROWS = 64
_STEPS, _MORE = 3, 1


@dataclass
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        exit_code: 0, or that of the stage that failed.
        stages: name and seconds of each stage that was passed.
        result: of the training that ended badly, or of the last.
        expected_s: estimated duration of the long run in seconds, if known.
        steps: of the long run.
        checkpoint_bytes: of one checkpoint.
    """

    exit_code: int = 0
    stages: list[tuple[str, float]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    expected_s: float | None = None
    steps: int = 0
    checkpoint_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "schema": 1,
            "exit_code": self.exit_code,
            "outcome": self.result.get("outcome", "failed"),
            "stages": [{"stage": name, "seconds": seconds} for name, seconds in self.stages],
            "steps": self.steps,
            "expected_s": self.expected_s,
            "checkpoint_bytes": self.checkpoint_bytes,
            "verdict": self.result.get("verdict"),
        }


def rehearse(request: TrainRequest, show: Show) -> Rehearsal:
    """Goes through every stage with 64 rows and three steps, in a directory that is gone afterwards.

    The data of the long run are prepared whole: row 50,000 can be bad, too, and the long run finds them in the cache.

    Raises:
        UnisonoError: if a stage is refused before anything was started.
    """
    if request.nodes not in (None, "1") or request.hosts:
        raise UsageError.of(
            "a rehearsal is for one node",
            where="--rehearse",
            why="it tries the path from data to export, and leaves nothing behind",
            fix="remove --nodes and --hosts; `unisono train --dry-run` shows the plan of all nodes",
        )
    if request.launcher in ("ray", "slurm"):
        notify(
            show,
            f"a rehearsal runs on this machine only: --launcher {request.launcher} is ignored",
        )
    done = Rehearsal()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        done.stages.append((name, time.monotonic() - began))
        if done.exit_code == 0:
            notify(show, f"{name}: done in {show_seconds(done.stages[-1][1])}")

    with tempfile.TemporaryDirectory(prefix="unisono-rehearsal-") as folder:
        run = RunDir(Path(folder) / "run")
        elsewhere = replace(
            request,
            overrides=(*request.overrides, f"output_dir={run.root}"),
            resume=False,
            fresh=False,
            rehearse=False,
        )
        with stage("all rows prepared, plan made"):
            long_run = plan_only(elsewhere, _only(show, "phase", "note"))
        done.steps = long_run.total_steps
        with stage(f"{ROWS} rows, {_STEPS} steps, evaluation, checkpoint"):
            _train(done, elsewhere, show, steps=_STEPS, resume=False)
        if done.exit_code == 0:
            _measure(done, long_run, run)
            with stage(f"resumed from step {_STEPS}"):
                _train(done, elsewhere, show, steps=_STEPS + _MORE, resume=True)
        if done.exit_code == 0:
            with stage("exported"):
                _export(request, run, Path(folder) / "export", on_message=_only(show, "warning"))
    return done


def _train(done: Rehearsal, request: TrainRequest, show: Show, *, steps: int, resume: bool) -> None:
    short = (
        f"duration={steps} steps",
        f"eval.every={_STEPS} steps",
        f"checkpoint.every={_STEPS} steps",
        "track=[]",
        "checkpoint.storage=null",
    )
    short_request = replace(
        request,
        overrides=(*request.overrides, *short),
        limit_rows=ROWS,
        restarts=0,
        resume=resume,
        fresh=False,
    )
    done.result = train(short_request, _only(show, "phase", "warning", "verdict", "refused"))
    done.exit_code = int(done.result["exit_code"])


def _export(request: TrainRequest, run: RunDir, out: Path, *, on_message: Callable[[Message], None]) -> None:
    body = {"target": str(run.root), "step": None, "out": str(out), "merge": False}
    run_task("export", body, on_message=on_message, programs=request.programs)


def _measure(done: Rehearsal, long_run: RunPlan, run: RunDir) -> None:
    """The expected duration of the full run: its tokens at the rate of the later steps, after warm-up."""
    lines = [line for line in read_metrics(run.metrics) if "tokens" in line and line.get("step_time_s")]
    later = lines[1:] or lines
    seconds = sum(line["step_time_s"] + (line.get("data_time_s") or 0.0) for line in later)
    first_tokens = lines[0]["tokens"] if len(lines) > len(later) else 0
    data = long_run.data.train
    if lines and seconds > 0 and later[-1]["tokens"] > first_tokens:
        rate = (later[-1]["tokens"] - first_tokens) / seconds
        done.expected_s = data.tokens / data.sequences * long_run.total_sequences / rate
    checkpoint = run.checkpoint(_STEPS)
    done.checkpoint_bytes = sum(file.stat().st_size for file in checkpoint.iterdir())


def _only(show: Show, *kinds: str) -> Show:
    def shown(message: Message) -> None:
        if message["kind"] in kinds:
            show(message)

    return shown


def summary(done: Rehearsal) -> list[str]:
    """For people: what is known now about the long run."""
    if done.exit_code:
        return [f"the rehearsal ended with {done.result.get('outcome')} (exit code {done.exit_code})"]
    lines = [f"every stage passed in {show_seconds(sum(seconds for _, seconds in done.stages))}"]
    if done.expected_s is not None:
        lines.append(
            f"the long run: {done.steps:,} steps, about {show_seconds(done.expected_s)} of training at this rate, "
            f"without its evaluations; a checkpoint takes {show_bytes(done.checkpoint_bytes)}"
        )
    return lines

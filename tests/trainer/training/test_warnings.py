"""What goes wrong in a run is said, and costs no more than it must.

Run: pytest tests/trainer/training/test_warnings.py
"""

import contextlib
import math
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.base.errors import RankDied
from unisono.base.text import show_bytes
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.training import loop
from unisono.trainer.training.training_checks import out_of_memory, too_many_skipped

Train = Callable[..., Any]


def test_a_step_that_is_not_a_number_is_skipped_and_its_rows_are_named(train_here: Train) -> None:
    run = train_here(faults={"nan_steps": [3]})
    (warning,) = [m for m in run.of_kind("warning") if m["code"] == "nan_step"]
    assert warning["step"] == 3
    assert "rows.jsonl:" in warning["text"]
    assert run.result["outcome"] == "completed"
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for loss in run.losses[3:])


def test_three_in_twenty_end_the_run_with_a_verdict(train_here: Train) -> None:
    run = train_here(faults={"nan_steps": [2, 4, 6]}, duration="30 steps")
    assert run.result["outcome"] == "stalled"
    assert run.result["exit_code"] == 4
    verdict = run.result["verdict"]
    assert verdict["cause"] == "nan_loss"
    assert verdict["step"] == 6
    assert "2, 4, 6" in verdict["summary"]


def test_a_skipped_step_is_a_short_line_and_all_its_rows_are_in_the_events(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"/data/of/somebody/rows.jsonl:{3 * number}" for number in range(400)]
    monkeypatch.setattr("unisono.trainer.batches.table.TableSource.row_ids", lambda *_: rows)
    run = train_here(faults={"nan_steps": [2, 4, 6]}, duration="30 steps", optim={"lr": 1e9})
    for warning in [m for m in run.of_kind("warning") if m["code"] == "nan_step"]:
        assert len(warning["text"] + warning["fix"]) < 300
        assert "and 394 more" in warning["text"]
        assert warning["rows"] == rows
    verdict = run.result["verdict"]
    assert any("optim.lr=0.0002 (0.0002 is usual for an adapter)" in fix for fix in verdict["fix"])


@pytest.mark.parametrize("duration", ["2 steps", "30 steps"])
def test_nan_before_any_update_blames_model_not_rows_and_is_not_completed(
    train_here: Train, duration: str
) -> None:
    run = train_here(faults={"nan_loss": {"rank": 0, "steps": [1, 2, 3]}}, duration=duration)
    assert (run.result["outcome"], run.result["exit_code"]) == ("stalled", 4)
    assert not (run.directory / "adapter").exists()
    verdict = run.result["verdict"]
    assert verdict["cause"] == "nan_loss"
    assert verdict["ranks"] == []
    assert "the model" in verdict["summary"]
    printed = str(verdict) + "".join(
        m["text"] + m["fix"] for m in run.of_kind("warning") if m["code"] == "nan_step"
    )
    assert "rows.jsonl" not in printed
    assert "optim.lr" not in printed


def test_an_eval_loss_that_is_not_a_number_is_never_the_best(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([2.0, math.nan, 1.5, 1.0])
    monkeypatch.setattr(loop, "evaluate_rows", lambda _run: {"loss": next(losses)})
    run = train_here(data={"eval": 0.2}, eval={"every": "1 steps"}, duration="3 steps")
    assert [m["best"] for m in run.of_kind("eval") if m["step"] > 0] == [False, True, True]


def test_a_save_in_flight_is_not_lost_with_such_an_end(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = threading.Event()
    save = CheckpointStore.save

    def late(self: CheckpointStore, *args: Any, **named: Any) -> Path:
        assert stalled.wait(5)  # less than STUCK_S
        return save(self, *args, **named)

    def judge(*args: Any) -> Any:
        verdict = too_many_skipped(*args)
        if verdict is not None:
            stalled.set()
        return verdict

    monkeypatch.setattr(CheckpointStore, "save", late)
    monkeypatch.setattr(loop, "too_many_skipped", judge)
    run = train_here(faults={"nan_steps": [2, 4, 6]}, duration="30 steps", checkpoint={"every": "5 steps"})
    assert run.result["outcome"] == "stalled"
    assert run.result["checkpoint"].endswith("step-00000005")


def test_three_in_more_than_twenty_do_not(train_here: Train) -> None:
    run = train_here(faults={"nan_steps": [2, 12, 23]}, duration="25 steps")
    assert run.result["outcome"] == "completed"


def test_too_little_memory_is_reported_before_step_1_with_two_settings(train_here: Train) -> None:
    """A model this small cannot fill the memory; so it is limited, and filled but for 2 MB, for the
    longest batch.
    """
    import resource

    messages: list[dict[str, Any]] = []
    ballast: list[bytearray] = []

    def fill(message: dict[str, Any], stop: object) -> None:
        del stop
        messages.append(message)
        if message["kind"] == "phase" and message["phase"] == "rehearse":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
            with contextlib.suppress(MemoryError):
                while True:
                    ballast.append(bytearray(256_000))
            del ballast[-8:]

    try:
        with pytest.raises(RankDied) as caught:
            train_here(
                on_message=fill, batch={"global": 48, "micro": 48}, data={"max_length": 256}, adapter=None
            )
    finally:
        ballast.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (problem,) = caught.value.problems
    assert "tokens" in problem.what
    assert "batch.micro=24 saves about" in problem.fix
    assert "memory.gradient_checkpointing=true saves about" in problem.fix
    assert not any(message["kind"] == "step" for message in messages)


def test_best_checkpoint_still_there_is_the_result_if_the_best_is_gone(train_here: Train) -> None:
    """As where the save of the best has failed: its place is not left to the last weights.

    The rate rises until the steps do harm, so that the last evaluation is not the best.
    """
    asked: dict[str, Any] = {
        "data": {"eval": 0.3}, "eval": {"every": "2 steps"}, "checkpoint": {"best": "eval_loss", "keep": 20, "every": "2 steps"},
        "optim": {"lr": 100.0, "schedule": "constant", "warmup": "20 steps"},
    }  # fmt: skip

    def lose_the_best(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "checkpoint" and message["step"] == 20:
            folder = Path(message["path"]).parent
            shutil.rmtree(folder / f"step-{best:08d}")

    whole = train_here(duration="20 steps", **asked)
    losses = {
        line["step"]: line["eval_loss"] for line in whole.metrics if "eval_loss" in line and line["step"]
    }
    best, second = sorted(losses, key=lambda step: losses[step])[:2]
    assert best < 20, losses
    run = train_here(duration="20 steps", on_message=lose_the_best, **asked)
    assert run.result["eval"]["loss"] == losses[second]
    (warning,) = [message for message in run.of_kind("warning") if message["code"] == "best_is_gone"]
    assert f"the best step, {best}, is missing; the result comes from step {second}" in warning["text"]


def test_early_stop_and_the_best_checkpoint_is_the_result(train_here: Train) -> None:
    run = train_here(
        data={"eval": 0.3}, eval={"every": "2 steps", "stop_after": 2}, checkpoint={"best": "eval_loss", "keep": 1, "every": "100 steps"},
        optim={"lr": 0.3, "schedule": "constant"}, duration="60 steps",
    )  # fmt: skip
    evals = [message for message in run.of_kind("eval") if message["step"] > 0]
    losses = [message["eval_loss"] for message in evals]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(losses) == best + 3, "two evaluations in a row were not better, and no third was made"
    assert run.result["eval"]["loss"] == losses[best]
    assert (run.directory / "checkpoints" / f"step-{evals[best]['step']:08d}").is_dir()


def test_early_stopped_run_that_died_before_its_result_trains_no_further(train_here: Train) -> None:
    sections: dict[str, Any] = {
        "data": {"eval": 0.3}, "eval": {"every": "2 steps", "stop_after": 2}, "optim": {"lr": 0.3, "schedule": "constant"},
        "duration": "60 steps",
    }  # fmt: skip
    ended = train_here(**sections)
    step = ended.result["step"]
    assert step < 60
    again = train_here(
        directory=ended.directory,
        resume=(step, ended.directory / "checkpoints" / f"step-{step:08d}"),
        **sections,
    )
    assert again.result["outcome"] == "completed"
    assert again.result["step"] == step
    assert again.losses == ended.losses


def test_exact_match_is_measured_before_and_after(train_here: Train) -> None:
    run = train_here(data={"eval": 0.1}, eval={"exact_match": True, "samples": 2})
    assert 0 <= run.result["eval"]["exact_match_before"] <= 1
    assert 0 <= run.result["eval"]["exact_match"] <= 1
    samples = run.of_kind("sample")
    assert {message["step"] for message in samples} == {0, 6}
    assert all(message["reference"] for message in samples)


def test_only_code_that_draws_from_a_global_generator_is_reported(train_here: Train) -> None:
    import random

    quiet = train_here()
    assert [m for m in quiet.of_kind("warning") if m["code"] == "global_random_state"] == []

    def draw(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "step" and message["step"] == 3:
            random.random()

    noisy = train_here(on_message=draw)
    (warning,) = [m for m in noisy.of_kind("warning") if m["code"] == "global_random_state"]
    assert "python's random" in warning["text"]
    assert quiet.losses == noisy.losses


def test_tensorboard_gets_the_curves_when_asked(train_here: Train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_here(track=["tensorboard"], data={"eval": 0.1})
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    assert [round(point.value, 5) for point in events.Scalars("train/loss")] == [
        round(loss, 5) for loss in run.losses
    ]
    assert [point.step for point in events.Scalars("eval/loss")] == [6]


def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(train_here: Train, tmp_path: Path) -> None:
    """A real file system of 1 MB, filled up after the first checkpoint."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs mounts")
    filler = small / "filler"

    def fill(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "checkpoint" and message["step"] == 2:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if message.get("code") == "checkpoint_failed" and message["step"] == 6:
            filler.unlink()  # before the save of step 8 begins, which waits for this one

    try:
        run = train_here(
            directory=small / "run",
            on_message=fill,
            checkpoint={"every": "2 steps", "keep": 9},
            duration="8 steps",
        )
        failed = [m for m in run.of_kind("warning") if m["code"] == "checkpoint_failed"]
        assert [m["step"] for m in failed] == [4, 6]
        assert str(small) in failed[0]["where"]
        assert "B" in failed[0]["text"], "the bytes that are missing are told"
        assert run.result["outcome"] == "completed"
        assert [m["step"] for m in run.of_kind("step")] == list(range(1, 9))
        assert sorted(path.name for path in (small / "run" / "checkpoints").iterdir()) == [
            "step-00000002",
            "step-00000008",
        ]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_memory_that_runs_out_gives_no_advice_that_takes_more(train_here: Train) -> None:
    plan = train_here(duration="1 steps").plan
    model = plan.model.model_copy(update={"linear_parameters": 10**9})
    config = plan.config.model_copy(update={"adapter": None})
    update = {"dtype": "bfloat16", "model": model, "config": config, "micro_batch": plan.global_batch}
    run: Any = SimpleNamespace(
        plan=plan.model_copy(update=update), forward=SimpleNamespace(fast_layers=9, why=""), device=torch.device("cpu"),
        group=SimpleNamespace(rank=0, world_size=1), where="here", state=SimpleNamespace(step=0), pictures=None, sharded=None,
    )  # fmt: skip
    assert run.plan.micro_batch > 1

    def advice() -> str:
        error = out_of_memory(run, RuntimeError("out of memory"), shape="1 sequence", phase="rehearse")
        assert error.verdict is not None
        return " ".join(error.verdict.fix)

    assert "batch.micro" not in advice(), "gradients of two micro batches are in float32"
    run.group.world_size = 2
    assert "batch.micro" in advice(), "they were in float32 anyway"
    assert "optim.state_dtype" not in advice(), "two others come first"
    run.plan = run.plan.model_copy(update={"micro_batch": 1})
    saved = show_bytes(4 * plan.model.parameters)
    assert f"optim.state_dtype=bfloat16 saves about {saved} of" in advice()
    run.state.step = 7
    assert "optim.state_dtype" not in advice(), "a checkpoint of float32 moments would not be resumed"


def test_out_of_memory_names_the_fast_layers_the_estimate_counted_on(train_here: Train) -> None:
    plan = train_here(duration="1 steps").plan
    gpu = plan.device.model_copy(update={"kind": "cuda", "compiles": True})
    place = plan.ranks[0].model_copy(update={"device": gpu})
    plan = plan.model_copy(update={"dtype": "bfloat16", "ranks": [place]})
    assert plan.expects_fast_layers
    why = "the fast layers are not used: Triton is not installed (pip install triton)"
    forward = SimpleNamespace(fast_layers=0, why=why)
    run: Any = SimpleNamespace(
        plan=plan, forward=forward, device=torch.device("cuda"), group=SimpleNamespace(rank=0, world_size=1), where="here",
        state=SimpleNamespace(step=0), pictures=None, sharded=None,
    )  # fmt: skip

    def evidence() -> str:
        error = out_of_memory(run, RuntimeError("CUDA out of memory"), shape="1 sequence", phase="rehearse")
        assert error.verdict is not None
        assert "memory.gradient_checkpointing=true saves about" in " ".join(error.verdict.fix)
        return error.verdict.evidence[0].text

    assert (
        evidence()
        == "CUDA out of memory; the memory was estimated for the fast layers, which are not used here:"
        " Triton is not installed (pip install triton)"
    )
    forward.fast_layers = 24
    assert evidence() == "CUDA out of memory"

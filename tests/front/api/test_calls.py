"""The Python interface on real fronts and ranks. Run: pytest tests/front/api"""

import contextlib
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel

import unisono
from tests import front_server
from tests.session_server import cache_with_kernels
from unisono.front.api.calls import Keys, TrainOptions
from unisono.front.api.front import Stream
from unisono.front.cli.train import train as train_command
from unisono.jobs.launchers.launchers import LAUNCHERS
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import RunConfig

LIMIT_S = 240.0  # of a loaded machine


class Place:
    """A folder with a user's settings; configs of runs on the random model."""

    def __init__(self, folder: Path, model: Path, rows: Path) -> None:
        self.folder, self.model, self.rows = folder, model, rows

    def config(self, name: str, **more: Any) -> unisono.Config:
        keys: Any = {
            "model": str(self.model), "data": {"train": str(self.rows), "max_length": 64}, "batch": {"global": 8},
            "optim": {"lr": 1e-2}, "adapter": {"rank": 4, "alpha": 8}, "duration": "6 steps", "device": "cpu",
            "output_dir": str(self.folder / name),
        }  # fmt: skip
        return unisono.Config(**{**keys, **more})

    def long(self, name: str, **more: Any) -> unisono.Config:
        """A run that has to be stopped."""
        return self.config(name, duration="20000 steps", checkpoint={"every": "10000 steps"}, **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "settings"))
        patch.setenv("XDG_CACHE_HOME", str(cache_with_kernels(folder / "cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("UNISONO_TOKEN", raising=False)
        yield Place(folder, model_dir, rows_file)


@pytest.fixture(scope="module")
def streamed(place: Place) -> list[unisono.Event]:
    """The events of a run with one rank."""
    extra: Any = {"eval": {"every": "3 steps", "samples": 1}, "checkpoint": {"every": "3 steps"}}
    data = {"train": str(place.rows), "max_length": 64, "eval": 0.1}
    config = place.config("one", data=data, **extra)
    return list(unisono.stream(config))


def of(events: list[unisono.Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.ranks
def test_stream_gives_facts_of_the_start_all_steps_and_the_result_last(
    streamed: list[unisono.Event],
) -> None:
    (planned,), (started,) = of(streamed, unisono.Planned), of(streamed, unisono.Started)
    assert (planned.total_steps, planned.world_size) == (6, 1)
    assert started.facts["trainable"] > 0
    steps = of(streamed, unisono.Step)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in of(streamed, unisono.Evaluation)] == [0, 3, 6]
    assert of(streamed, unisono.Sample)
    assert [event.step for event in of(streamed, unisono.Checkpoint)] == [3, 6]
    last = streamed[-1]
    assert isinstance(last, unisono.Ended)
    result = last.result
    assert (result.outcome, result.exit_code, result.step, result.verdict) == ("completed", 0, 6, None)
    assert result.adapter is not None
    assert (result.adapter / "adapter_model.safetensors").is_file()
    assert result.model is None
    assert [line["loss"] for line in result.metrics if "loss" in line] == [event.loss for event in steps]
    assert result.evaluation["loss"] == of(streamed, unisono.Evaluation)[-1].metrics["eval_loss"]
    assert unisono.Result.from_run(result.output_dir) == result
    assert result.raise_for_outcome() is result


@pytest.mark.ranks
def test_two_ranks_trained_in_a_thread_have_the_losses_of_one(
    place: Place, streamed: list[unisono.Event]
) -> None:
    results: list[unisono.Result] = []
    config = unisono.Config.of(
        RunConfig.model_validate(of(streamed, unisono.Planned)[0].plan["config"]).model_copy(
            update={"output_dir": str(place.folder / "two")}
        )
    )
    thread = threading.Thread(target=lambda: results.append(unisono.train(config, nproc=2)))
    thread.start()
    thread.join(LIMIT_S)
    (result,) = results
    assert result.outcome == "completed"
    assert json.loads((result.output_dir / "plan.json").read_text())["world_size"] == 2
    losses = [line["loss"] for line in result.metrics if "loss" in line]
    assert losses == pytest.approx([event.loss for event in of(streamed, unisono.Step)], rel=1e-4)


def read_until_step(stream: Stream, step: int) -> None:
    for event in stream:
        if isinstance(event, unisono.Step) and event.step >= step:
            return
    raise AssertionError("it ended before that")


@pytest.mark.ranks
def test_cancel_saves_the_step_and_the_same_call_resumes_from_it(place: Place) -> None:
    config = place.long("cancelled")
    stream = unisono.stream(config)
    read_until_step(stream, 3)
    result = stream.cancel()
    assert (result.outcome, result.exit_code) == ("interrupted", 130)
    assert result.checkpoint is not None
    assert result.step >= 3
    rest = list(stream)
    assert isinstance(rest[-1], unisono.Ended)
    assert of(rest, unisono.Checkpoint)[-1].step == result.step

    for event in unisono.stream(config):  # as a generator: what leaves the loop closes it
        if isinstance(event, unisono.Step):
            assert event.step == result.step + 1
            break
    again = unisono.Result.from_run(result.output_dir)
    assert again.outcome == "interrupted"
    assert again.step > result.step


@pytest.mark.ranks
def test_cancel_before_anything_was_started_leaves_nothing(place: Place) -> None:
    stream = unisono.stream(place.long("unstarted"))
    result = stream.cancel()
    assert result.exit_code == 130
    assert result.step == 0
    assert isinstance(list(stream)[-1], unisono.Ended)


def rank_process(output_dir: Path, rank: int) -> psutil.Process:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(output_dir) in " ".join(process.cmdline()) and process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError("the rank is not there")


@pytest.mark.ranks
def test_a_killed_rank_comes_back_as_a_verdict_that_names_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    config = place.long("killed", restarts=0)
    stream = unisono.stream(config, nproc=2)
    read_until_step(stream, 2)
    rank_process(place.folder / "killed", 1).kill()
    rest = list(stream)
    (failed,), last = of(rest, unisono.Failed), rest[-1]
    assert isinstance(last, unisono.Ended)
    result = last.result
    assert (result.outcome, result.exit_code) == ("died", 5)
    assert result.verdict is not None
    assert (result.verdict.cause, result.verdict.ranks) == ("rank_killed", (1,))
    assert failed.verdict.cause == "rank_killed"
    with pytest.raises(unisono.RankDied) as raised:
        result.raise_for_outcome()
    assert raised.value.verdict == result.verdict
    assert raised.value.exit_code == 5
    assert unisono.diagnose(result.output_dir).cause == "rank_killed"


@pytest.mark.ranks
def test_a_killed_front_is_an_error_that_says_what_ended(place: Place) -> None:
    stream = unisono.stream(place.long("headless"))
    read_until_step(stream, 2)
    stream._front._child.kill()
    with pytest.raises(unisono.RankDied, match="supervises the run ended: killed by SIGKILL"):
        list(stream)


# ---- errors


def command(*words: str, cwd: Path | None = None) -> Any:
    return front_server.run([sys.executable, "-m", "unisono", *words], cwd=cwd, timeout=LIMIT_S)


def test_a_bad_config_is_an_exception_with_the_fields_of_the_command_line(place: Place) -> None:
    file = place.folder / "bad.yaml"
    file.write_text(
        f"model: builtin:tiny\ndata: {{train: {place.rows}}}\noptim:\n  lrr: 1e-4\noutput_dir: x\n"
    )
    with pytest.raises(unisono.ConfigError) as raised:
        unisono.Config.from_file(file, {"seed": -1})
    error = raised.value
    assert error.exit_code == 2
    assert [problem.where for problem in error.problems] == [f"{file}:4", "command line"]
    assert "lr" in error.problems[0].fix
    printed = json.loads(command("--json", "train", str(file), "seed=-1").stdout.splitlines()[-1])
    assert error.to_json()["problems"] == printed["problems"]
    assert any(str(file) in note for note in error.__notes__)  # a traceback shows where


def test_a_config_of_keys_names_each_wrong_one(place: Place) -> None:
    with pytest.raises(unisono.ConfigError) as raised:
        place.config("x", batch={"global": 8, "micro": 3}, optim={"lr": "fast"})
    assert len(raised.value.problems) == 1, "types are checked before contradictions"
    assert raised.value.problems[0].what.startswith("optim.lr: must be a number")
    with pytest.raises(unisono.ConfigError, match="does not divide"):
        place.config("x", batch={"global": 8, "micro": 3})


@pytest.mark.ranks
def test_data_that_are_refused_are_an_exception_and_nothing_is_left(place: Place) -> None:
    with pytest.raises(unisono.UsageError) as raised:
        unisono.train(place.config("refused", data={"train": str(place.folder / "none.jsonl")}))
    assert raised.value.exit_code == 2
    assert raised.value.problems[0].where == "data.train"
    assert not (place.folder / "refused").exists()
    with pytest.raises(unisono.UsageError, match="has no result"):
        unisono.Result.from_run(place.folder / "refused")
    with pytest.raises(unisono.UsageError):
        unisono.load(place.folder / "refused")


def test_options_are_those_of_the_command(place: Place) -> None:
    ours = {*TrainOptions.__annotations__}
    typed = {*inspect.signature(train_command).parameters}
    torchruns = {"nnodes", "nproc_per_node", "master_addr", "master_port", "rdzv_endpoint"}
    assert {name.removesuffix("_s") for name in ours} == typed - torchruns - {
        "config", "overrides", "dry_run", "rehearse", "no_first_checkpoint", "no_read_back", "reason"
    }  # fmt: skip
    of_launchers = {name for launcher in LAUNCHERS.values() for name in launcher.option_names()}
    assert ours <= {*TrainRequest.__dataclass_fields__} | of_launchers
    with pytest.raises(TypeError, match="'nprocs' is not an option"):
        unisono.stream(place.config("x"), nprocs=2)  # type: ignore[call-arg]
    assert {*Keys.__annotations__} == {*RunConfig.model_fields}


# ---- what else is called


@pytest.mark.ranks
def test_the_loaded_model_answers_as_generate_does(streamed: list[unisono.Event]) -> None:
    ended = streamed[-1]
    assert isinstance(ended, unisono.Ended)
    model, tokenizer = unisono.load(ended.result)
    assert isinstance(model, PeftModel)
    for prompt in ("3 cat sings", "the red dog"):
        told = command("--json", "generate", str(ended.result.output_dir), prompt, "--max-tokens", "20")
        (answer,) = [json.loads(line) for line in told.stdout.splitlines()]
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
        text = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == answer["answer"]


def test_diagnose_gives_the_object_of_the_command(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "step 3 loss 1.2\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a"
        " total capacity of 79.10 GiB\n"
    )
    found = unisono.diagnose(tmp_path)
    assert found.cause == "cuda_oom"
    assert found.to_json() == json.loads(command("--json", "diagnose", str(tmp_path)).stdout)
    with pytest.raises(unisono.UsageError, match="does not exist"):
        unisono.diagnose(tmp_path / "none")


def test_doctor_gives_the_checks_of_the_command(place: Place) -> None:
    report = unisono.doctor(place.config("doctor"))
    file = place.folder / "doctor.yaml"
    file.write_text(place.config("doctor").to_yaml())
    printed = command("--json", "doctor", str(file))
    told = json.loads(printed.stdout)["checks"]
    assert [(check.id, check.status) for check in report.checks] == [
        (check["id"], check["status"]) for check in told
    ]
    assert {*report.to_json()["checks"][0]} == {*told[0]}
    assert report.exit_code == printed.returncode
    assert bool(report.failed) == (report.exit_code == 6)


# ---- the package


def test_importing_it_costs_little_and_imports_no_torch() -> None:
    script = (
        "import resource, sys\nbefore = resource.getrusage(resource.RUSAGE_SELF)\nimport unisono\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)\n"
        "from unisono import Config, train, stream, doctor, diagnose\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, callable(train))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    cost, heavy = done.stdout.splitlines()
    assert float(cost) < 0.05 * 5, "50 ms on a quiet machine"
    assert heavy == "False False True"


def test_every_public_name_is_there() -> None:
    assert unisono.__all__ == list(dict.fromkeys(unisono.__all__))
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
    assert callable(unisono.train)
    assert callable(unisono.doctor)
    assert callable(unisono.diagnose)
    assert "nproc" in str(inspect.signature(unisono.train)) or "options" in str(
        inspect.signature(unisono.train)
    )
    assert {*unisono.__all__} <= {*dir(unisono)}


PROGRAM = """
import asyncio, sys, unisono

async def main():
    kinds = []
    async for event in unisono.stream("c.yaml"):
        kinds.append(type(event).__name__)
    return kinds

kinds = asyncio.run(main())
again = unisono.train(unisono.Config.from_file("c.yaml", {"output_dir": "again"}))
print(kinds.count("Step"), kinds[-1], again.outcome)
"""


@pytest.mark.ranks
def test_program_with_an_event_loop_and_no_main_guard_trains_twice(place: Place, tmp_path: Path) -> None:
    """Nothing but the program's own line is on stdout and stderr."""
    (tmp_path / "c.yaml").write_text(
        place.config("program").model_copy(update={"output_dir": "out"}).to_yaml()
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.stdout, done.returncode) == ("6 Ended completed\n", 0), done.stderr
    assert done.stderr == ""


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.05)


def has_stepped(output_dir: Path) -> Callable[[], bool]:
    file = output_dir / "metrics.jsonl"
    return lambda: file.exists() and file.read_bytes().count(b"\n") >= 2


@pytest.fixture
def running(place: Place, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A program in the middle of a run, whose directory is `tmp_path/out`."""
    config = place.long("running").model_copy(update={"output_dir": str(tmp_path / "out")})
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    program = "import unisono\nprint(unisono.train('c.yaml'))\n"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_until(has_stepped(tmp_path / "out"))
            yield process
        finally:
            process.kill()


@pytest.mark.ranks
def test_an_interrupt_saves_a_checkpoint_before_it_is_raised(
    running: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    running.send_signal(signal.SIGINT)
    _, printed = running.communicate(timeout=LIMIT_S)
    assert "KeyboardInterrupt" in printed
    result = unisono.Result.from_run(tmp_path / "out")
    assert result.outcome == "interrupted"
    assert result.checkpoint is not None


@pytest.mark.ranks
def test_a_run_saves_and_ends_when_its_program_is_killed(
    running: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    running.kill()
    wait_until((tmp_path / "out" / "result.json").exists)
    result = unisono.Result.from_run(tmp_path / "out")
    assert (result.outcome, result.exit_code) == ("preempted", 75)
    assert result.checkpoint is not None

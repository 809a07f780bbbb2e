"""What a person sees of a run. Run: pytest tests/front/cli/test_screen.py"""

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.messages import (
    CheckpointMessage,
    PlanMessage,
    ResultMessage,
    StepMessage,
    VerdictMessage,
    message_of,
)
from unisono.front.cli.output import Output
from unisono.front.cli.screen import PlainLine, Screen, StepRate, ending
from unisono.front.cli.terminal import first_screen
from unisono.guard.places.ranks import DeviceChoice
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import (
    DataSummary,
    ModelFacts,
    PlanInputs,
    ResumePoint,
    RunPlan,
    SplitSummary,
    resolve_plan,
)


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines:
    """A line that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, float | None]] = []
        self.kept: list[str] = []

    def show(self, text: str, *, share: float | None) -> None:
        self.shown.append((text, share))

    def above(self, text: str) -> None:
        self.kept.append(text)

    def close(self) -> None:
        pass


def plan(*, gpu: bool = False, resume: bool = False, ignored: int = 0, **config: Any) -> RunPlan:
    split = SplitSummary(
        rows=2_000, sequences=500, tokens=120_000, loss_tokens=40_000, longest_sequence=256, longest_row=80
    )
    device = DeviceChoice(
        kind="cuda" if gpu else "cpu", index=3 if gpu else None, uuid="GPU-aaaa" if gpu else None, name="Big", memory_bytes=10**10,
        bfloat16=True,
    )  # fmt: skip
    return resolve_plan(
        PlanInputs(
            config=RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "output_dir": "/runs/x", **config}),
            run_id="r", output_dir="/runs/x", host="box", device=device, threads=2, threads_origin="cores",
            model=ModelFacts(
                directory="/m", model_type="stable-diffusion" if config.get("objective") == "diffusion" else "llama", parameters=10**6, hidden_size=64, layers=2, intermediate_size=128, vocab_size=512,
                linear_parameters=10**5, linear_in_out=10**3, weight_bytes=10**6, digest="m",
            ),
            data=DataSummary(
                cache_dir="/c", cache_hit=True, cache_reason="as before", train=split, eval=split,
                ledger={"rows": 2_310, "used": 2_200, "cut": 3, "split": 0, "dropped": 100, "bad": 10, "eval": 200, "tokens_cut": 77},
                formats=["messages"], template="the tokenizer's own", total_steps=100, digest="d",
            ),
            resume=ResumePoint(step=7, path="/runs/x/checkpoints/step-00000007") if resume else None,
            resume_reason="goes on; from step 7" if resume else "fresh", ignored_variables=[f"NCCL_{n}" for n in range(ignored)],
        )
    )  # fmt: skip


@given(
    st.booleans(), st.booleans(), st.integers(0, 40), st.sampled_from([None, {"rank": 4}, {"kind": "dora"}])
)
def test_the_first_screen_has_at_most_twelve_lines_and_each_thing_is_on_it(
    gpu: bool,  # noqa: FBT001 - drawn, not passed by a person
    resume: bool,  # noqa: FBT001
    ignored: int,
    adapter: dict[str, Any] | None,
) -> None:
    facts = {"parameters": 10**6, "trainable": 12_345, "layout": "flat", "peak_bytes": 10**8}
    lines = first_screen(plan(gpu=gpu, resume=resume, ignored=ignored, adapter=adapter), facts)
    text = "\n".join(lines)
    assert len(lines) <= 12
    assert all("\n" not in line for line in lines)
    for word in (
        "Big",
        "llama",
        "12.3 k of 1 M",
        "2,310 rows",
        "100 dropped",
        "10 bad",
        "77 cut",
        "per step",
        "free",
        "/runs/x",
    ):
        assert word in text, word
    assert ("index 3 → GPU-aaaa" in text) == gpu
    assert ("from step 7" in text) == resume
    assert all(f"NCCL_{n}" in text for n in range(ignored))


@pytest.mark.parametrize(
    ("quick", "words"), [(True, "weight and adapter in one product"), (False, "products of peft, slower")]
)
def test_the_first_screen_shows_how_weights_are_quantized_and_used(*, quick: bool, words: str) -> None:
    given = plan(model={"path": "m", "quantize": "nf4"})
    facts = given.model.model_copy(
        update={"quantized": "nf4", "quantized_double": True, "quantized_embeddings": not quick}
    )
    text = "\n".join(first_screen(given.model_copy(update={"model": facts}), {"quick": quick}))
    embeddings = "" if quick else ", embeddings int8"
    assert f"nf4, scales quantized{embeddings}, computed in {given.dtype}" in text
    assert words in text


def test_what_comes_from_files_cannot_steer_the_terminal() -> None:
    lines = first_screen(plan(output_dir="/runs/\x1b[31mx"), {"layout": "\x1b]0;owned\x07flat"})
    assert "\x1b" not in "\n".join(lines)


def test_plain_lines_come_at_each_tenth_and_after_a_silence() -> None:
    printed: list[str] = []
    clock = Clock()
    line = PlainLine(printed.append, clock)
    for step in range(1, 1_001):
        line.show(f"step {step}", share=step / 1_000)
    assert printed == ["step 1", *(f"step {n}00" for n in range(1, 10)), "step 1000"]
    clock.now += 60
    line.show("evaluating", share=None)
    line.show("evaluating", share=None)
    assert printed[-2:] == ["step 1000", "evaluating"]


def test_a_new_phase_begins_its_tenths_again() -> None:
    printed: list[str] = []
    line = PlainLine(printed.append, Clock())
    line.show("tokenizing", share=1.0)
    line.show("step 1", share=0.01)
    assert printed == ["tokenizing", "step 1"]


def test_the_rate_is_over_the_last_steps_and_leaves_out_the_first() -> None:
    clock = Clock()
    pace = StepRate(clock)
    assert pace.rate() is None
    clock.now += 30  # the first step warms up
    pace.note(1)
    assert pace.rate() is None
    for step in range(2, 12):
        clock.now += 0.5
        pace.note(step)
    assert pace.rate() == pytest.approx(2.0)


def result_of(**fields: Any) -> ResultMessage:
    return message_of(ResultMessage, fields)


def test_a_step_shows_loss_rate_and_time_left() -> None:
    clock, line = Clock(), Lines()
    screen = Screen(Output(), line, clock)
    screen.show(message_of(PlanMessage, plan(duration="100 steps").to_json()))
    for step in (1, 2, 3):
        clock.now += 2
        screen.show({"kind": "step", "step": step, "loss": 1.23456, "tokens_per_second": 5000.0})
    text, share = line.shown[-1]
    assert text == "step 3/100 · loss 1.235 · 5,000 tokens/s · 0.5 steps/s · 3 min 14 s left"
    assert share == 0.03
    clock.now += 2
    screen.show({"kind": "step", "step": 100, "loss": 1.0})
    assert "left" not in line.shown[-1][0]


def test_steps_whose_lines_come_together_have_the_rate_of_their_own_times() -> None:
    """As from a job that is followed; and less than 0.1 s is not shown as time left."""
    line = Lines()
    screen = Screen(Output(), line, Clock())
    screen.show(message_of(PlanMessage, plan(duration="100 steps").to_json()))
    for step in (1, 2, 3):
        screen.show({"kind": "step", "time": 1000.0 + 2 * step, "step": step, "loss": 1.0})
    assert line.shown[-1][0] == "step 3/100 · loss 1 · 0.5 steps/s · 3 min 14 s left"
    screen.show({"kind": "step", "time": 1006.1, "step": 99, "loss": 1.0})
    assert "left" not in line.shown[-1][0]


def test_rate_after_a_restart_counts_from_the_resumed_step() -> None:
    clock, line = Clock(), Lines()
    screen = Screen(Output(), line, clock)
    for steps in ((175, 176, 177), (2, 3)):
        screen.show(message_of(PlanMessage, plan(duration="200 steps").to_json()))
        for step in steps:
            clock.now += 2
            screen.show({"kind": "step", "step": step, "loss": 1.0})
    shown = [text for text, _ in line.shown]
    assert shown[-3:] == [
        "step 177/200 · loss 1 · 0.5 steps/s · 46 s left",
        "step 2/200 · loss 1",
        "step 3/200 · loss 1 · 0.5 steps/s · 6 min 34 s left",
    ]


def test_an_image_run_counts_pictures_and_no_tokens(tmp_path: Path) -> None:
    line = Lines()
    screen = Screen(Output(), line)
    given = plan(objective="diffusion", adapter={"targets": "unet"}, duration="100 steps")
    step = {"step": 1, "loss": 1.0, "tokens_per_second": 2400.0}  # positions of latents, 240 of a picture
    screen.show(message_of(PlanMessage, given.to_json()))
    screen.show({"kind": "ready", "facts": {"layout": "padded", "trainable": 10, "parameters": 100}})
    screen.show(message_of(StepMessage, step))
    end = ending(result_of(**step, outcome="completed", output_dir=str(tmp_path)), tmp_path, plan=given)
    words = [*line.kept, *(text for text, _ in line.shown), *end, *given.origins.values()]
    assert "2,310 pictures: 2,200 used" in "\n".join(words)
    assert "step 1/100 · loss 1 · 10 pictures/s" in words
    assert " · 10 pictures/s · " in end[0]
    assert not [word for word in words if re.search(r"\b(tokens?|rows|sequences)\b", word)]


def test_quiet_keeps_warnings_and_verdicts_only() -> None:
    line = Lines()
    screen = Screen(Output(quiet=True), line)
    screen.show(message_of(PlanMessage, plan().to_json()))
    screen.show({"kind": "ready", "facts": {}})
    screen.show({"kind": "step", "step": 1, "loss": 1.0})
    screen.show(message_of(CheckpointMessage, {"step": 1}))
    screen.show({"kind": "warning", "text": "the disk is \x1b[2Jfull", "fix": "free some"})
    verdict = {"schema": 1, "cause": "nan_loss", "when": "during", "summary": "not a number"}
    screen.show(message_of(VerdictMessage, verdict))
    assert line.shown == []
    assert line.kept == ["warning: the disk is full (free some)", "not a number  [nan_loss]"]
    screen.show({"kind": "result", "outcome": "stalled", "exit_code": 4, "step": 1, "output_dir": "/out"})
    assert line.kept[2:] == ["WHAT      not a number  [nan_loss]"]


def test_samples_and_answers_lose_control_characters() -> None:
    line = Lines()
    Screen(Output(), line).show(
        {"kind": "sample", "step": 1, "prompt": "a\nb\x1b[2J", "text": "\x9b31mc\u202e"}
    )
    assert line.kept == ["  a b → 31mc"]


def test_the_end_reports_where_the_result_is_and_what_to_type_next(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "x"
    lines = ending(
        {
            "kind": "result", "outcome": "completed", "exit_code": 0, "step": 9, "loss": 0.5, "eval": {"loss_before": 2.0, "loss": 0.25, "exact_match": 1.0},
            "output_dir": str(out), "weights": str(out / "adapter"), "wall_time_s": 61.0, "tokens_per_second": 100.0,
        },
        tmp_path,
    )  # fmt: skip
    assert lines == [
        "completed: step 9 · loss 0.5 · 100 tokens/s · 1 min 01 s", "evaluation: loss 2 → 0.25, exact_match 1",
        "result: runs/x/adapter", "next:   unisono chat runs/x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("about", "line"),
    [
        (
            {"compared": "logits", "why": "", "differs_by": 3.7e-3, "tolerance": 2e-2, "seconds": 0.4},
            "read back in 0.4 s: logits differ from the trained model's by 3.7e-03 of their spread",
        ),
        (
            {"compared": "digests", "why": "there is no memory to load it again", "differs_by": None, "tolerance": 0, "seconds": 2.0},
            "read back in 2.0 s: names, shapes and digests only, as there is no memory to load it again",
        ),
    ],
)  # fmt: skip
def test_the_end_reports_how_the_written_files_compare(
    about: dict[str, Any], line: str, tmp_path: Path
) -> None:
    result = {"outcome": "completed", "exit_code": 0, "output_dir": str(tmp_path), "read_back": about}
    assert line in ending(result_of(**result), tmp_path)


def test_a_reward_model_is_measured_next_as_it_cannot_chat(tmp_path: Path) -> None:
    result = {"outcome": "completed", "exit_code": 0, "output_dir": str(tmp_path / "rm")}
    assert (
        ending(result_of(**result), tmp_path, plan=plan(objective="reward"))[-1]
        == "next:   unisono eval rm --data PAIRS"
    )


def test_the_next_command_can_be_typed_whatever_the_directory_is_called(tmp_path: Path) -> None:
    result = result_of(outcome="completed", exit_code=0, output_dir=str(tmp_path / "it's mine"))
    lines = ending(result, tmp_path)
    assert shlex.split(lines[-1])[1:] == ["unisono", "chat", "it's mine"]


def test_without_a_checkpoint_the_end_reports_it(tmp_path: Path) -> None:
    result = result_of(outcome="preempted", exit_code=75, output_dir="/x", checkpoint=None)
    lines = ending(result, tmp_path)
    assert lines[1:] == ["there is no checkpoint yet", "next:   the same command starts at step 1"]


def test_end_without_the_directory_does_not_claim_nothing_was_ever_saved(
    tmp_path: Path,
) -> None:
    result = {
        "outcome": "unfit",
        "exit_code": 6,
        "output_dir": "/x",
        "checkpoint": None,
        "verdict": {"cause": "output_removed"},
    }
    assert ending(result_of(**result), tmp_path)[1:] == ["checkpoint: none of this run is at /x"]


def test_on_a_terminal_one_line_is_redrawn_and_gone_at_the_end() -> None:
    script = (
        "from unisono.front.cli.terminal import LiveLine\n"
        "line = LiveLine()\n"
        "for n in range(1, 101): line.show(f'[bold]step {n}', share=n / 100)\n"
        "line.above('a line [red]that stays')\n"
        "line.close()\n"
    )
    text = in_terminal([sys.executable, "-c", script])
    assert "a line [red]that stays" in text  # foreign text is no markup
    assert "[bold]step 100" in text
    assert text.count("step ") < 10  # redrawn now and then, not at each call
    assert "\x1b[?25h" in text  # the cursor is given back


def in_terminal(command: list[str], *, width: int = 80) -> str:
    """What a command writes to a terminal of `width` columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
    } | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    found = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        found += chunk
    os.close(ours)
    assert process.wait() == 0
    return found.decode()


def test_json_lines_are_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    from unisono.front.cli.screen import JsonLines

    screen = JsonLines(Output(json=True))
    screen.show({"kind": "step", "step": 1, "loss": float("nan")})
    screen.show({"kind": "phase", "text": "not for programs"})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


def test_a_start_that_the_head_refused_does_not_speak_for_nodes_that_train() -> None:
    verdict = {
        "cause": "node_duplicate",
        "when": "before",
        "phase": "agree.call",
        "summary": "node 1 is here already",
    }
    assert ending(result_of(outcome="disagreed", verdict=verdict), Path("/")) == [
        "disagreed: nothing was started on this node"
    ]
    of_all = {**verdict, "cause": "nproc_mismatch", "phase": "agree.nodes"}
    assert ending(result_of(outcome="disagreed", verdict=of_all), Path("/")) == [
        "disagreed: nothing was trained, on any node"
    ]


def test_the_first_screen_shows_how_the_ranks_make_the_batch() -> None:
    (line,) = (
        line
        for line in first_screen(plan(batch={"per_rank": 4, "accumulate": 8}), {})
        if line.startswith("batch")
    )
    assert "32 packed sequences per step = 4 × 8 × 1 rank ·" in line


def test_the_first_screen_says_which_layers_compute_padding_and_how_much() -> None:
    facts = {"layout": "flat", "padded": "layers with a state: 3 × BambaMixer", "padding": 0.321}
    (line,) = [line for line in first_screen(plan(), facts) if line.startswith("trained")]
    assert line.endswith(" · flat rows · 32% padding in layers with a state: 3 × BambaMixer")
    (line,) = [line for line in first_screen(plan(), {"layout": "flat"}) if line.startswith("trained")]
    assert line.endswith(" · flat rows")


def test_the_first_screen_shows_that_compiled_functions_are_missing() -> None:
    words = "without compiled functions, slower: Triton is not installed (pip install triton)"
    facts = {"layout": "flat", "kernels": False, "no_kernels": "Triton is not installed (pip install triton)"}
    assert words in "\n".join(first_screen(plan(), facts))
    for kernels in (True, None):
        found = first_screen(plan(), {"layout": "flat", "kernels": kernels, "no_kernels": ""})
        assert "compiled functions" not in "\n".join(found)


def test_a_run_with_a_nan_loss_was_stopped_and_did_not_stall(tmp_path: Path) -> None:
    result = {
        "outcome": "stalled",
        "exit_code": 4,
        "step": 4,
        "output_dir": str(tmp_path),
        "wall_time_s": 6.0,
    }
    first, _ = ending(result_of(**result, verdict={"cause": "nan_loss", "when": "during"}), tmp_path)
    assert first == "stopped: NaN loss · step 4 · 6.0 s"
    first, _ = ending(result_of(**result, verdict={"cause": "rank_stopped", "when": "during"}), tmp_path)
    assert first == "stalled: step 4 · 6.0 s"


def test_what_is_due_at_the_end_only_is_shown_so() -> None:
    text = "\n".join(first_screen(plan(duration="100 steps", checkpoint={"every": "200 steps"}), {}))
    assert "checkpoint at the end" in text
    text = "\n".join(first_screen(plan(duration="100 steps", checkpoint={"every": "20 steps"}), {}))
    assert "checkpoint every 20\n" in text

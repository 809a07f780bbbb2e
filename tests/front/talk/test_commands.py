"""The commands as a person uses them, each a real process.

Run: pytest tests/front/talk/test_commands.py
"""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import front_server
from unisono.front.cli.generate import table

LIMIT_S = 120.0
pytestmark = pytest.mark.slow  # each process imports torch


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(*words: object, text: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "unisono", *map(str, words)]
    return front_server.run(command, input=text, timeout=LIMIT_S, env=environment())


def refused(*words: object, text: str = "") -> str:
    done = run(*words, text=text)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    assert "fix: " in done.stderr
    return done.stderr


@pytest.fixture
def talker(model_dir: Path, make_model: Callable[..., Any]) -> Path:
    """A model that can go on for 4,000 tokens, which takes it longer than a person needs to press
    Ctrl-C.
    """
    model = make_model()
    model.config.max_position_embeddings = 8192
    model.save_pretrained(model_dir)
    return model_dir


def test_generate_writes_the_answer_to_stdout_and_all_else_to_stderr(model_dir: Path) -> None:
    done = run("generate", model_dir, "--max-tokens", 12, text="what day is it\n")
    assert done.returncode == 0
    answered = run("generate", model_dir, "--max-tokens", 12, "--json", text="what day is it\n")
    assert done.stdout == json.loads(answered.stdout)["answer"] + "\n"
    assert "loading" in done.stderr
    assert "cut at 12 tokens" in done.stderr


def test_generate_answers_a_file_into_a_file(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("what day is it\n\ncall me\n")
    out = tmp_path / "answers.jsonl"
    words = (
        "generate",
        model_dir,
        "--file",
        tmp_path / "prompts.txt",
        "--out",
        out,
        "--max-tokens",
        5,
        "--json",
    )
    done = run(*words)
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["where"][-2:] for line in written] == [":1", ":3"]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"schema": 1, **line} for line in written
    ]
    assert "overwritten" in refused(*words)


def test_unwritable_file_of_answers_is_refused_before_the_model_is_loaded(
    model_dir: Path, rows_file: Path, tmp_path: Path
) -> None:
    for out in (tmp_path / "missing" / "answers.jsonl", rows_file / "answers.jsonl", tmp_path):
        for words in (("generate", model_dir, "hello"), ("eval", model_dir, "--data", rows_file)):
            said = refused(*words, "--out", out)
            assert str(out) in said
            assert "where: --out" in said
            assert "loading" not in said


def test_chat_talks_through_a_pipe(model_dir: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    text = f"what day is it\n/clear\n/nonsense\ncall me\n/save {saved}\n/help\n/exit\nnever heard\n"
    done = run("chat", model_dir, "--json", "--max-tokens", 6, text=text)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["tokens"] for answer in answers] == [6, 6]
    assert "no command /nonsense" in done.stderr
    assert "/save FILE" in done.stderr
    turns = json.loads(saved.read_text())["messages"]
    assert [turn["content"] for turn in turns] == ["call me", answers[1]["text"]]


@pytest.mark.parametrize("word", ["/quit", "exit", "QUIT", "/bye"])
def test_the_usual_words_end_a_conversation(model_dir: Path, word: str) -> None:
    done = run("chat", model_dir, "--json", "--max-tokens", 2, text=f"{word}\nnever heard\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no command" not in done.stderr


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talker: Path) -> None:
    command = [sys.executable, "-m", "unisono", "chat", str(talker), "--max-tokens", "4000"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True
    ) as front:  # fmt: skip
        assert front.stdin is not None
        assert front.stdout is not None
        front.stdin.write(b"what day is it\n")
        front.stdin.flush()
        assert front.stdout.read(1)  # it has begun to answer
        front.send_signal(signal.SIGINT)
        _, errors = front.communicate(b"/help\n", timeout=LIMIT_S)
    assert front.returncode == 0, errors.decode()
    assert "(ended)" in errors.decode()
    assert "/save FILE" in errors.decode()


def test_chat_on_a_terminal_prompts_answers_and_ends_with_ctrl_d(model_dir: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unisono", "chat", str(model_dir), "--max-tokens", "5"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment(), start_new_session=True
    ) as front:  # fmt: skip
        os.close(theirs)
        read_until(ours, b"> ")
        os.write(ours, b"what day is it\n")
        read_until(ours, b"> ")
        os.write(ours, b"\x04")
        assert front.wait(timeout=LIMIT_S) == 0
    os.close(ours)


def read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while not seen.endswith(wanted):
        seen += os.read(terminal, 1)


def test_eval_gives_one_object_and_writes_every_answer(
    model_dir: Path, rows_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    done = run("eval", model_dir, "--data", rows_file, "--limit", 3, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().splitlines()) == 3
    found: Any = json.loads(done.stdout)
    assert (found["schema"], found["rows"], found["questions"]) == (1, 3, 3)
    evaluated: Any = {**found, "figures": found}
    lines = table(evaluated, "rows.jsonl")
    for label in ("loss", "perplexity", "exact match", "ROUGE-L", "BLEU"):
        assert any(line.startswith(f"  {label} ") for line in lines)
    assert any(f"{found['loss']:.4f}" in line for line in lines)


def test_export_writes_what_transformers_loads(model_dir: Path, tmp_path: Path) -> None:
    done = run("export", model_dir, tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["what"] == "model"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_bad_input_is_exit_2_with_the_remedy(model_dir: Path, tmp_path: Path) -> None:
    assert "no model directory" in refused("chat", tmp_path / "nothing")
    assert "is not a run" in refused("export", model_dir, tmp_path / "out", "--step", 3)
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_ends_nothing_with_a_traceback(talker: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "unisono",
        "generate",
        str(talker),
        "what day is it",
        "--max-tokens",
        "300",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as front:
        assert front.stdout is not None
        assert front.stderr is not None
        front.stdout.read(1)
        front.stdout.close()
        errors = front.stderr.read().decode()
        assert front.wait(timeout=LIMIT_S) == 0, errors
    assert "Traceback" not in errors

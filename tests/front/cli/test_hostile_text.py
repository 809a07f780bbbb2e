"""No word of others commands the terminal: neither raw control characters nor marks that reorder
text reach stdout or stderr.

Run: pytest tests/front/cli/test_hostile_text.py
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front.board.made_runs import make_hostile
from tests.front.cli.test_screen import in_terminal
from unisono.front.cli.app import main
from unisono.front.cli.output import Output

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[31m\x9b32m\u202e\x7f\r\u2066"
STEERS = frozenset("\x1b\x07\x9b\u202e\u2066\x7f\r\x00\x08")
FILES = {
    "config.yaml": "model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: out\n",
    "evil.yaml": '"\\e]52;c;ZXZpbA==\\a\\u202E": 1\nmodel: "\\e[31m"\noptim: {lr: "\\e[31m\\x9b"}\n',
    "evil_lf.yaml": (
        'stage: sft\nmodel_name_or_path: "\\e]52;c;ZXZpbA==\\a"\ndataset: "\\e[31m"\n"\\e[32mx":'
        ' 1\noutput_dir: "\\e[31m"\n'
    ),
    "evil.toml": (
        'pretrained_model_name_or_path = "\\u001b]52;c;ZXZpbA==\\u0007"\n"\\u001b[31mx" ='
        ' 1\ntrain_data_dir="\\u001b[31m"\n'
    ),
}
COMMANDS = [
    "EVIL", "explain EVIL", "explain --symptom EVIL", "--lang EVIL runs", "train EVIL.yaml", "train config.yaml EVIL=1", "train config.yaml optim.lr=EVIL",
    "train evil.yaml --dry-run", "train evil_lf.yaml --dry-run", "train evil.toml --dry-run", "train config.yaml --EVIL", "train config.yaml --nproc EVIL",
    "init EVIL", "init --from-llamafactory evil_lf.yaml", "completion EVIL", "completion --words unisono EVIL", "drill EVIL", "serve EVIL", "serve run --host EVIL",
    "serve run --key-file EVIL", "board EVIL", "export EVIL out", "download EVIL", "download a/m --revision EVIL", "push run EVIL", "diagnose EVIL",
    "logs run", "checkpoint ls run", "checkpoint verify run", "checkpoint prune run", "diagnose run", "diagnose run --timeline --all", "runs", "runs .", "runs EVIL",
    "logs EVIL", "checkpoint ls EVIL", "doctor --config EVIL", "run --nodes EVIL -- true",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with hostile files and a hostile run."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    make_hostile(tmp_path / "run")
    return tmp_path


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    with pytest.raises(SystemExit):
        main(words)
    captured = capsys.readouterr()
    assert "bug in unisono" not in captured.err
    return captured.out, captured.err


@pytest.mark.processes  # nvidia-smi is asked where nvidia-ml-py is not installed
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("EVIL", EVIL) for word in command.split()]
    out, err = printed(words, capsys)
    assert out + err
    assert not STEERS & set(out + err)
    out, err = printed([*words, "--json"], capsys)
    assert not STEERS & set(out + err)
    for line in out.splitlines():
        json.loads(line)


ODD = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\x1b\x07\x7f\x9b\u202e\u2066\u200b\u2028\ufeff\udc80"))  # fmt: skip
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ODD,
    lambda inner: st.lists(inner) | st.dictionaries(ODD, inner),
    max_leaves=10,
)


@given(VALUES)
def test_json_is_escaped_and_has_the_same_value(value: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        Output(json=True).emit(value)
    text = out.getvalue()
    assert not STEERS & set(text)
    text.encode()
    assert json.loads(text) == value


@given(ODD)
def test_newlines_and_tabs_of_a_text_stay_and_what_steers_goes(text: str) -> None:
    for write in (Output().result, Output().quote, Output().verbatim):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            write(text)
        assert not STEERS & set(out.getvalue())
        assert out.getvalue().count("\n") == text.count("\n") + 1
        assert out.getvalue().count("\t") == text.count("\t")


def test_only_our_own_colours_pass(capsys: pytest.CaptureFixture[str]) -> None:
    Output().drawing("\x1b[31m#\x1b[0m")
    assert capsys.readouterr().out == "\x1b[31m#\x1b[0m\n"
    Output().verbatim("\x1b[31m#\x1b[0m")
    assert capsys.readouterr().out == "#\n"


_LIBRARY = """
import logging, sys, warnings
from unisono.front.cli.output import open_streams
open_streams()
logging.warning("a server says %s", EVIL)
warnings.warn(EVIL)
print(EVIL, file=sys.stderr)
print(EVIL)
sys.stdout.writelines([EVIL])
raise ValueError(EVIL)
"""


def test_what_libraries_print_in_the_front_is_made_plain_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"EVIL = {EVIL!r}\n{_LIBRARY}"], capture_output=True, text=True, check=False
    )
    assert not STEERS & set(done.stdout + done.stderr)
    assert "a server says" in done.stderr


_ANSWER = """
from unisono.front.cli.generate import AnswerWriter
from unisono.front.cli.output import Output, open_streams
open_streams()
answer = AnswerWriter()
for piece in TEXT:
    answer.write(piece)
answer.end()
Output().answer(TEXT)
"""


def test_answer_is_unchanged_in_a_pipe_and_escaped_on_a_terminal() -> None:
    text = f"a{EVIL}\tb\n\u200b\x00 👩\u200d👧 می\u200cخواهم c"
    command = [sys.executable, "-c", f"TEXT = {text!r}\n{_ANSWER}"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode() == f"{text}\n" * 2
    shown = in_terminal(command, width=200)
    first, second = r"a\x1b]52;c;ZXZpbA==\x07\x1b[31m\x9b32m\u202e\x7f\r\u2066", r"\u200b\x00"
    lines = [first, "b", f"{second} 👩\u200d👧 می\u200cخواهم c"] * 2
    assert [part.strip(" ") for part in re.split(r"\r\n|\t| {4,}", shown)] == [*lines, ""]


_LINE = """
import sys
from unisono.front.cli.output import Output, open_streams
from unisono.front.cli.terminal import LiveLine
open_streams()
line = LiveLine()
line.show("loading " + EVIL, share=0.5)
line.above("warning: " + EVIL)
Output().warn("said " + EVIL)
line.close()
"""


def test_a_live_line_has_our_colours_and_none_of_others() -> None:
    text = in_terminal([sys.executable, "-c", f"EVIL = {EVIL!r}\n{_LINE}"])
    assert "\x1b[?25l" in text  # the cursor is hidden while the line is drawn
    assert "\x1b[33mwarning:" in text
    assert "52;c" not in text
    assert "\x1b[31m" not in text
    assert not set("\x07\x9b\u202e\u2066\x7f") & set(text)

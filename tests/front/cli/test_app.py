"""The command line's edges: flags, refusals, defects, readers that leave.

Run: pytest tests/front/cli/test_app.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono import __version__
from unisono.front.cli.app import command_names, main
from unisono.front.cli.output import GLOBAL_FLAGS, Output, split_globals

UNISONO = [sys.executable, "-m", "unisono"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [*UNISONO, *arguments], capture_output=True, text=True, cwd=cwd, check=False, env=environment
    )


@pytest.mark.parametrize(
    "arguments", [("--version",), ("train", "--version"), ("explain", "nan_loss", "--version")]
)
def test_every_command_reports_the_version(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (0, f"unisono {__version__}\n")


@pytest.mark.parametrize("arguments", [("--json", "explain", "nan_loss"), ("explain", "nan_loss", "--json")])
def test_flags_that_all_commands_take_may_stand_anywhere(arguments: tuple[str, ...]) -> None:
    assert json.loads(run(*arguments).stdout)["id"] == "nan_loss"


def test_what_follows_two_dashes_is_not_a_flag_of_ours() -> None:
    assert split_globals(["run", "--json", "--", "x", "--json"]) == (
        ["run", "--", "x", "--json"],
        {"--json"},
        None,
    )


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("train",), ("train", "--nonsense", "x.yaml"), ("train", "x.yaml", "--restarts", "many")],
)
def test_a_slip_on_the_command_line_is_exit_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_refusal_reports_what_where_and_fix_without_a_traceback(tmp_path: Path) -> None:
    done = run("train", "no.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no file no.yaml")
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback_of_a_refusal(tmp_path: Path) -> None:
    assert "Traceback" in run("train", "no.yaml", "--debug", cwd=tmp_path).stderr


def test_with_json_the_last_line_of_a_refused_training_is_its_result(tmp_path: Path) -> None:
    done = run("train", "no.yaml", "--json", cwd=tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kind"], result["outcome"], result["exit_code"]) == ("result", "refused", 2)
    assert done.returncode == 2
    assert "no.yaml" in result["problems"][0]["what"]


def test_with_json_a_different_commands_refusal_is_one_object() -> None:
    done = run("explain", "nan_los", "--json")
    assert json.loads(done.stdout)["kind"] == "refused"


def test_a_defect_of_ours_shows_its_traceback_and_asks_for_a_report() -> None:
    script = (
        "def broken(run, on_skip):\n    raise ZeroDivisionError('ours')\n"
        "from unisono.guard.rundir import merged_logs\nmerged_logs.merged_logs = broken\n"
        "from unisono.front.cli.app import main\nmain(['logs', '.'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "report" in done.stderr


def test_a_reader_that_leaves_is_not_an_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m unisono explain | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


def test_json_has_no_word_for_what_is_not_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).emit({"loss": float("nan"), "inner": [float("inf"), 1.5]})
    assert capsys.readouterr().out == '{"loss": null, "inner": [null, 1.5]}\n'


SLIPS = [
    ("train --nprocs 2", "--nprocs is not an option of `unisono train`", "did you mean --nproc?"),
    (
        "train x.yaml --optim.lr=1",
        "--optim.lr is not an option of",
        "a config key has no dashes: optim.lr=VALUE",
    ),
    ("train", "`unisono train` needs config, which is missing", "`unisono train train.yaml optim.lr=1e-4`"),
    ("trian x.yaml", "`trian` is not a command of `unisono`", "did you mean `unisono train`?"),
    ("preview x.yaml", "`preview` is not a command of `unisono`", "did you mean `unisono data preview`?"),
    ("merge a b", "`merge` is not a command of `unisono`", "did you mean `unisono export RUN OUT --merge`?"),
    ("data .", "`.` is not a command of `unisono data`", "did you mean `unisono data preview .`?"),
    ("checkpoint .", "`.` is not a command of", "did you mean `unisono checkpoint ls .`?"),
    ("frobnicate", "`frobnicate` is not a command of `unisono`", "`unisono --help` describes the commands"),
    (
        "checkpoint lss",
        "`lss` is not a command of `unisono checkpoint`",
        "did you mean `unisono checkpoint ls`?",
    ),
    ("train x.yaml --nproc x", "--nproc x is not valid", "give --nproc a whole number from 1 to 1024"),
    ("train x.yaml --nproc=0", "--nproc 0 is not valid", "give --nproc a whole number from 1 to 1024"),
    ("train x.yaml --join-timeout q", "--join-timeout q is not valid", "a number, at least 1"),
    ("train x.yaml --devices", "--devices", "`unisono train --help`"),
    ("explain a b", "(b)", "`unisono explain --help`"),
    (
        "train x.yaml --rdzv_backend c10d",
        "--rdzv-backend is not an option",
        "torchrun that unisono does not need: omit it",
    ),
    ("train x.yaml --max_restarts 3", "--max-restarts is not an option", "--restarts N"),
]


@pytest.mark.parametrize(("line", "what", "fix"), SLIPS)
def test_what_the_parser_refuses_has_four_parts_and_the_nearest_name(
    line: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [text.split()[0] for text in lines] == ["error:", "where:", "why:", "fix:"], shown.err
    assert what in lines[0]
    assert fix in lines[3]


@pytest.mark.parametrize(("line", "what", "fix"), SLIPS)
def test_what_the_parser_refuses_is_json_on_request(
    line: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json", *line.split()])
    assert ended.value.code == 2
    refused = json.loads(capsys.readouterr().out)
    assert refused["kind"] == ("result" if line.startswith(("train", "run")) else "refused")
    (problem,) = refused["problems"]
    assert what in problem["what"]
    assert fix in problem["fix"]
    assert problem["where"].startswith("command line: `unisono")
    assert problem["why"]


@pytest.mark.parametrize("words", command_names(), ids=" ".join)
def test_every_help_lists_the_flags_of_all_commands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.partition("Options of every command:")[2]
    assert all(f"  {flag} " in listed for flag in GLOBAL_FLAGS), listed


def test_the_first_checkpoint_can_be_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.jobs.launchers import launchers

    requests: list[Any] = []

    def plan_only(request: Any, _show: Any) -> None:
        requests.append(request)
        raise ZeroDivisionError

    monkeypatch.setattr(launchers, "plan_only", plan_only)
    for options in ([], ["--no-first-checkpoint"]):
        with pytest.raises(SystemExit):
            main(["train", str(tmp_path / "no.yaml"), "--dry-run", *options])
    assert [request.rehearse for request in requests] == [True, False]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("train x.yaml --nnodes 1:4", "--nnodes 1:4 is elastic"),
        ("train x.yaml --nproc_per_node=2 --nproc 3", "--nproc 3 and --nproc-per-node 2 contradict"),
        ("run --nnodes 2 --nodes 3 -- python x.py", "--nodes 3 and --nnodes 2 contradict"),
        ("doctor --nnodes 2 --nodes 3", "--nodes 3 and --nnodes 2 contradict"),
    ],
)
def test_options_of_torchrun_that_cannot_be_followed_are_exit_2(
    line: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert what in capsys.readouterr().err

"""`unisono runs`: runs in every state, damaged ones, and many.

Run: pytest tests/front/board/test_list.py
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.front.board.made_runs import HOSTILE, SECRET, VERDICT, append, make_run, write
from unisono.front.cli.app import main

ROW = {"name", "path", "state", "step", "total_steps", "loss", "eval_loss", "exit_code", "age_s", "verdict", "problems"}  # fmt: skip


def listed(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The rows of `unisono runs --json`, by name."""
    with pytest.raises(SystemExit) as ended:
        main(["runs", "--json", *map(str, words)])
    assert ended.value.code == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == 1
    assert all(row.keys() == ROW for row in body["runs"])
    return {row["name"]: row for row in body["runs"]}


def test_each_run_has_its_state_step_loss_age_and_newest_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = make_run(tmp_path / "done", steps=40, total=100, exit_code=0)
    make_run(tmp_path / "dead", steps=7, total=50, outcome=None)
    stalled = make_run(tmp_path / "stalled", outcome="stalled", exit_code=4)
    write(stalled / "verdict.json", VERDICT)
    again = make_run(tmp_path / "again")
    (again / "verdict.json").unlink(missing_ok=True)
    write(again / "verdicts" / "0001.json", VERDICT)
    (tmp_path / "no-run").mkdir()
    old = time.time() - 3 * 86_400
    for path in (done / "metrics.jsonl", done / "result.json", done / "plan.json"):
        os.utime(path, (old, old))
    rows = listed(tmp_path, capsys=capsys)
    assert set(rows) == {"done", "dead", "stalled", "again"}
    assert list(rows)[-1] == "done"  # the last written first
    assert {name: row["state"] for name, row in rows.items()} == {"done": "completed", "dead": "dead", "stalled": "stalled", "again": "completed"}  # fmt: skip
    assert (rows["dead"]["step"], rows["dead"]["total_steps"]) == (7, 50)
    lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert rows["done"]["loss"] == [line["loss"] for line in lines if "loss" in line][-1]
    assert rows["done"]["age_s"] == pytest.approx(3 * 86_400, abs=300)
    assert rows["dead"]["age_s"] < 300
    of_last = {name: row["verdict"]["of_last_start"] for name, row in rows.items() if row["verdict"]}
    assert of_last["stalled"] is True
    assert of_last["again"] is False
    assert rows["stalled"]["verdict"]["cause"] == VERDICT["cause"]
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["RUN", "STATE", "STEP", "LOSS", "AGE", "VERDICT"]
    text = "\n".join(shown)
    assert "7/50" in text
    assert "3 days" in text
    assert f"earlier: {VERDICT['cause']}: {VERDICT['summary']}" in text


def test_a_run_that_cannot_be_read_has_a_row_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "good")
    torn = make_run(tmp_path / "torn", outcome=None)
    (torn / "plan.json").write_text('{"schema": 1, "total_')
    outside = make_run(tmp_path / "outside", outcome=None)
    (outside / "plan.json").unlink()
    (outside / "plan.json").symlink_to("/etc/passwd")
    folder = make_run(tmp_path / "folder", outcome=None)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    hostile = make_run(tmp_path / "hostile", outcome="stalled")
    write(hostile / "verdict.json", VERDICT | {"summary": f"{HOSTILE[4]} token {SECRET}"})
    rows = listed(tmp_path, capsys=capsys)
    assert {name for name, row in rows.items() if row["state"] == "unreadable"} >= {"torn", "outside"}
    assert rows["torn"]["problems"][0].startswith("plan.json")
    assert "root:" not in json.dumps(rows)
    assert rows["folder"]["problems"] or rows["folder"]["step"] in (None, 0)
    assert rows["good"]["problems"] == []
    assert SECRET not in json.dumps(rows)
    assert "\x1b" not in json.dumps(rows, ensure_ascii=False)
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path)])
    assert "cannot be read: plan.json" in capsys.readouterr().out


def test_a_directory_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SystemExit) as ended:
            main(["runs", str(path)])
        assert ended.value.code == 2
        assert "is not a run" in capsys.readouterr().err


def test_the_loss_of_a_long_run_is_that_of_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "long", steps=2000, total=5000)
    assert (run / "metrics.jsonl").stat().st_size > 4 * (64 << 10)
    append(run, {"step": 2001, "loss": 0.125})
    append(run, {"step": 2002, "loss": 9.5}, end="")  # still being written
    row = listed(tmp_path, capsys=capsys)["long"]
    assert (row["step"], row["loss"]) == (2001, 0.125)


def test_two_hundred_runs_are_listed_in_seconds(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run-000", steps=400, ranks=1)
    for number in range(1, 200):
        shutil.copytree(first, tmp_path / f"run-{number:03d}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "runs", tmp_path], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert len(done.stdout.splitlines()) == 201
    assert used < 10, f"{used:.1f} s of CPU"  # 1.7 s were seen


def test_a_run_that_a_nan_loss_ended_is_not_called_stalled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = VERDICT | {"cause": "nan_loss", "summary": "NaN loss in 3 steps"}
    for name, verdict in (("nan", nan), ("hung", VERDICT)):
        run = make_run(tmp_path / name, outcome="stalled", verdict=verdict)
        write(run / "verdict.json", verdict)
    assert {row["state"] for row in listed(tmp_path, capsys=capsys).values()} == {
        "stalled"
    }  # as in result.json
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path)])
    states = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "  stopped: NaN loss  " in states["nan"]
    assert "  stalled  " in states["hung"]


@pytest.mark.parametrize("command", ["runs", "board"])
def test_without_an_argument_it_is_the_usual_directory(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, *(["--out", "b.html"] if command == "board" else [])]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "runs is not a run" in capsys.readouterr().err
    make_run(tmp_path / "runs" / "first")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert ended.value.code == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["first"]


def test_a_misspelled_run_is_answered_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "my-run")
    for words, near in (
        (["board", "runs/my-rum"], "runs/my-run"), (["runs", "runz"], "runs"), (["logs", "runs/myrun"], "runs/my-run"),
        (["diagnose", "runs/my-rum"], "runs/my-run"), (["checkpoint", "ls", "runs/my-rum"], "runs/my-run"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert f"did you mean {near}?" in capsys.readouterr().err

"""What each region shows of runs in every state.

Run: .venv/bin/python -m pytest tests/front/board/test_regions.py
"""

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front.board.made_runs import (
    HOSTILE,
    SECRET,
    append,
    make_hostile,
    make_run,
    plan_of,
    write,
)
from unisono.front.board.curves import Curves, thin
from unisono.front.board.follow import FollowedRun, find_runs
from unisono.front.board.page import STATIC, runs_file, words
from unisono.front.board.regions import REGIONS, show_region
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import STOPPED_WITHOUT_A_STALL
from unisono.jobs.runs.start_decision import set_aside

FLOATS = st.floats(allow_nan=True, allow_infinity=False, width=32)


def followed(root: Path) -> FollowedRun:
    """A run that was looked at once."""
    run = FollowedRun("run", root)
    run.look()
    return run


def shown(run: FollowedRun, region: str, **query: str) -> dict[str, Any]:
    """A region, which must be JSON."""
    body: dict[str, Any] = json.loads(json.dumps(show_region(run, region, query), allow_nan=False))
    assert body["schema"] == 1
    return body


def state_of(root: Path) -> str:
    return str(shown(followed(root), "status")["state"])


@given(values=st.lists(FLOATS, max_size=400), most=st.integers(10, 60))
def test_thinning_keeps_first_last_smallest_largest_and_nan(values: list[float], most: int) -> None:
    chosen = list(thin(values, most))
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= max(most, 5)
    kept = [values[index] for index in chosen]
    if values:
        assert (chosen[0], chosen[-1]) == (0, len(values) - 1)
    finite = [value for value in values if not math.isnan(value)]
    if finite:
        of_kept = [value for value in kept if not math.isnan(value)]
        assert (min(of_kept), max(of_kept)) == (min(finite), max(finite))
    assert any(map(math.isnan, kept)) == any(map(math.isnan, values))


def test_curves_in_memory_stay_bounded_and_keep_the_extremes() -> None:
    curves = Curves()
    for step in range(1, 120_001):
        curves.add({"step": step, "loss": -5.0 if step == 7_777 else 1.0 if step != 50_000 else None})
    series = curves.series["loss"]
    assert len(series.values) <= 20_000
    points = series.points(2_000)
    assert min(value for value in points["values"] if value is not None) == -5.0
    assert None in points["values"]
    assert (points["steps"][0], points["steps"][-1]) == (1, 120_000)


def test_every_region_of_a_finished_run_is_shown(tmp_path: Path) -> None:
    run = followed(make_run(tmp_path / "run"))
    found = {region: shown(run, region) for region in REGIONS}
    assert [body["problems"] for body in found.values()] == [[]] * len(REGIONS)
    assert (found["status"]["state"], found["status"]["step"], found["status"]["total_steps"]) == (
        "completed",
        40,
        100,
    )
    assert set(found["curves"]["series"]) >= {
        "loss",
        "eval_loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "memory_bytes",
        "time_s",
    }
    assert found["curves"]["series"]["eval_loss"] == {
        "steps": [10, 20, 30, 40],
        "values": [0.2, 0.1, 2 / 30, 0.05],
    }
    ranks = found["ranks"]["ranks"]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert ranks[0]["seconds"]["comm"] == 7.8
    assert found["data"]["sources"][0]["dropped"] == {"longer than 256 tokens": 8}
    assert [one["step"] for one in found["samples"]["evaluations"]] == [40, 30, 20, 10]
    assert {"key": "optim.lr", "value": 0.0002, "origin": "train.yaml:9"} in found["config"]["keys"]
    assert any(
        line["text"] == "RuntimeError: CUDA out of memory" and line["marked"]
        for line in found["log"]["lines"]
    )
    assert len(shown(run, "log", q="OUT OF MEMORY", rank="1")["lines"]) == 1


def test_verdict_has_the_words_of_the_terminal_and_the_text_of_explain(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", outcome="stalled")
    region = shown(followed(root), "verdict")
    assert region["verdict"]["lines"][0][0] == "WHAT"
    assert region["verdict"]["lines"][0][1].endswith("for 3 s  [rank_stopped]")
    assert region["verdict"]["explain"]["id"] == "rank_stopped"
    assert [row["culprit"] for row in shown(followed(root), "ranks")["ranks"]] == [False, True]


def test_a_run_is_running_while_its_lock_is_held_and_dead_afterwards(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", outcome=None)
    assert state_of(root) == "dead"
    lock = RunLock(root / "run.lock")
    lock.acquire(os.uname().nodename, os.getpid())
    run = followed(root)
    status = shown(run, "status")
    assert (status["state"], status["holder"]["pid"]) == ("running", os.getpid())
    assert status["seconds_left"] == pytest.approx(60 * 0.31, rel=0.1)
    lock.release()
    assert "status" in run.look()
    assert shown(run, "status")["state"] == "dead"


def test_looking_never_takes_the_lock(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", outcome=None)
    write(
        root / "run.lock",
        {
            "schema": 1,
            "host": os.uname().nodename,
            "pid": 1 << 22,
            "nonce": "n",
            "since": "2026-01-01T00:00:00+00:00",
        },
    )
    before = (root / "run.lock").stat()
    run = followed(root)
    assert shown(run, "status")["state"] == "dead"
    assert (root / "run.lock").stat().st_mtime_ns == before.st_mtime_ns


def test_a_directory_with_only_a_lock_is_a_run_that_has_not_trained(tmp_path: Path) -> None:
    write(tmp_path / "run" / "plan.json", plan_of(10, 1, 1e-4))
    run = followed(tmp_path / "run")
    assert shown(run, "curves")["series"] == {}
    for region in REGIONS:
        assert shown(run, region)["problems"] == []


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=3)
    run = followed(root)
    line = json.dumps({"step": 4, "loss": 0.25})
    with (root / "metrics.jsonl").open("a") as file:
        file.write(line[:9])
        file.flush()
        assert "curves" not in run.look()
        file.write(line[9:] + "\n")
    assert run.look() >= {"curves", "status"}
    new = shown(run, "curves", since=str(run.curves.lines - 1), generation=str(run.curves.generation))
    assert (new["appended"], new["series"]) == (True, {"loss": {"steps": [4], "values": [0.25]}})


def test_steps_that_a_resume_cuts_vanish(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=40)
    run = followed(root)
    generation = run.curves.generation
    lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)[:20]
    (root / "new").write_text("".join(lines))
    (root / "new").rename(root / "metrics.jsonl")
    append(root, {"step": 20, "loss": 7.0})
    assert "curves" in run.look()
    assert run.curves.generation > generation
    assert shown(run, "curves", since="44", generation=str(generation))["series"]["loss"]["steps"][-2:] == [
        19,
        20,
    ]


def test_after_fresh_the_run_is_said_to_be_moved(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=40)
    run = followed(root)
    moved = set_aside(RunDir(root))
    run.look()  # while there is nothing
    make_run(root, steps=2, outcome=None)
    assert "status" in run.look()
    status = shown(run, "status")
    assert (status["moved_to"], status["step"]) == (str(moved), 2)


def test_nan_is_a_mark_and_never_zero(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=2)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": null}\n{"step": 4, "loss": NaN}\n{"step": 5, "loss": 1e999}\n')
    assert shown(followed(root), "curves")["series"]["loss"]["values"][2:] == [None, None, None]


def test_an_unknown_schema_is_said_and_unknown_keys_are_kept(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", colour="blue")
    assert shown(followed(root), "status")["more"] == {"colour": "blue"}
    result = json.loads((root / "result.json").read_text())
    write(root / "result.json", {**result, "schema": 2})
    status = shown(followed(root), "status")
    assert status["problems"] == ["result.json: its schema is 2, and this version of unisono knows 1"]
    assert status["state"] == "completed"


@pytest.mark.parametrize(
    ("name", "region"),
    [("data.json", "data"), ("verdict.json", "verdict"), ("plan.json", "config"), ("result.json", "status")],
)
def test_an_unreadable_file_is_said_by_its_region_and_the_rest_is_shown(
    tmp_path: Path, name: str, region: str
) -> None:
    root = make_run(tmp_path / "run")
    write(root / name, None, text="{broken")
    run = followed(root)
    assert name in shown(run, region)["problems"][0]
    assert shown(run, "curves")["series"]["loss"]["values"]


def test_a_file_that_is_a_pipe_or_a_list_disturbs_nothing(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "data.json").unlink()
    os.mkfifo(root / "data.json")
    write(root / "verdict.json", [1])
    (root / "metrics.jsonl").unlink()
    os.mkfifo(root / "metrics.jsonl")
    run = followed(root)
    for region in ("data", "verdict", "curves"):
        assert shown(run, region)["problems"], region


def test_links_that_leave_the_run_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.log").write_text("the secret of another\n")
    shutil.copy(make_run(tmp_path / "other", steps=5) / "metrics.jsonl", outside / "metrics.jsonl")
    root = make_run(tmp_path / "run", outcome="stalled")
    for inner, target in (
        ("logs/x-rank-00007.log", "secret.log"),
        ("metrics.jsonl", "metrics.jsonl"),
        ("verdict.json", "secret.log"),
    ):
        (root / inner).unlink(missing_ok=True)
        (root / inner).symlink_to(outside / target)
    run = followed(root)
    everything = json.dumps([shown(run, region) for region in REGIONS])
    assert "the secret of another" not in everything
    assert shown(run, "curves")["series"] == {}
    assert "leads out" in shown(run, "curves")["problems"][0]
    assert shown(run, "log", q="secret")["lines"] == []


def test_hostile_text_is_text_and_secrets_are_masked(tmp_path: Path) -> None:
    run = followed(make_hostile(tmp_path / "run"))
    text = json.dumps([shown(run, region) for region in REGIONS], ensure_ascii=False)
    assert SECRET not in text
    assert "geheim" not in text
    for sign in ("\x1b", "\u202e", "\u2028"):
        assert sign not in text
    assert max(len(line["text"]) for line in shown(run, "log")["lines"]) < 5_000
    _, page = runs_file([run.root], key=b"")
    for bad in (HOSTILE[0], HOSTILE[2], "<!--"):
        assert bad not in page
    assert SECRET not in page


def test_runs_of_llamafactory_and_trl_show_curves_and_status(tmp_path: Path) -> None:
    factory, trl = tmp_path / "factory", tmp_path / "trl"
    write(
        factory / "trainer_log.jsonl",
        None,
        text=(
            '{"current_steps": 5, "total_steps": 50, "loss": 1.5, "lr": 1e-4}\n{"current_steps": 10,'
            ' "total_steps": 50, "eval_loss": 1.25}\n'
        ),
    )
    write(trl / "checkpoint-9" / "trainer_state.json", {"max_steps": 9})
    write(
        trl / "checkpoint-10" / "trainer_state.json",
        {
            "max_steps": 30,
            "log_history": [{"step": 10, "loss": 2.0, "learning_rate": 0.1, "rewards/margins": 0.5}],
        },
    )
    assert [name for name, _ in find_runs([tmp_path])] == ["factory", "trl"]
    one, other = followed(factory), followed(trl)
    assert shown(one, "curves")["series"]["eval_loss"] == {"steps": [10], "values": [1.25]}
    assert shown(other, "curves")["series"]["rewards/margins"] == {"steps": [10], "values": [0.5]}
    for run, total in ((one, 50), (other, 30)):
        status = shown(run, "status")
        assert (status["state"], status["step"], status["total_steps"]) == ("unknown", 10, total)
    append_to = factory / "trainer_log.jsonl"
    append_to.write_text(append_to.read_text() + '{"current_steps": 15, "loss": 1.0}\n')
    assert "curves" in one.look()


def test_names_of_runs_are_unique(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / parent / "demo", steps=1) for parent in ("a", "b")]
    assert [name for name, _ in find_runs(paths)] == ["demo", "b-demo"]


def test_a_timeline_that_was_thinned_is_not_counted_twice(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    run = followed(root)
    before = shown(run, "ranks")
    path = root / "events" / "timeline-00000.jsonl"
    (root / "t").write_bytes(path.read_bytes())
    (root / "t").rename(path)
    run.look()
    assert shown(run, "ranks")["ranks"][0]["seconds"] == before["ranks"][0]["seconds"]


def test_bundled_curve_library_is_the_published_one_with_its_licence() -> None:
    for line in (STATIC / "uPlot.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest, name
    assert "Permission is hereby granted" in (STATIC / "uPlot.LICENSE.txt").read_text()
    assert {path.suffix for path in STATIC.iterdir()} == {".js", ".css", ".json", ".txt", ".sha256"}


def test_both_languages_have_the_same_words() -> None:
    english, chinese = words()["en"], words()["zh"]
    assert set(english) == set(chinese)
    for name, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[name])), name
    assert {f"stopped_{cause}" for cause in STOPPED_WITHOUT_A_STALL} <= set(english)
    script = (STATIC / "board.js").read_text()
    for name in re.findall(r'\bt\("(\w+)"', script):
        assert name in english, name


def luminance(colour: str) -> float:
    """Of `#rrggbb`, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_lines_of_runs_contrast_with_the_background_and_differ_by_dashes() -> None:
    script, sheet = (STATIC / "board.js").read_text(), (STATIC / "board.css").read_text()
    cards = re.findall(r"--card: (#\w{6})", sheet)[:2]
    palettes = [re.findall(r"#\w{6}", part) for part in re.findall(r"(?:light|dark): \[([^\]]+)\]", script)]
    for card, palette in zip(cards, palettes, strict=True):
        assert len(set(palette)) == 8
        for colour in palette:
            high, low = sorted((luminance(card), luminance(colour)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3, (card, colour)
    dashes = json.loads(re.findall(r"DASHES = (\[.+\]);", script)[0])
    looks = {(at % 8, at % len(dashes)) for at in range(20)}
    assert len(looks) == 20, "every one of 20 runs has another colour or dash"
    assert len({str(dash) for dash in dashes}) == len(dashes), "the first runs differ by dash alone"


def test_what_is_counted_of_an_image_model_is_not_called_tokens(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    assert shown(followed(root), "status")["unit"] == "tokens"
    plan = json.loads((root / "plan.json").read_text())
    write(root / "plan.json", {**plan, "config": {**plan["config"], "objective": "diffusion"}})
    assert shown(followed(root), "status")["unit"] == "positions"
    for language in ("en", "zh"):
        assert {"positions", "positions_per_second", "tokens"} <= words()[language].keys()

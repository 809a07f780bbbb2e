"""`unisono checkpoint ls | verify | prune`, as a person types it. Run: pytest tests/checkpoint/test_command.py"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.checkpoint.signing import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.rundir import RunDir
from unisono.rundir.lock import RunLock

Save = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path, save: Save) -> RunDir:
    """A run with three checkpoints, signed with the key of the user that the commands run as."""
    run = RunDir(tmp_path / "run")
    store = CheckpointStore(run.checkpoints, key=user_key(tmp_path / "settings" / "unisono"))
    for step in (10, 20, 30):
        save(step, by=store)
    run.plan.write_text(json.dumps({"config": {"checkpoint": {"keep": 2, "best": "eval_loss"}}}))
    losses = {10: 0.5, 20: 0.9, 30: 0.8}
    run.metrics.write_text(
        "".join(json.dumps({"step": n, "eval_loss": loss}) + "\n" for n, loss in losses.items())
    )
    return run


def _unisono(run: RunDir, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(run.root.parent / "settings")}
    command = [sys.executable, "-m", "unisono", "checkpoint", arguments[0], str(run.root), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _json(run: RunDir, *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(_unisono(run, *arguments, "--json").stdout)
    return value


def test_listing_gives_the_fields_of_the_contract(run: RunDir) -> None:
    rows = _json(run, "ls")["checkpoints"]
    assert [row["step"] for row in rows] == [10, 20, 30]
    row = rows[-1]
    assert {"step", "path", "bytes", "created", "verified_at", "intact", "holder"} <= set(row)
    assert row["path"] == str(run.checkpoint(30))
    assert row["bytes"] == sum(file.stat().st_size for file in run.checkpoint(30).iterdir())
    assert (row["intact"], row["holder"], row["verified_at"]) == (True, "host-a", row["created"])


def test_a_listing_for_people_has_a_line_for_each(run: RunDir) -> None:
    done = _unisono(run, "ls")
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:2] == ["STEP", "SIZE"]
    assert "intact" in lines[1]


def test_verifying_intact_ones_ends_with_0_and_is_remembered(run: RunDir) -> None:
    done = _unisono(run, "verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step-000000{n}  intact" for n in (10, 20, 30)]
    row = _json(run, "ls")["checkpoints"][0]
    assert row["verified_at"] > row["created"]


def test_verifying_damage_ends_with_7_and_names_file_and_place(run: RunDir) -> None:
    file = run.checkpoint(20) / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    done = _unisono(run, "verify")
    assert done.returncode == 7
    assert "step-00000020/weights.safetensors: its content has changed" in done.stderr
    assert str(run.checkpoint(20)) in done.stderr
    assert "the run goes on from it" in done.stderr
    assert "Traceback" not in done.stderr
    assert [row["intact"] for row in _json(run, "ls")["checkpoints"]] == [True, False, True]
    done = _unisono(run, "verify", "--json")
    assert done.returncode == 7
    rows = json.loads(done.stdout)["checkpoints"]
    assert rows[1]["findings"][0]["file"] == "weights.safetensors"
    assert _unisono(run, "verify", "--step", "30").returncode == 0


def test_listing_sees_missing_and_short_files_at_once(run: RunDir) -> None:
    (run.checkpoint(10) / "state.json").unlink()
    (run.checkpoint(20) / "state.json").write_text("")
    assert [row["intact"] for row in _json(run, "ls")["checkpoints"]] == [False, False, True]


def test_pruning_goes_by_the_config_and_keeps_the_best(run: RunDir) -> None:
    (run.checkpoints / "step-00000040.tmp-0a1b2c3d").mkdir()
    value = _json(run, "prune", "--keep", "1")
    assert value["deleted"] == [str(run.checkpoint(20))]
    assert value["kept"] == [str(run.checkpoint(10)), str(run.checkpoint(30))]
    assert value["swept"] == [str(run.checkpoints / "step-00000040.tmp-0a1b2c3d")]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000010", "step-00000030"]


def test_a_run_that_goes_on_is_not_pruned_from_outside(run: RunDir) -> None:
    with RunLock(run.lock) as lock:
        lock.acquire("host-a", os.getpid())
        done = _unisono(run, "prune", "--keep", "1")
        assert done.returncode == 2
        assert f"process {os.getpid()} on host-a" in done.stderr
    assert len(_json(run, "ls")["checkpoints"]) == 3


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = _unisono(RunDir(tmp_path / "empty"), command)
    assert done.returncode == 2
    assert "is no run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_checkpoints_lists_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    assert _json(run, "ls") == {"schema": 1, "checkpoints": []}
    assert _unisono(run, "verify").returncode == 2

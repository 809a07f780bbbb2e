"""`unisono checkpoint ls | verify | prune`, as a person types it.

Run: pytest tests/trainer/checkpoint/test_command.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from tests import front_server
from unisono.base.user_key import user_key
from unisono.front.cli.checkpoint import table
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.verify import write_model_manifest
from unisono.trainer.checkpoint.writer import TensorPart, write_tensor_file

if TYPE_CHECKING:
    from unisono.trainer.checkpoint.retention import CheckpointRow

Save = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path, save: Save) -> RunDir:
    """A run with three checkpoints, signed with the key of the user that the commands run as."""
    run = RunDir(tmp_path / "run")
    store = CheckpointStore(run.checkpoints, key=user_key(tmp_path / "settings" / "unisono"))
    for step in (10, 20, 30):
        save(step, by=store)
    plan = {"config": {"checkpoint": {"keep": 2, "best": "eval_loss"}}, "keep_every": 20}
    run.plan.write_text(json.dumps(plan))
    losses = {10: 0.5, 20: 0.9, 30: 0.8}
    run.metrics.write_text(
        "".join(json.dumps({"step": n, "eval_loss": loss}) + "\n" for n, loss in losses.items())
    )
    return run


def _unisono(run: RunDir, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(run.root.parent / "settings")}
    command = [sys.executable, "-m", "unisono", "checkpoint", arguments[0], str(run.root), *arguments[1:]]
    return front_server.run(command, env=environment)


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
    assert lines[0].split() == ["STEP", "SIZE", "AGE", "VERIFIED", "STATE", "KEPT", "HOST"]
    assert "when written" in lines[1]
    assert "intact" in lines[1]
    assert [("best" in line, "permanent" in line) for line in lines[1:]] == [
        (True, False), (False, True), (False, False),
    ]  # fmt: skip
    assert [row["for_ever"] for row in _json(run, "ls")["checkpoints"]] == [False, True, False]
    _unisono(run, "verify")
    assert all(" s ago  intact" in line for line in _unisono(run, "ls").stdout.splitlines()[1:])


def test_a_table_reports_age_state_and_who_holds_it() -> None:
    row: CheckpointRow = {
        "step": 7, "path": "", "bytes": 1_500_000, "created": "2026-01-01T00:00:00+00:00", "verified_at": "2026-01-03T11:30:00+00:00",
        "read_again": True, "intact": True, "foreign": True, "best": True, "for_ever": True, "holder": "a", "writers": ["a", "b", "c"],
    }  # fmt: skip
    damaged: CheckpointRow = {
        **row,
        "bytes": None,
        "created": None,
        "verified_at": None,
        "intact": False,
        "holder": None,
        "writers": [],
    }
    now = datetime(2026, 1, 3, 12, 0, tzinfo=UTC)
    _, first, second = table([row, damaged], now=now)
    shown = [text.strip() for text in first.split("  ") if text.strip()]
    assert shown == ["7", "1.5 MB", "2 days", "30 min 00 s ago", "foreign", "best, permanent", "a"]
    assert second.split()[:5] == ["7", "?", "?", "?", "DAMAGED"]


def test_parts_of_other_nodes_are_held_by_the_head_and_writers_are_listed(run: RunDir) -> None:
    store = CheckpointStore(run.checkpoints, key=user_key(run.root.parent / "settings" / "unisono"))

    def fill(directory: Path) -> dict[str, FileEntry]:
        entries = {}
        for host in ("a", "b", "c"):
            (directory / f"shard-{host}").write_bytes(host.encode())
            entries[f"shard-{host}"] = FileEntry(
                bytes=1, xxh3_128=xxhash.xxh3_128_hexdigest(host.encode()), host=host
            )
        return entries

    store.save(40, fill, run_id="r", config_digest="c", world_size=3, threads=1, holder="a")
    row = _json(run, "ls")["checkpoints"][-1]
    assert (row["step"], row["holder"], row["writers"]) == (40, "a", ["a", "b", "c"])
    assert _unisono(run, "ls").stdout.splitlines()[-1].split()[-1] == "a"


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
    assert "the run resumes from it" in done.stderr
    assert "Traceback" not in done.stderr
    assert [row["intact"] for row in _json(run, "ls")["checkpoints"]] == [True, False, True]
    done = _unisono(run, "verify", "--json")
    assert done.returncode == 7
    rows = json.loads(done.stdout)["checkpoints"]
    assert rows[1]["findings"][0]["file"] == "weights.safetensors"
    assert _unisono(run, "verify", "--step", "30").returncode == 0


def test_verifying_covers_the_final_adapter(run: RunDir) -> None:
    assert _json(run, "verify")["final"] is None
    run.adapter.mkdir()
    file = run.adapter / "adapter_model.safetensors"
    part = TensorPart("a.lora_A.weight", "F32", (4,), lambda: memoryview(b"0123456789abcdef"))
    entry = write_tensor_file(file, [part])
    assert "adapter        not verified" in _unisono(run, "verify").stdout
    write_model_manifest(run.adapter, {file.name: entry})
    done = _unisono(run, "verify")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "adapter        intact")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = _unisono(run, "verify")
    assert done.returncode == 7
    assert "adapter        DAMAGED" in done.stdout
    assert "adapter/adapter_model.safetensors: its content has changed in a.lora_A.weight" in done.stderr
    assert f"unisono export {run.root} OUT --step 30" in done.stderr
    final = _json(run, "verify")["final"]
    assert (final["listed"], final["intact"]) == (True, False)
    assert final["findings"][0]["tensors"] == ["a.lora_A.weight"]
    assert _unisono(run, "verify", "--step", "30").returncode == 0


def test_listing_sees_missing_and_short_files_at_once(run: RunDir) -> None:
    (run.checkpoint(10) / "state.json").unlink()
    (run.checkpoint(20) / "state.json").write_text("")
    assert [row["intact"] for row in _json(run, "ls")["checkpoints"]] == [False, False, True]


def test_pruning_goes_by_the_config_and_keeps_the_best_and_those_for_ever(run: RunDir, save: Save) -> None:
    store = CheckpointStore(run.checkpoints, key=user_key(run.root.parent / "settings" / "unisono"))
    for step in (32, 35):
        save(step, by=store)
    (run.checkpoints / "step-00000040.tmp-0a1b2c3d").mkdir()
    value = _json(run, "prune", "--keep", "1")
    assert value["deleted"] == [str(run.checkpoint(30)), str(run.checkpoint(32))]
    assert value["kept"] == [str(run.checkpoint(step)) for step in (10, 20, 35)]
    assert value["swept"] == [str(run.checkpoints / "step-00000040.tmp-0a1b2c3d")]
    assert len(list(run.checkpoints.glob("*step-*"))) == 3


@pytest.mark.parametrize(
    "plan",
    ["", "[]", "{}", '{"config": {"checkpoint": {"keep": []}}}', '{"config": {"checkpoint": {"keep": -1}}}', '{"config": {"checkpoint": {}}, "keep_every": "x"}'],
)  # fmt: skip
def test_nothing_is_deleted_by_a_plan_that_cannot_be_read(run: RunDir, plan: str) -> None:
    run.plan.write_text(plan)
    done = _unisono(run, "prune", "--keep", "1")
    assert done.returncode == 2
    assert "no checkpoint is deleted" in done.stderr
    assert len(list(run.checkpoints.glob("step-*"))) == 3


def test_pruning_never_deletes_the_last_intact_one(run: RunDir) -> None:
    for step in (20, 30):
        file = run.checkpoint(step) / "weights.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    run.metrics.unlink()  # no best
    assert _json(run, "prune", "--keep", "1")["deleted"] == []
    done = _unisono(run, "verify", "--step", "10")
    assert done.stdout.splitlines() == ["step-00000010  intact"]


def test_a_run_that_continues_is_not_pruned_from_outside(run: RunDir) -> None:
    with RunLock(run.lock) as lock:
        lock.acquire("host-a", os.getpid())
        done = _unisono(run, "prune", "--keep", "1")
        assert done.returncode == 2
        assert f"process {os.getpid()} on host-a" in done.stderr
    assert len(_json(run, "ls")["checkpoints"]) == 3


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_what_is_not_a_run_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = _unisono(RunDir(tmp_path / "empty"), command)
    assert done.returncode == 2
    assert "is not a run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_checkpoints_lists_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    assert _json(run, "ls") == {"schema": 1, "checkpoints": []}
    assert _unisono(run, "verify").returncode == 2

"""What a run needs: each lack is made for real, and named with its remedy.

Run: pytest tests/front/checks/test_requirements.py
"""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.front.checks.doctor_process import Seen, doctor
from tests.jobs.nproc.disks import in_memory
from unisono.guard.rundir.lock import RunLock

_LARGE = {
    "hidden_size": 16384,
    "intermediate_size": 65536,
    "num_hidden_layers": 200,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}


@pytest.fixture
def run_config(tmp_path: Path, model_dir: Path, rows_file: Path) -> Path:
    """A config that could start."""
    body = {
        "model": {"path": str(model_dir), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows_file), "max_length": 64}, "duration": "4 steps", "batch": {"global": 8},
        "device": "cpu", "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(body))
    return path


def look(config: Path, *words: str, **named: Any) -> Seen:
    return doctor(config.parent, config.name, *words, **named)


@pytest.mark.makes("config.start", "pass")
@pytest.mark.makes("config.model", "pass")
@pytest.mark.makes("config.data", "pass")
@pytest.mark.makes("config.memory", "pass")
@pytest.mark.makes("config.disk", "pass")
@pytest.mark.makes("config.packages", "pass")
@pytest.mark.makes("config.hub", "pass")
def test_config_that_could_start_passes_and_leaves_no_output_dir(run_config: Path) -> None:
    seen = look(run_config, "track=[tensorboard]")
    assert seen.code == 0, seen.out + seen.err
    for name in ("start", "model", "data", "memory", "disk", "packages", "hub"):
        assert seen.status(f"config.{name}") == "pass", seen.text(f"config.{name}")
    assert "60 rows" in seen.text("config.data")
    assert "tensorboard" in seen.text("config.packages")
    assert not (run_config.parent / "out").exists()


def test_a_config_that_is_wrong_itself_ends_with_2_as_for_the_start(run_config: Path) -> None:
    seen = look(run_config, "optim.lrr=1", as_json=False)
    assert (seen.code, seen.out) == (2, "")
    assert "optim.lr" in seen.err


@pytest.mark.makes("config.data", "fail")
def test_a_row_that_cannot_be_read_fails_with_its_line(run_config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl\n')
    seen = look(run_config, f"data.train={rows}")
    assert (seen.status("config.data"), seen.status("config.model"), seen.code) == ("fail", "unknown", 6)
    assert "rows.jsonl:2" in seen.text("config.data")


@pytest.mark.makes("config.model", "fail")
def test_a_model_without_its_config_fails(run_config: Path, model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model_dir, broken)
    (broken / "config.json").unlink()
    seen = look(run_config, f"model.path={broken}")
    assert (seen.status("config.model"), seen.code) == ("fail", 6)
    assert "there is no config.json in it" in seen.text("config.model")


@pytest.mark.makes("config.memory", "fail")
@pytest.mark.makes("config.disk", "fail")
def test_too_large_model_fails_for_memory_and_disk_with_both_numbers(
    run_config: Path, model_dir: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    shutil.copytree(model_dir, large, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | _LARGE))
    seen = look(run_config, f"model.path={large}", "model.weights=random", "adapter=null")
    assert (seen.status("config.memory"), seen.status("config.disk"), seen.code) == ("fail", "fail", 6), (
        seen.out
    )
    assert "per rank (weights" in seen.text("config.memory")
    assert "for checkpoints and the final model" in seen.text("config.disk")


@pytest.mark.makes("config.packages", "fail")
@pytest.mark.long
def test_a_storage_whose_package_is_missing_fails_with_the_command(run_config: Path) -> None:
    seen = look(run_config, "checkpoint.storage=gs://bucket/runs")
    assert (seen.status("config.packages"), seen.code) == ("fail", 6)
    assert "`pip install gcsfs`" in seen.text("config.packages")


@pytest.mark.makes("config.start", "fail")
@pytest.mark.long
def test_an_output_dir_that_holds_something_else_fails(run_config: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("…")
    seen = look(run_config)
    assert (seen.status("config.start"), seen.code) == ("fail", 6)
    assert "thesis.tex" in seen.text("config.start")


def test_a_finished_run_is_a_warning_and_not_a_fault_of_this_machine(
    run_config: Path, tmp_path: Path
) -> None:
    plan = {"schema": 1, "run_id": "r", "config": json.loads(run_config.read_text()), "total_steps": 9}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "out" / "result.json").write_text(
        '{"schema": 1, "outcome": "completed", "exit_code": 0, "step": 9}'
    )
    seen = look(run_config)
    assert (seen.status("config.start"), seen.code) == ("warn", 0), seen.out
    assert "is finished: 9 steps" in seen.text("config.start")


@pytest.mark.makes("config.start", "warn")
@pytest.mark.long
def test_a_run_that_is_held_by_a_different_process_warns_with_its_holder(
    run_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with RunLock(tmp_path / "out" / "run.lock") as lock:
        lock.acquire("here", 4711)
        seen = look(run_config)
    assert seen.status("config.start") == "warn"
    assert "is held by process 4711 on here" in seen.text("config.start")


@pytest.mark.makes("config.hub", "warn")
def test_a_hub_that_does_not_answer_warns_and_shows_no_token(run_config: Path) -> None:
    token = "hf_" + "abcdefghij" * 3
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call, and says nothing
        endpoint = f"http://user:{token}@127.0.0.1:{silent.getsockname()[1]}"
        env = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": token,
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_ETAG_TIMEOUT": "1",
        }
        seen = look(run_config, "model.path=nobody/nothing", env=env)
    assert seen.status("config.hub") == "warn"
    assert "does not respond" in seen.text("config.hub")
    assert token not in seen.out + seen.err


def test_offline_mode_is_respected_and_named(run_config: Path) -> None:
    seen = look(run_config, "model.path=nobody/nothing")
    assert seen.status("config.hub") == "warn"
    assert "HF_HUB_OFFLINE forbids downloads" in seen.text("config.hub")


@pytest.mark.long
def test_a_real_disk_that_is_too_small_for_the_checkpoints_fails(run_config: Path, tmp_path: Path) -> None:
    with in_memory(tmp_path / "out", size=72 << 20):
        seen = look(run_config, "checkpoint.keep=2000")
    assert seen.status("config.disk") == "fail", seen.text("config.disk")

"""A training start from config to result, with stand-ins for worker and data.

Run: pytest tests/jobs/runs/test_session.py
"""

import json
import os
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from unisono.guard.rundir.lock import RunLock
from unisono.jobs.runs.node_report import flat_config
from unisono.jobs.runs.train_request import with_absolute_paths
from unisono.trainer.config import RunConfig
from unisono.trainer.config.sections import PreferenceSection


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_leaves_what_the_contract_names(front: Any) -> None:
    done = front.run()
    assert done.returncode == 0, done.stderr
    names = {path.name for path in front.out.iterdir()}
    assert names >= {
        "config.yaml", "plan.json", "environment.json", "agreement.json", "metrics.jsonl", "events", "logs", "checkpoints",
        "result.json", "loss.svg",
    }  # fmt: skip
    assert "verdict.json" not in names
    result = front.read("result.json")
    assert (result["outcome"], result["exit_code"], result["step"], result["restarts"]) == (
        "completed",
        0,
        10,
        [],
    )
    assert all(
        front.read(name)["schema"] == 1
        for name in ("plan.json", "environment.json", "agreement.json", "result.json")
    )
    assert front.steps() == list(range(1, 11))


def test_directories_and_logs_are_private(front: Any) -> None:
    front.run()
    log = next((front.out / "logs").glob("*-rank-00000.log"))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "loading" in log.read_text()
    for folder in (front.out, front.out / "logs", front.out / "events"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_kept_config_is_absolute_and_is_the_same_run(front: Any) -> None:
    (front.folder / "rows").write_text("a row")
    front.config(train="rows", output_dir="out")
    assert front.run("duration=5 steps").returncode == 0
    kept = yaml.safe_load((front.out / "config.yaml").read_text())
    assert kept["data"]["train"] == str(front.folder / "rows")
    assert kept["output_dir"] == str(front.out)
    (front.folder / "elsewhere").mkdir()
    again = subprocess.run(
        [*front.arguments("--resume", "duration=6 steps")[:4], str(front.out / "config.yaml"), "--resume", "duration=6 steps"],
        cwd=front.folder / "elsewhere", env=front.script_environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert front.steps() == [1, 2, 3, 4, 5, 6]


def test_paths_of_adapters_and_of_a_reference_are_absolute(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    config = RunConfig.model_validate(
        {
            "model": "some/model", "data": {"train": "rows"}, "output_dir": "out", "objective": "dpo",
            "adapter": {"from": "there", "merge": ["there", "hub/adapter"]}, "preference": {"reference": "there"},
        }
    )  # fmt: skip
    kept = with_absolute_paths(config, tmp_path)
    assert kept.adapter is not None
    assert kept.adapter.from_ == str(tmp_path / "there")
    assert kept.adapter.merge == [str(tmp_path / "there"), "hub/adapter"]
    assert kept.preference.reference == str(tmp_path / "there")
    auto = config.model_copy(update={"preference": PreferenceSection()})
    assert with_absolute_paths(auto, tmp_path).preference.reference == "auto"
    # Nodes compare the contents of files, not their paths; that one has a reference and the other
    # none is a difference.
    assert "preference.reference" not in flat_config(kept)
    assert flat_config(auto)["preference.reference"] == "auto"


def test_the_first_screen_reports_what_will_happen_in_at_most_twelve_lines(front: Any) -> None:
    done = front.run()
    screen = done.stderr.splitlines()
    first = next(index for index, line in enumerate(screen) if line.startswith("device"))
    end = next(
        index
        for index, line in enumerate(screen)
        if line.startswith(("step ", "evaluation", "checkpoint at"))
    )
    assert end - first <= 12
    for label in ("device", "model", "trained", "data", "batch", "steps", "memory", "start", "results"):
        assert any(line.startswith(label) for line in screen[first:end]), label
    assert "100 of 1,000 parameters" in done.stderr


def test_results_go_to_stdout_and_talk_to_stderr(front: Any) -> None:
    done = front.run("optim.schedule=constant")
    assert done.stdout.startswith("completed: step 10")
    assert "unisono chat out" in done.stdout
    assert "checkpoint" not in done.stdout
    assert front.run("optim.schedule=constant", "--resume", "duration=12 steps", "--quiet").stderr == ""


def test_json_is_lines_of_known_kinds_of_which_the_last_is_the_result(front: Any) -> None:
    done = front.run("--json")
    found = lines(done.stdout)
    assert {line["kind"] for line in found} == {"plan", "step", "eval", "checkpoint", "result"}
    assert [line["step"] for line in found if line["kind"] == "step"] == list(range(1, 11))
    assert found[0]["kind"] == "plan"
    result = {key: value for key, value in found[-1].items() if key not in ("kind", "time")}
    assert result == front.read("result.json")


def test_a_dry_run_shows_the_plan_and_leaves_nothing(front: Any) -> None:
    done = front.run("--dry-run")
    assert done.returncode == 0
    assert "batch" in done.stdout
    assert not front.out.exists()
    plan, result = lines(front.run("--dry-run", "--json").stdout)
    assert (plan["kind"], plan["total_steps"], result["kind"], result["dry_run"]) == (
        "plan",
        10,
        "result",
        True,
    )
    assert not front.out.exists()


def test_an_adapter_on_random_weights_is_planned_but_not_trained(front: Any) -> None:
    random = ("model.weights=random", "adapter={kind: lora}")
    assert front.run("--dry-run", *random).returncode == 0
    done = front.run(*random)
    assert done.returncode == 2
    assert "error: an adapter cannot be trained on random weights" in done.stderr
    assert "set adapter: null, or pass --dry-run" in done.stderr
    assert not front.out.exists()


def test_refused_data_leave_no_directory(front: Any) -> None:
    front.config(train="refuse")
    done = front.run()
    assert done.returncode == 2
    assert "row 3 has no answer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not front.out.exists()


def test_a_model_that_the_worker_refuses_leaves_no_directory(front: Any) -> None:
    done = front.run(faults={"refuse": True})
    assert done.returncode == 2
    assert "lacks lm_head" in done.stderr
    assert not front.out.exists()


def test_a_directory_that_is_not_a_run_is_not_touched(front: Any) -> None:
    front.out.mkdir()
    (front.out / "thesis.txt").write_text("years of work")
    assert front.run().returncode == 2
    assert [path.name for path in front.out.iterdir()] == ["thesis.txt"]


def test_an_output_dir_that_cannot_be_made_is_refused(front: Any) -> None:
    (front.folder / "file").write_text("")
    front.config(train="rows", output_dir=str(front.folder / "file" / "out"))
    done = front.run()
    assert done.returncode == 2
    assert "output_dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_fresh_and_resume_contradict_each_other(front: Any) -> None:
    assert front.run("--fresh", "--resume").returncode == 2


def test_fresh_renames_the_old_run(front: Any) -> None:
    front.run()
    assert front.run().returncode == 2  # it is finished
    assert front.run("--fresh").returncode == 0
    assert json.loads((front.folder / "out.old-1" / "result.json").read_text())["outcome"] == "completed"


def test_leftovers_of_a_launcher_are_named_and_do_not_reach_the_rank(front: Any) -> None:
    front.environment |= {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "NCCL_DEBUG": "INFO"}
    done = front.run()
    assert done.returncode == 0
    ignored = [line for line in done.stderr.splitlines() if line.startswith("ignored")]
    assert len(ignored) == 1
    assert all(name in ignored[0] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "NCCL_DEBUG"))
    assert set(front.read("plan.json")["ignored_variables"]) >= {"RANK", "WORLD_SIZE"}


def test_under_a_live_launcher_it_refuses_with_the_right_command(front: Any) -> None:
    front.environment |= {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}
    done = front.run()
    assert done.returncode == 2
    assert "torchrun" in done.stderr
    assert "unisono train c.yaml" in done.stderr
    assert not front.out.exists()


def test_the_declared_threads_are_the_plans(front: Any) -> None:
    front.environment["OMP_NUM_THREADS"] = "3"
    front.run()
    plan = front.read("plan.json")
    assert plan["threads"] == 3
    assert plan["origins"]["threads"] == "OMP_NUM_THREADS"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(front: Any) -> None:
    front.run(faults={"exit": 8, "always": True})
    newest = front.out / "checkpoints" / "step-00000006" / "state.json"
    newest.write_text("7")
    done = front.run()
    assert done.returncode == 0, done.stderr
    assert "step-00000006" in done.stderr
    assert "from step 3" in done.stderr


def test_no_intact_checkpoint_is_exit_7_and_nothing_is_touched(front: Any) -> None:
    front.run(faults={"exit": 5, "always": True})
    (front.out / "checkpoints" / "step-00000003" / "state.json").write_text("7")
    before = sorted(path.name for path in front.out.rglob("*"))
    done = front.run()
    assert done.returncode == 7
    assert sorted(path.name for path in front.out.rglob("*")) == before


def test_the_signing_key_is_the_users_and_private(front: Any) -> None:
    front.run()
    (key,) = (path for path in Path(front.folder / "settings").rglob("*") if path.is_file())
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert os.access(key, os.R_OK)


def test_a_rehearsal_goes_through_every_stage_and_leaves_nothing(front: Any) -> None:
    done = front.run("--rehearse")
    assert done.returncode == 0, done.stderr
    for stage in ("all rows prepared", "64 rows, 3 steps", "resumed from step 3", "exported"):
        assert f"{stage}" in done.stderr, stage
    assert "every stage passed" in done.stdout
    assert not front.out.exists()
    assert list((front.folder / "tmp").iterdir()) == []


def test_a_rehearsal_that_fails_ends_with_the_exit_code_of_the_stage(front: Any) -> None:
    done = front.run("--rehearse", "--json", faults={"raise": 2})
    assert done.returncode == 5
    (result,) = lines(done.stdout)
    assert (result["kind"], result["exit_code"], result["verdict"]["cause"]) == (
        "result",
        5,
        "user_code_error",
    )
    assert next(stage["stage"] for stage in result["stages"]).startswith("all rows prepared")
    assert not front.out.exists()
    assert list((front.folder / "tmp").iterdir()) == []


def test_a_rehearsal_can_be_made_beside_a_finished_run(front: Any) -> None:
    front.run()
    before = (front.out / "result.json").read_bytes()
    assert front.run("--rehearse").returncode == 0
    assert (front.out / "result.json").read_bytes() == before


def test_run_out_of_memory_before_its_first_step_may_change_its_config(
    front: Any,
) -> None:
    """In the same directory, without being refused as a different run."""
    assert front.run(faults={"oom": True}).returncode == 5
    assert front.read("verdict.json")["cause"] == "cuda_oom"
    again = front.run("batch.micro=1")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("holder", ["the same job", "another job"])
def test_start_refused_by_the_lock_of_a_living_head_leaves_its_port_alone(front: Any, holder: str) -> None:
    """Typed twice, the second start would take the port before the first one listens, and the first
    would end with port_in_use.
    """
    port, other = free_port(), free_port()
    same_job = holder == "the same job"
    lock = RunLock(front.out / "run.lock")
    lock.acquire(socket.gethostname(), os.getpid(), port=port if same_job else other)
    front.environment["UNISONO_TOKEN"] = "0123456789abcdef0123456789abcdef"
    words = ("--nodes", "2", "--node-rank", "0", "--nproc", "1", "--head", f"127.0.0.1:{port}")
    listened = False
    with front.start(*words) as second:
        while second.poll() is None:
            with socket.socket() as probe:
                listened = listened or probe.connect_ex(("127.0.0.1", port)) == 0
            time.sleep(0.05)
        assert second.stderr is not None
        printed = second.stderr.read()
    lock.release()
    assert second.returncode == 2, printed
    assert f"process {os.getpid()} on" in printed
    assert listened is not same_job, printed
    assert ("reporting this to the other nodes" in printed) is not same_job

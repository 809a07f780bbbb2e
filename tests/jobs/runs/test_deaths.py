"""How a rank's death is named, and when the run goes on by itself.

Run: pytest tests/jobs/runs/test_deaths.py
"""

import json
from typing import Any


def test_a_killed_rank_is_named_and_the_run_continues_from_its_checkpoint(front: Any) -> None:
    done = front.run(faults={"kill": 8})
    assert done.returncode == 0, done.stderr
    result = front.read("result.json")
    (restart,) = result["restarts"]
    assert (restart["verdict"]["cause"], restart["verdict"]["ranks"], restart["from_step"]) == (
        "rank_killed",
        [0],
        6,
    )
    assert result["outcome"] == "completed"
    assert "SIGKILL" in done.stderr
    assert front.read("plan.json")["resume"]["step"] == 6
    assert not (front.out / "verdict.json").exists()
    assert [path.name for path in (front.out / "verdicts").iterdir()] == ["0001.json"]


def test_the_same_death_without_progress_stops_as_deterministic(front: Any) -> None:
    done = front.run("--restarts", "5", faults={"kill": 8, "always": True})
    assert done.returncode == 5
    assert "deterministic" in done.stderr
    result = front.read("result.json")
    assert (result["outcome"], result["step"], len(result["restarts"])) == ("died", 7, 1)
    assert front.read("verdict.json")["cause"] == "rank_killed"


def test_restarts_can_be_forbidden(front: Any) -> None:
    assert front.run("--restarts", "0", faults={"kill": 8}).returncode == 5
    assert front.read("result.json")["restarts"] == []


def test_an_exception_is_named_with_its_place_and_not_tried_again(front: Any) -> None:
    done = front.run(faults={"raise": 8})
    assert done.returncode == 5
    verdict = front.read("verdict.json")
    assert (verdict["cause"], verdict["ranks"], verdict["when"]) == ("user_code_error", [0], "during")
    assert "ZeroDivisionError: a batch of nothing" in verdict["evidence"][0]["text"]
    assert "worker.py:" in verdict["evidence"][0]["where"]
    assert verdict["summary"].startswith("rank 0, node 0 (")
    assert "WHAT" in done.stderr
    assert "FIX  " in done.stderr
    assert list((front.out / "evidence").iterdir())


def test_leaving_silently_is_not_a_success(front: Any) -> None:
    assert front.run(faults={"exit": 8}).returncode == 5
    assert "exit status 3" in front.read("verdict.json")["summary"]


def test_out_of_memory_comes_as_the_workers_own_verdict(front: Any) -> None:
    done = front.run("--json", faults={"oom": True})
    assert done.returncode == 5
    kinds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in kinds] == ["plan", "verdict", "result"]
    assert kinds[1]["cause"] == "cuda_oom"
    assert kinds[2]["verdict"]["cause"] == "cuda_oom"


def test_a_task_that_is_killed_is_reported_without_a_traceback(front: Any) -> None:
    front.config(train="die")
    done = front.run()
    assert done.returncode == 5
    assert "prepare" in done.stderr
    assert "SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
    assert not front.out.exists()


def test_what_a_rank_prints_never_blocks_it(front: Any) -> None:
    assert front.run(faults={"flood": 512}).returncode == 0
    log = next((front.out / "logs").glob("*.log"))
    assert log.stat().st_size > 10 * 512 * 1024

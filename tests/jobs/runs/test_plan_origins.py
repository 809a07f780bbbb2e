"""What is set by hand stands in the plan with its reason.

Run: pytest tests/jobs/runs/test_plan_origins.py
"""

from pathlib import Path
from typing import Any

from tests.front.checks.doctor_process import doctor

_WHY = "hangs on these boards: ticket 4711"


def settings(front: Any) -> dict[str, tuple[str, str]]:
    return {one["name"]: (one["value"], one["reason"]) for one in front.read("plan.json")["settings"]}


def test_plan_has_a_variable_with_its_reason_and_shows_a_missing_reason(front: Any) -> None:
    front.environment |= {"NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = front.run("--reason", f"NCCL_P2P_DISABLE={_WHY}")
    assert done.returncode == 0, done.stderr
    found = settings(front)
    assert found["NCCL_P2P_DISABLE"] == ("1", _WHY)
    assert found["GLOO_SOCKET_IFNAME"] == ("lo", "")


def test_a_line_of_nccls_own_file_and_any_other_variable_have_their_place(front: Any) -> None:
    conf = front.folder / "nccl.conf"
    conf.write_text("NCCL_ALGO=Ring\n")
    front.environment |= {"NCCL_CONF_FILE": str(conf), "OMP_NUM_THREADS": "1"}
    front.config(
        train="rows", reasons={"NCCL_ALGO": "trees are slow here", "OMP_NUM_THREADS": "shared machine"}
    )
    assert front.run().returncode == 0
    found = settings(front)
    assert found["NCCL_ALGO"] == ("Ring", "trees are slow here")
    assert found["OMP_NUM_THREADS"] == ("1", "shared machine")


def test_a_reason_makes_no_other_run_and_one_for_nothing_is_named(front: Any) -> None:
    assert front.run("duration=5 steps").returncode == 0
    done = front.run("--resume", "duration=10 steps", "--reason", f"NCCL_IB_DISABEL={_WHY}")
    assert done.returncode == 0, done.stderr
    assert "reasons.NCCL_IB_DISABEL has no effect: NCCL_IB_DISABEL is not set" in done.stderr
    assert front.steps() == list(range(1, 11))


def test_a_reason_without_a_variable_or_without_words_is_refused(front: Any) -> None:
    for text in ("it hangs", "NCCL_P2P_DISABLE=", "=it hangs"):
        done = front.run("--reason", text)
        assert done.returncode == 2, text
        assert "has no variable, or no reason" in done.stderr


def test_doctor_shows_the_reason_beside_what_it_warns_of(tmp_path: Path, front: Any) -> None:
    front.config(train="rows", reasons={"NCCL_TIMEOUT": _WHY})
    (front.folder / "c.yaml").rename(tmp_path / "c.yaml")
    seen = doctor(tmp_path, "c.yaml", env={"NCCL_TIMEOUT": "1800"})
    assert seen.status("settings.suspicious") == "warn"
    assert f"NCCL_TIMEOUT is set on purpose: {_WHY}" in seen.text("settings.suspicious")

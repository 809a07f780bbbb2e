"""What may change under a run that goes on. Run: pytest tests/rundir/test_continuing.py"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.rundir import RunDir
from unisono.rundir.continuing import changed_packages, check_same_run, refuse_changed_plan

PLAN: dict[str, Any] = {
    "data": {"digest": "d1"}, "model": {"digest": "m1"}, "threads": 2, "dtype": "float32", "device": {"kind": "cpu", "name": "x"},
    "micro_batch": 4, "gradient_checkpointing": False, "world_size": 1,
}  # fmt: skip


def test_the_same_plan_goes_on_without_a_word() -> None:
    assert refuse_changed_plan(PLAN, PLAN) == []


def test_other_data_and_another_model_are_refused_together() -> None:
    with pytest.raises(UsageError) as caught:
        refuse_changed_plan(PLAN, {**PLAN, "data": {"digest": "d2"}, "model": {"digest": "m2"}})
    assert [problem.where for problem in caught.value.problems] == ["data.train", "model.path"]
    assert "d1 then, d2 now" in caught.value.problems[0].why


def test_what_costs_bit_equality_is_said_with_the_remedy() -> None:
    [line] = refuse_changed_plan(PLAN, {**PLAN, "threads": 4})
    assert (
        line
        == "threads is 4, and was 2: losses agree to rounding, not to the bit; set OMP_NUM_THREADS=2 to have the same again"
    )


def test_only_packages_that_numbers_depend_on_are_named() -> None:
    lines = changed_packages({"torch": "2.13.0", "pytest": "8"}, {"torch": "2.14.0", "pytest": "9"})
    assert lines == ["torch is 2.14.0, and was 2.13.0: losses may not agree to the bit"]


def test_the_earlier_start_is_read_from_its_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.plan.write_text(json.dumps(PLAN))
    run.environment.write_text(json.dumps({"schema": 1, "packages": {"torch": "1"}}))
    assert check_same_run(run, PLAN, {"torch": "1"}) == []
    assert check_same_run(run, PLAN, {"torch": "2"})[0].startswith("torch is 2, and was 1")
    with pytest.raises(UsageError):
        check_same_run(run, {**PLAN, "data": {"digest": "other"}}, {"torch": "1"})

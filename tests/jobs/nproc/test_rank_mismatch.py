"""Ranks that would train on something else.

The faults are put into the plan. Run: pytest tests/jobs/nproc/test_rank_mismatch.py
"""

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.verdict_checks import named

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.fault("fault in one of two ranks")
@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        pytest.param({"one_row_more": [1]}, "split_mismatch", marks=pytest.mark.long),
        ({"unseeded_split": [0, 1]}, "split_mismatch"),
        ({"flip_weight_bit": [1]}, "weights_mismatch"),
        pytest.param({"other_tokenizer": [1]}, "tokenizer_files_mismatch", marks=pytest.mark.long),
    ],
    ids=["one row more", "unseeded split", "flipped weight bit", "another tokenizer"],
)
def test_rank_training_on_something_else_is_found_before_a_collective(
    solo: Job, faults: dict[str, Any], cause: str
) -> None:
    """Seed 4 of the field: a split drawn on each rank without a seed hangs at the end of an
    epoch.
    """
    front = solo.start(0, "--nproc", "2", answers={"faults": faults}, topology=False)
    assert front.wait() == 3, front.text()
    verdict = named([front]).verdict
    assert verdict.cause == cause
    assert verdict.when == "before"
    assert "rank 1" in verdict.summary
    assert "rank 0" in verdict.summary
    assert solo.read("result.json")["outcome"] == "disagreed"
    assert solo.read("result.json")["step"] == 0
    assert any(check["status"] == "fail" for check in solo.read("agreement.json")["checks"])
    assert not list((solo.out / "checkpoints").glob("step-*"))
    solo.wait_gone()


@pytest.mark.fault("fault in one of two ranks")
@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [pytest.param(2, (), marks=pytest.mark.long), (3, (1,))],
    ids=["a tie", "one of three"],
)
def test_rank_comparing_with_another_reference_is_found_before_step_1(
    solo: Job, pair_files: tuple[Path, Path], ranks: int, culprits: tuple[int, ...]
) -> None:
    solo.config(
        objective="dpo",
        data={"train": str(pair_files[0])},
        preference={"reference": str(solo.model)},
        restarts=0,
    )
    front = solo.start(
        0, "--nproc", str(ranks), answers={"faults": {"flip_reference_bit": [1]}}, topology=False
    )
    assert front.wait() == 3, front.text()
    verdict = named([front]).verdict
    assert (verdict.cause, verdict.when, verdict.ranks) == ("weights_mismatch", "before", culprits)
    assert "rank 1" in verdict.summary
    assert "the reference model" in verdict.summary
    result = solo.read("result.json")
    assert (result["outcome"], result["exit_code"], result["step"]) == ("disagreed", 3, 0)
    assert not (solo.out / "reference.safetensors").exists()
    solo.wait_gone()


@pytest.mark.long
def test_with_three_ranks_the_odd_one_is_named(solo: Job) -> None:
    front = solo.start(0, "--nproc", "3", answers={"faults": {"flip_weight_bit": [2]}}, topology=False)
    assert front.wait() == 3, front.text()
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.ranks) == ("weights_mismatch", (2,))

"""How a run ended, kept. Run: pytest tests/guard/rundir/test_result.py"""

import json
import math
from pathlib import Path

import pytest

from unisono.base.causes import Verdict, find_cause
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import (
    STOPPED_WITHOUT_A_STALL,
    RunResult,
    read_result,
    set_verdict,
    shown_outcome,
    write_result,
)


def test_a_result_reads_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    result = RunResult(
        outcome="completed", exit_code=0, step=10, loss=1 / 3, eval={"exact_match": 0.95}, run_id="r"
    )
    write_result(run, result)
    assert read_result(run) == result
    assert json.loads(run.result.read_text())["schema"] == 1
    assert run.result.stat().st_mode & 0o777 == 0o600


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_result(run, RunResult(outcome="stalled", exit_code=4, loss=math.nan, eval={"loss": math.inf}))
    value = json.loads(run.result.read_text(), parse_constant=pytest.fail)
    assert value["loss"] is None
    assert value["eval"] == {"loss": None}


@pytest.mark.parametrize("content", [None, "torn {", "[]", '{"outcome": "holiday"}'])
def test_what_is_not_a_result_is_none(content: str | None, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    if content is not None:
        run.result.write_text(content)
    assert read_result(run) is None


def _verdict(summary: str) -> Verdict:
    return Verdict(cause="nan_loss", when="during", summary=summary)


def test_earlier_verdicts_are_kept_in_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("first", "second", "third"):
        set_verdict(run, _verdict(text))
    set_verdict(run, None)
    assert not run.verdict.exists()
    kept = sorted(run.verdicts.iterdir())
    assert [path.name for path in kept] == ["0001.json", "0002.json", "0003.json"]
    assert [json.loads(path.read_text())["summary"] for path in kept] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("outcome", "verdict", "shown"),
    [
        ("stalled", {"cause": "nan_loss"}, "stopped: NaN loss"),
        ("stalled", {"cause": "node_unreachable"}, "stopped: a node is unreachable"),
        ("stalled", {"cause": "rank_stopped"}, "stalled"),
        ("stalled", None, "stalled"),
        ("stalled", {"cause": ["odd"]}, "stalled"),
        ("completed", {"cause": "nan_loss"}, "completed"),
        ("died", {"cause": "nan_loss"}, "died"),
    ],
)
def test_only_a_stall_is_called_one(outcome: str, verdict: object, shown: str) -> None:
    assert shown_outcome(outcome, verdict) == shown


def test_causes_that_are_no_stall_are_in_the_catalogue() -> None:
    assert all(
        (cause := find_cause(name)) is not None and cause.exit_code == 4 for name in STOPPED_WITHOUT_A_STALL
    )

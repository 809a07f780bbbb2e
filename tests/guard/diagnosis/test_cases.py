"""What diagnose says of logs of failures, real ones and such in their words: `pytest
tests/guard/diagnosis/test_cases.py`.

`made.jsonl` was seen by those who wrote the rules, the `kept_away` ones were not before they were
first scored (bench/results/diagnose_kept_away_*.json has what was said then, by
bench/diagnose_reading.py); since then they are known, and kept from getting worse here.
`tools_read.jsonl` and `tools_kept.jsonl` are logs of real tools in halves by a hash of their names
(`tests/guard/diagnosis/making/halves.py`): rules were written with the first alone; `tools_after.jsonl`
was made after them. bench/results/diagnose_new_logs.json has what was said of each at first and in
the end. `tests/guard/diagnosis/making` makes the cases again; `tests/guard/diagnosis/scoring.py FILE` shows what
is wrong in which case.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.guard.diagnosis.scoring import Score, by_command, cases, is_surely_wrong, mark, verdict
from unisono.base.text import plain

CASES = Path(__file__).parent / "cases"
CAUSE, CULPRIT, REMEDY = 0.98, 0.95, 0.95
"""Of the cases of a file, and of those where somebody can be named, or something has to be said."""


TOOLS = ("tools_read.jsonl", "tools_kept.jsonl", "tools_after.jsonl")


@functools.cache
def said(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The cases of a file, each with its verdict."""
    return [(case, verdict(case)) for case in cases(CASES / name)]


@functools.cache
def scored(name: str) -> Score:
    return Score(tuple(mark(case, printed) for case, printed in said(name)))


@pytest.mark.parametrize(
    "name", sorted(file.name for file in CASES.glob("*.jsonl") if file.name != "written.jsonl")
)
def test_the_cause_and_the_culprit_of_known_failures_are_named(name: str) -> None:
    found = scored(name)
    assert found.cause >= CAUSE, "\n".join(found.wrong())
    assert found.culprit >= CULPRIT, "\n".join(found.wrong())
    assert not found.false_alarms
    assert not found.missed


@pytest.mark.parametrize("name", ["made.jsonl", *TOOLS])
def test_the_remedy_names_what_has_to_be_changed(name: str) -> None:
    found = scored(name)
    assert found.remedy >= REMEDY, "\n".join(found.wrong())


def test_no_verdict_on_logs_of_tools_is_sure_and_wrong() -> None:
    for name in TOOLS:
        wrong = [case["id"] for case, printed in said(name) if is_surely_wrong(case, printed)]
        assert not wrong, name


def test_the_command_prints_the_verdict_that_was_scored() -> None:
    case = cases(CASES / "made.jsonl")[0]
    assert by_files(case) == {"cause": case["class"], "ranks": verdict(case)["ranks"]}


def by_files(case: dict[str, object]) -> dict[str, object]:
    printed = verdict(case, by_command)
    return {"cause": printed["cause"], "ranks": printed["ranks"]}


def letters(text: str) -> str:
    return "".join(plain(text).split())


@pytest.mark.parametrize("name", sorted(file.name for file in CASES.glob("*.jsonl")))
def test_each_line_of_evidence_is_one_of_the_logs(name: str) -> None:
    """But for white space, colors, and secrets."""
    for case, printed in said(name):
        whole = letters("\n".join(map(str, case["files"].values())))
        for item in printed["evidence"]:
            for part in re.split(r"…|\*{3,}", item["text"]):
                assert letters(part)[:200] in whole, (case["id"], item)

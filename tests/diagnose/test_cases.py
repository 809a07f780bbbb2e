"""What diagnose says of logs of failures, real ones and such in their words: `pytest tests/diagnose/test_cases.py`.

`made.jsonl` was seen by those who wrote the rules, the `kept_away` ones were not before they were first scored (bench/results/diagnose_kept_away_*.json
has what was said then, by bench/diagnose_reading.py); since then they are known, and kept from getting worse here.
`tests/diagnose/making` makes the cases again; `tests/diagnose/scoring.py FILE` shows what is wrong in which case.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.diagnose.scoring import Score, by_command, cases, score, verdict

CASES = Path(__file__).parent / "cases"
CAUSE, CULPRIT = 0.98, 0.95
"""Of the cases of a file, and of those where somebody can be named."""


@functools.cache
def scored(name: str) -> Score:
    return score(CASES / name)


@pytest.mark.parametrize(
    "name", sorted(file.name for file in CASES.glob("*.jsonl") if file.name != "written.jsonl")
)
def test_the_cause_and_the_culprit_of_known_failures_are_named(name: str) -> None:
    found = scored(name)
    assert found.cause >= CAUSE, "\n".join(found.wrong())
    assert found.culprit >= CULPRIT, "\n".join(found.wrong())
    assert not found.false_alarms
    assert not found.missed


def test_the_remedy_names_what_has_to_be_changed() -> None:
    found = scored("made.jsonl")
    assert found.remedy >= 0.95, "\n".join(found.wrong())


def test_the_command_prints_the_verdict_that_was_scored() -> None:
    case = cases(CASES / "made.jsonl")[0]
    assert by_files(case) == {"cause": case["class"], "ranks": verdict(case)["ranks"]}


def by_files(case: dict[str, object]) -> dict[str, object]:
    printed = verdict(case, by_command)
    return {"cause": printed["cause"], "ranks": printed["ranks"]}

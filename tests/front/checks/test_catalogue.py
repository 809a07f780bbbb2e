"""Every check has its reason, its paragraph, a test that it can fail in and one that it passes.

Run: pytest tests/front/checks/test_catalogue.py
"""

import ast
from collections import defaultdict
from pathlib import Path

from unisono.base.causes import CATALOGUE as CAUSES
from unisono.front.checks.check import AREAS
from unisono.front.checks.examination import CATALOGUE, REGISTRY

_BAD = {"fail", "warn"}


def made() -> dict[str, set[str]]:
    """The statuses that tests bring each check to: all marks `makes(check, status)` below
    tests/front/checks.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for file in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "makes"
            ):
                check, status = (ast.literal_eval(word) for word in node.args)
                found[check].add(status)
    return found


def test_every_check_is_made_to_fail_by_a_test_and_passes_in_another() -> None:
    by_tests = made()
    never_bad = [check.id for check in CATALOGUE if not by_tests[check.id] & _BAD]
    never_good = [check.id for check in CATALOGUE if "pass" not in by_tests[check.id]]
    assert (never_bad, never_good) == ([], [])


def test_marks_name_checks_that_there_are() -> None:
    assert set(made()) <= {check.id for check in CATALOGUE}


def test_ids_are_unique_and_begin_with_their_area() -> None:
    ids = [check.id for check in CATALOGUE]
    assert len(set(ids)) == len(ids)
    assert {check.area for check in CATALOGUE} <= set(AREAS)
    assert {area for area, _ in REGISTRY} <= set(AREAS)


def test_every_check_says_why_and_how_and_has_catalogued_causes() -> None:
    for check in CATALOGUE:
        assert all((check.title, check.why, check.how)), check.id
        assert check.how.endswith("."), check.id
        assert set(check.causes) <= set(CAUSES), check.id

"""Tests that start processes are found by their code. Run: pytest tests/test_processes.py"""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.jobs.runs.conftest import Front
from tests.needs import need_namespaces, what_was_skipped
from tests.processes import starts_processes
from unisono.base.text import one_line
from unisono.guard.supervise.task_process import run_task


def itself() -> None:
    subprocess.run([sys.executable], check=False)


def nested() -> Callable[[], Any]:
    return lambda: subprocess.run([sys.executable], check=False)


def through_a_helper() -> None:
    need_namespaces("name")


def through_a_class() -> None:
    Front.run  # noqa: B018 - its name is enough


def through_the_package() -> None:
    run_task("prepare", {})


def pure() -> None:
    what_was_skipped([])
    one_line("text")


@pytest.mark.parametrize(
    ("function", "expected"),
    [(itself, True), (nested, True), (through_a_helper, True), (through_a_class, True), (through_the_package, True), (pure, False)],
)  # fmt: skip
def test_code_that_reaches_a_process_is_found(function: Callable[[], Any], *, expected: bool) -> None:
    for item in (_item(function), _item(pure, fixture=function)):
        assert starts_processes(item) is expected


def _item(function: Callable[[], Any], *, fixture: Callable[[], Any] = pure) -> Any:
    definition = SimpleNamespace(func=fixture)
    return SimpleNamespace(
        function=function, _fixtureinfo=SimpleNamespace(name2fixturedefs={"fixture": [definition]})
    )

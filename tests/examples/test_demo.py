"""The demo keeps its promise, and can be run twice. Run: pytest tests/examples/test_demo.py (about two minutes).

It runs in a copy of the examples, so that runs/demo of the person who tests stays as it is.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
EARLIER = "# Written by unisono: an earlier run\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples alone; the package is the installed one."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.fixture(scope="module")
def demo(project: Path) -> str:
    """What the demo prints."""
    (project / "runs" / "demo").mkdir(parents=True)
    (project / "runs" / "demo" / "config.yaml").write_text(EARLIER)
    ended = subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def result(demo: str, project: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "runs" / "demo" / "result.json").read_text("utf-8"))
    return found


def _share(line: str, text: str) -> float:
    found = re.search(rf"^{line}: ([0-9.]+) %$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_it_could_not_do_it_before_and_can_after(demo: str) -> None:
    assert _share("exact match before", demo) < 5
    assert _share("exact match after", demo) >= 95


def test_the_printed_figures_are_those_of_the_result(demo: str, result: dict[str, Any]) -> None:
    assert _share("exact match before", demo) == round(100 * result["eval"]["exact_match_before"], 1)
    assert _share("exact match after", demo) == round(100 * result["eval"]["exact_match"], 1)


def test_it_shows_three_requests_before_and_after(demo: str) -> None:
    for label in ("request", "  before", "  after", "  correct"):
        assert len(re.findall(rf"^{label} ", demo, re.MULTILINE)) == 3, demo


def test_an_earlier_run_is_set_aside_and_not_lost(demo: str, project: Path) -> None:
    assert (project / "runs" / "demo.old-1" / "config.yaml").read_text() == EARLIER

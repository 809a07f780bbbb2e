"""The demos keep their promise, and can be run twice.

Run: pytest tests/examples/test_demo.py; both in full: with -m "long or not long".

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
    """What the demo prints, with a tenth of its steps."""
    (project / "runs" / "demo").mkdir(parents=True)
    (project / "runs" / "demo" / "config.yaml").write_text(EARLIER)
    return _run(project, "sft", "duration=50 steps")


@pytest.fixture(scope="module")
def short_dpo(project: Path) -> str:
    """What the demo of preferences prints, with less than half of its steps."""
    return _run(project, "dpo", "duration=60 steps", "eval.every=60 steps")


@pytest.fixture(scope="module")
def result(demo: str, project: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "runs" / "demo" / "result.json").read_text("utf-8"))
    return found


def _run(project: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "examples/demo.py", *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _share(line: str, text: str) -> float:
    found = re.search(rf"^{line}: ([0-9.]+) %$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.long
def test_it_could_not_do_it_before_and_can_after(project: Path) -> None:
    text = _run(project)
    assert _share("exact match before", text) < 5
    assert _share("exact match after", text) >= 95


def test_the_printed_figures_are_those_of_the_result(demo: str, result: dict[str, Any]) -> None:
    assert _share("exact match before", demo) == round(100 * result["eval"]["exact_match_before"], 1)
    assert _share("exact match after", demo) == round(100 * result["eval"]["exact_match"], 1)


def test_it_shows_three_requests_before_and_after(demo: str) -> None:
    for label in ("request", "  before", "  after", "  correct"):
        assert len(re.findall(rf"^{label} ", demo, re.MULTILINE)) == 3, demo


def test_an_earlier_run_is_set_aside_and_not_lost(demo: str, project: Path) -> None:
    assert (project / "runs" / "demo.old-1" / "config.yaml").read_text() == EARLIER


def _answers(text: str) -> tuple[int, int]:
    """Answers to held-out requests that equal the chosen one, before and after."""
    found = re.search(
        r"^answers equal to the chosen one: (\d) of 8 before, (\d) of 8 after$", text, re.MULTILINE
    )
    assert found, text
    return int(found[1]), int(found[2])


def test_preferences_are_learned_in_a_few_steps(short_dpo: str) -> None:
    assert 20 <= _share("reward accuracy before", short_dpo) <= 80
    assert _share("reward accuracy after", short_dpo) >= 95
    before, after = _answers(short_dpo)
    assert before == 0
    assert after >= 4


def test_the_demo_of_preferences_shows_both_sides_of_three_pairs(short_dpo: str) -> None:
    for label in ("request ", "  before  ", "  after   ", "  chosen  ", "  rejected"):
        assert len(re.findall(rf"^{label} ", short_dpo, re.MULTILINE)) == 3, short_dpo
    for curve in ("loss", "reward_margin", "logps_chosen", "logps_rejected"):
        assert re.search(rf"^{curve} .*[▁▂▃▄▅▆▇█]{{60}} -?[0-9.]+$", short_dpo, re.MULTILINE), short_dpo


@pytest.mark.long
def test_the_whole_demo_of_preferences_changes_the_answers(project: Path) -> None:
    text = _run(project, "dpo")
    assert 20 <= _share("reward accuracy before", text) <= 80
    assert _share("reward accuracy after", text) >= 95
    before, after = _answers(text)
    assert before == 0
    assert after >= 7


@pytest.mark.long
def test_the_demo_of_rewards_goes_from_nothing_to_nine_in_ten(project: Path) -> None:
    text = _run(project, "grpo")
    assert _share("reward before", text) <= 5
    assert _share("reward after", text) >= 90
    assert len(re.findall(r"^  [01]  ", text, re.MULTILINE)) == 6
    assert re.search(r"^reward .*[▁▂▃▄▅▆▇█]{60} ", text, re.MULTILINE), text

"""The reference pages are those that the code makes now.

Run: pytest tests/docs
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import front_server
from unisono.guard.supervise.child_process import child_environment
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_reference.py", "draw_rooms.py", "make_catalogue.py"])
def test_the_pages_made_from_the_code_are_up_to_date(script: str) -> None:
    """If this fails: python scripts/SCRIPT.

    For make_catalogue.py then translate what it adds: its texts are `msgstr ""`.
    """
    # Forked, as programs are: one of them imports torch.
    command = [sys.executable, "-m", "tests.guard.integrations.launched_programs", str(ROOT / "scripts" / script), "--check"]  # fmt: skip
    with front_server.start_rank(
        command, cwd=ROOT, env=child_environment(threads=1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        _, complaints = process.communicate()
    assert process.returncode == 0, complaints


def test_every_key_is_in_it_with_a_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    for key in all_keys(RunConfig):
        assert not rows[f"`{key}`"].rstrip().endswith("|  |"), f"{key} has no description in the schema"

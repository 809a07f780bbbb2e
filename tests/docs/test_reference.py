"""The reference pages are those that the code makes now.

Run: pytest tests/docs
"""

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.config.schema import RunConfig
from unisono.config.yaml_file import all_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_reference.py", "draw_rooms.py", "make_catalogue.py"])
def test_the_pages_made_from_the_code_are_up_to_date(script: str) -> None:
    """If this fails: python scripts/SCRIPT. For make_catalogue.py then translate what it adds: its texts are `msgstr ""`."""
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_key_is_in_it_with_a_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    for key in all_keys(RunConfig):
        assert not rows[f"`{key}`"].rstrip().endswith("|  |"), f"{key} has no description in the schema"

"""The reference pages are those that the code makes now.

Run: pytest tests/docs
"""

import subprocess
import sys
from pathlib import Path

from unisono.config.describe import all_keys
from unisono.config.schema import RunConfig

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    """If this fails: python scripts/make_reference.py."""
    done = subprocess.run(
        [sys.executable, "scripts/make_reference.py", "--check"],
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

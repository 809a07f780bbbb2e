"""A sum that another rank does not take part in, with real ranks.

Run: pytest tests/trainer/ranks/test_sums.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = str(Path(__file__).with_name("sum_rank.py"))


def _sums(tmp_path: Path, world: int, way: str) -> list[Any]:
    """What each rank prints; None if nothing."""
    command = [sys.executable, _SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "port"), way], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [json.loads(lines) if lines else None for lines in printed]


def test_a_rank_in_another_collective_ends_the_sum_of_the_other(tmp_path: Path) -> None:
    found = _sums(tmp_path, 2, "differs")
    assert "error" in found[0]


def test_a_rank_that_dies_ends_the_sum_of_the_other(tmp_path: Path) -> None:
    found = _sums(tmp_path, 2, "dies")
    assert found[1] is None
    assert "error" in found[0]

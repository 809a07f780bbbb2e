"""Sums of gradients in memory that the ranks of one host share, with real ranks.

Run: pytest tests/ranks/test_sums.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = str(Path(__file__).with_name("sum_rank.py"))
_SHM = Path("/dev/shm")


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


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_added_up_in_shared_memory_in_the_order_of_the_ranks(
    tmp_path: Path, world: int
) -> None:
    found = _sums(tmp_path, world, "shared")
    assert [one["shared"] for one in found] == [1] * world
    assert all(one["ordered"] and one["close"] for one in found)
    if world == 2:
        assert all(one["as_gloo"] for one in found), "a + b = b + a"


def test_all_ranks_use_sockets_if_one_has_no_shared_memory(tmp_path: Path) -> None:
    found = _sums(tmp_path, 2, "refused")
    assert [one["shared"] for one in found] == [0, 0]
    assert all(one["as_gloo"] for one in found)


def test_a_rank_in_another_collective_is_no_party_to_a_sum_in_shared_memory(tmp_path: Path) -> None:
    found = _sums(tmp_path, 2, "differs")
    assert "Detected mismatch between collectives on ranks: rank 0 sums" in found[0]["error"]


def test_a_rank_that_dies_ends_the_sum_of_the_other_and_leaves_no_file(tmp_path: Path) -> None:
    before = _left_memory()
    found = _sums(tmp_path, 2, "dies")
    assert found[1] is None
    assert "error" in found[0]
    assert _left_memory() <= before


def _left_memory() -> set[Path]:
    """Files named as the memory of sums is; runs of other tests have others there meanwhile."""
    return {path for path in _SHM.glob("*unisono-*") if re.search(r"unisono-[0-9a-f]{16}$", path.name)}

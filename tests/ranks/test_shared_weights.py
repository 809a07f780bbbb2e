"""Sharded weights in memory that the ranks of one host share, with real ranks.

Run: pytest tests/ranks/test_shared_weights.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.training import sharding

_ROOT = Path(__file__).parents[2]


def _train(tmp_path: Path, world: int, way: str) -> list[Any]:
    """What each rank prints; None if nothing."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.shared_weights_rank", str(rank), str(world), str(tmp_path / "port"), way],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        for rank in range(world)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [json.loads(lines) if lines else None for lines in printed]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_train_shared_weights_as_one_process_trains_its_own(tmp_path: Path, world: int) -> None:
    found = _train(tmp_path, world, "shared")
    for one in found:
        assert one["shared"]
        assert one["gradients"], "the sum over micro batches and ranks"
        assert one["weights"], "each rank sees what the others have updated"
        assert set(one["none"]) == {"never.weight", "never.bias"}, "the optimizer skips what no rank reaches"


@pytest.mark.parametrize("way", ["refused", "slots"])
def test_all_ranks_shard_with_fsdp2_if_one_has_no_shared_memory(tmp_path: Path, way: str) -> None:
    found = _train(tmp_path, 2, way)
    for one in found:
        assert not one["shared"]
        assert one["gradients"]
        assert one["weights"]


def test_a_rank_in_another_collective_is_no_party_to_a_sum_of_gradients(tmp_path: Path) -> None:
    found = _train(tmp_path, 2, "differs")
    assert "Detected mismatch between collectives on ranks: rank 0 sums bucket" in found[0]["error"]


def test_a_rank_that_dies_ends_the_backward_of_the_other(tmp_path: Path) -> None:
    found = _train(tmp_path, 2, "dies")
    assert found[1] is None
    assert "error" in found[0]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 60),
)
def test_every_row_is_summed_once_by_the_rank_that_updates_it(
    shapes: list[list[int]], world: int, limit: int
) -> None:
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_BUCKET_ELEMENTS", limit)
        buckets = sharding._cut(weights, world)
    assert len(buckets) % 2 == 0
    order = [index for pieces in buckets for index, _ in pieces]
    assert order == sorted(order, reverse=True)
    for index, weight in enumerate(weights):
        for rank, own in enumerate(sharding._rows_of_ranks(len(weight), world)):
            cut = [of_ranks[rank] for pieces in buckets for i, of_ranks in pieces if i == index]
            rows = [row for piece in cut for row in range(piece.start, piece.stop)]
            assert rows == list(range(own.start, own.stop)), "in order, so that they lie side by side"
    for pieces in buckets:
        sizes = [sum(sharding._elements(weights[i], rows) for rows in of_ranks) for i, of_ranks in pieces]
        assert sum(sizes) <= limit or len(sizes) == 1

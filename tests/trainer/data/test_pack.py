"""Packing: every row once, no bin over the limit, almost full, always the same.

Run: .venv/bin/python -m pytest tests/trainer/data/test_pack.py
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.data import grouped
from unisono.trainer.data.build import pack

LENGTHS = st.integers(1, 200).flatmap(
    lambda limit: st.tuples(st.just(limit), st.lists(st.integers(1, limit), max_size=200))
)


@given(LENGTHS)
def test_every_row_is_in_one_bin_and_no_bin_is_over_the_limit(given_: tuple[int, list[int]]) -> None:
    limit, lengths = given_
    bins = pack(lengths, limit=limit)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= limit for rows in bins)


@given(LENGTHS)
def test_no_two_bins_would_fit_into_one(given_: tuple[int, list[int]]) -> None:
    """What best fit promises: else the later of them would have been put into the earlier."""
    limit, lengths = given_
    sums = sorted(sum(lengths[row] for row in rows) for rows in pack(lengths, limit=limit))
    assert len(sums) < 2 or sums[0] + sums[1] > limit


@given(LENGTHS)
def test_the_order_is_that_of_the_rows(given_: tuple[int, list[int]]) -> None:
    limit, lengths = given_
    bins = pack(lengths, limit=limit)
    assert bins == sorted(sorted(rows) for rows in bins)
    assert bins == pack(list(lengths), limit=limit)


def test_realistic_rows_fill_more_than_99_percent() -> None:
    draw = random.Random(0)
    lengths = [min(1024, max(8, round(draw.lognormvariate(5.0, 0.7)))) for _ in range(20_000)]
    bins = pack(lengths, limit=1024)
    assert sum(lengths) / (len(bins) * 1024) > 0.99


def test_a_row_that_is_longer_than_a_bin_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens, more than the limit of 8"):
        pack([3, 9], limit=8)


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
def test_groups_keep_the_order_and_only_a_single_item_may_exceed_the_limit(
    sizes: list[int], most: int
) -> None:
    groups = list(grouped(enumerate(sizes), most=most))
    assert [item for group in groups for item in group] == list(range(len(sizes)))
    totals = [sum(sizes[item] for item in group) for group in groups]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    longer = [total + sizes[after[0]] for total, after in zip(totals, groups[1:], strict=False)]
    assert all(total > most for total in longer), "no group could have been longer"

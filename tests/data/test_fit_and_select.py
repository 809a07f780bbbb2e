"""Rows that are too long, rows for evaluation, rows with a weight: nothing is lost without being counted.

Run: .venv/bin/python -m pytest tests/data/test_fit_and_select.py
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.build import eval_rows, row_repeats
from unisono.data.ingest import fit
from unisono.data.token_table import Encoded

ROWS = st.lists(st.booleans(), min_size=1, max_size=300)


def row(targets: list[bool]) -> Encoded:
    return Encoded(np.arange(len(targets), dtype=np.int32), np.array([False, *targets[1:]], dtype=np.bool_))


@given(ROWS, st.integers(8, 64))
def test_split_trains_every_loss_token_once_and_accounts_for_every_token(
    targets: list[bool], max_length: int
) -> None:
    whole = row(targets)
    fitted = fit(whole, max_length=max_length, too_long="split")
    trained = [token for piece in fitted.pieces for token in piece.ids[piece.targets].tolist()]
    assert trained == whole.ids[whole.targets].tolist()
    assert all(len(piece.ids) <= max_length and not piece.targets[0] for piece in fitted.pieces)
    seen = {token for piece in fitted.pieces for token in piece.ids.tolist()}
    if fitted.pieces:
        assert fitted.tokens_cut == len(whole.ids) - len(seen)


@given(ROWS, st.integers(8, 64))
def test_cut_keeps_the_beginning_and_counts_the_rest(targets: list[bool], max_length: int) -> None:
    whole = row(targets)
    fitted = fit(whole, max_length=max_length, too_long="cut")
    kept = whole.targets[:max_length]
    assert bool(fitted.pieces) == bool(kept.any())
    for piece in fitted.pieces:
        assert piece.ids.tolist() == whole.ids[:max_length].tolist()
        assert fitted.tokens_cut == max(0, len(targets) - max_length)
        assert fitted.what == ("cut" if len(targets) > max_length else "used")


@given(ROWS, st.integers(8, 64))
def test_drop_and_error_take_nothing_of_a_long_row_and_all_of_a_short_one(
    targets: list[bool], max_length: int
) -> None:
    for rule, what in (("drop", "drop"), ("error", "error")):
        fitted = fit(row(targets), max_length=max_length, too_long=rule)  # type: ignore[arg-type]
        assert fitted.what == (what if len(targets) > max_length else "used")
        assert not (len(targets) > max_length and fitted.pieces)


@given(st.integers(1, 500), st.floats(0.001, 0.999), st.integers(0, 2**32 - 1))
def test_the_rows_for_evaluation_depend_on_the_seed_alone(n: int, share: float, seed: int) -> None:
    chosen = eval_rows(n, share=share, seed=seed)
    assert chosen == eval_rows(n, share=share, seed=seed) == sorted(set(chosen))
    assert len(chosen) == max(1, round(share * n))
    assert all(0 <= row < n for row in chosen)


def test_a_different_seed_takes_other_rows_for_evaluation() -> None:
    assert eval_rows(1000, share=0.1, seed=1) != eval_rows(1000, share=0.1, seed=2)


@given(st.integers(0, 300), st.floats(0.01, 5), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_a_weight_reports_how_often_rows_occur(n: int, weight: float, seed: int, source: int) -> None:
    counts = row_repeats(n, weight=weight, seed=seed, source=source)
    assert len(counts) == n
    assert {int(weight), int(weight) + 1} >= set(counts)
    assert abs(sum(counts) - n * weight) <= 0.5 + 1e-6 * n


def test_weight_2_gives_all_rows_twice_and_one_half_gives_half_of_them() -> None:
    assert row_repeats(4, weight=2, seed=0, source=0) == [2, 2, 2, 2]
    assert sorted(row_repeats(4, weight=0.5, seed=0, source=0)) == [0, 0, 1, 1]

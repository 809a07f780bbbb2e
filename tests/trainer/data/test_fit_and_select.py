"""Rows that are too long, rows for evaluation, rows with a weight: nothing is lost without being
counted.

Run: .venv/bin/python -m pytest tests/trainer/data/test_fit_and_select.py
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.config.data_sections import MixSection, SourceSection
from unisono.trainer.data import RowError
from unisono.trainer.data.build import eval_rows, mixed_counts, picked_rows, row_repeats
from unisono.trainer.data.ingest import explain_fit, fit, fit_unit
from unisono.trainer.data.token_table import Encoded, EncodedUnit

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


# A row as its opening, turns of a question and an answer (tokens each), and what follows the last
# answer.
TALKS = st.tuples(
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(0, 3),
)


@given(TALKS, st.integers(8, 64))
def test_keep_answer_keeps_opening_and_last_answer_and_end_of_the_middle(
    talk: tuple[int, list[tuple[int, int]], int], max_length: int
) -> None:
    opening, turns, after = talk
    answer_of: list[int | None] = [None] * opening  # the answer that each token belongs to
    for number, (asked, answered) in enumerate(turns):
        answer_of += [None] * asked + [number] * answered
    answer_of += [None] * after
    whole = row([answer is not None for answer in answer_of])
    last = turns[-1][1]
    prompt = list(range(opening, len(answer_of) - after - last))
    answer = list(range(len(answer_of) - after - last, len(answer_of) - after))
    if len(answer_of) <= max_length:
        fitted = fit(whole, max_length=max_length, too_long="keep-answer", opening=range(opening))
        assert fitted.pieces == [whole]
        return
    room = max_length - opening - last
    if room < 1:
        with pytest.raises(RowError, match=f"its answer alone is too long: {last} tokens, max_length is"):
            fit(whole, max_length=max_length, too_long="keep-answer", opening=range(opening))
        return
    fitted = fit(whole, max_length=max_length, too_long="keep-answer", opening=range(opening))
    kept = prompt[-room:]
    (piece,) = fitted.pieces
    assert piece.ids.tolist() == [*range(opening), *kept, *answer]
    at_cut = answer_of[kept[0]] if kept != prompt else None
    counted = [token for token in kept if answer_of[token] not in (None, at_cut)] + answer
    assert piece.ids[piece.targets].tolist() == counted
    assert (fitted.what, fitted.tokens_cut) == ("cut", len(answer_of) - len(piece.ids))


@given(
    opening=st.integers(0, 2),
    prompt=st.integers(1, 60),
    one=st.integers(1, 40),
    other=st.integers(1, 40),
    max_length=st.integers(8, 64),
    is_pair=st.booleans(),
)
def test_keep_answer_leaves_both_sides_of_a_unit_one_prompt(
    opening: int, prompt: int, one: int, other: int, max_length: int, *, is_pair: bool
) -> None:
    begin = opening + prompt
    sides = tuple(
        Encoded(np.arange(begin + answer, dtype=np.int32), np.arange(begin + answer) >= begin)
        for answer in (one, other)
    )
    unit = EncodedUnit(sides, None if is_pair else True)
    longest = max(one, other) if is_pair else one
    if begin + longest <= max_length:
        room = prompt
    elif (room := max_length - opening - longest) < 1:
        counts = f"chosen {one}, rejected {other} tokens" if is_pair else f"{one} tokens"
        with pytest.raises(RowError, match=f"its answer alone is too long: {counts}"):
            fit_unit(unit, max_length=max_length, too_long="keep-answer", opening=range(opening))
        return
    fitted = fit_unit(unit, max_length=max_length, too_long="keep-answer", opening=range(opening))
    before = [*range(opening), *range(begin - room, begin)]
    for side, answer in zip(fitted.pieces, (one, other), strict=True):
        fits = min(answer, max_length - len(before))
        assert side.ids.tolist() == [*before, *range(begin, begin + fits)]
        assert int(side.targets.sum()) == fits
    assert len(fitted.pieces[0].ids) == len(before) + one
    assert fitted.tokens_cut == 2 * begin + one + other - sum(len(side.ids) for side in fitted.pieces)


def test_a_row_without_an_opening_loses_its_beginning() -> None:
    whole = row([False] * 8 + [True] * 4)
    kept = fit(whole, max_length=8, too_long="keep-answer", opening=[99]).pieces
    assert kept[0].ids.tolist() == list(range(4, 12))


def test_the_words_of_the_ledger_have_the_tokens_of_both_sides() -> None:
    words = explain_fit(
        "cut", lengths=[12, 40], max_length=32, pieces=1, tokens_cut=16, too_long="keep-answer", sides=2
    )
    assert (
        words
        == "chosen 12, rejected 40 tokens, max_length is 32: 16 cut off before the answer, on both sides together"
    )
    assert explain_fit("drop", lengths=[40], max_length=32, pieces=0, tokens_cut=0, too_long="drop") == (
        "40 tokens, max_length is 32"
    )


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


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_a_number_of_rows_for_evaluation_is_that_many(n: int, count: int, seed: int) -> None:
    chosen = eval_rows(n, share=count, seed=seed)
    assert len(set(chosen)) == min(n, count)


SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(1, 200), st.integers(1, 500), st.none() | st.integers(1, 500), SEEDS, st.integers(0, 5))
def test_samples_repeat_a_row_only_beyond_the_number_of_rows(
    n: int, samples: int, rows: int | None, seed: int, source: int
) -> None:
    """Up to that number they are a pick without replacement."""
    section = SourceSection(path="p", samples=samples, rows=rows)
    picked = picked_rows(n, section, seed=seed, source=source).tolist()
    assert picked == picked_rows(n, section, seed=seed, source=source).tolist()
    assert len(picked) == min(samples, rows or samples)
    assert len(set(picked[:n])) == min(len(picked), n)
    assert all(0 <= row < n for row in picked)
    # `rows` keeps the first of the pick
    alone = picked_rows(n, SourceSection(path="p", samples=samples), seed=seed, source=source).tolist()
    assert picked == alone[: len(picked)]


def test_a_different_seed_or_source_picks_other_rows() -> None:
    section = SourceSection(path="p", samples=50)
    picks = {
        tuple(picked_rows(1000, section, seed=seed, source=source).tolist())
        for seed in (0, 1)
        for source in (0, 1)
    }
    assert len(picks) == 4


def test_rows_that_are_drawn_again_are_drawn_evenly() -> None:
    picked = picked_rows(10, SourceSection(path="p", samples=10_010), seed=0, source=0)
    counts = np.bincount(picked, minlength=10)
    # Of 10,000 even draws: the standard deviation of each count is 30.
    assert counts.sum() == 10_010
    assert (abs(counts - 1001) < 5 * 30).all()


SIZES = st.lists(st.integers(1, 60), min_size=2, max_size=5)


def mix(strategy: str, probabilities: list[float] | None = None) -> MixSection:
    return MixSection.model_validate({"strategy": strategy, "probabilities": probabilities})


@given(SIZES, SEEDS)
def test_sources_in_turn(sizes: list[int], seed: int) -> None:
    assert mixed_counts(sizes, mix("concat"), seed=seed) == sizes
    assert mixed_counts(sizes, mix("interleave_once"), seed=seed) == sizes
    assert mixed_counts(sizes, mix("interleave_under"), seed=seed) == [min(sizes)] * len(sizes)
    assert mixed_counts(sizes, mix("interleave_over"), seed=seed) == [max(sizes)] * len(sizes)


@given(SIZES, SEEDS, st.data())
def test_sources_by_probability(sizes: list[int], seed: int, data: st.DataObject) -> None:
    parts = [data.draw(st.integers(1, 9)) for _ in sizes]
    shares = [part / sum(parts) for part in parts]
    under, over, once = (
        mixed_counts(sizes, mix(f"interleave_{name}", shares), seed=seed)
        for name in ("under", "over", "once")
    )
    assert once == sizes
    assert under == mixed_counts(sizes, mix("interleave_under", shares), seed=seed)
    # under: exactly one source is exhausted, and none is taken from beyond its end
    assert all(count <= size for count, size in zip(under, sizes, strict=True))
    assert sum(count == size for count, size in zip(under, sizes, strict=True)) == 1
    # over: all are, and the one that was exhausted last was not begun again
    assert all(count >= size for count, size in zip(over, sizes, strict=True))
    assert any(count == size for count, size in zip(over, sizes, strict=True))


def test_the_probabilities_are_those_of_the_draws() -> None:
    counts = mixed_counts([10_000, 10_000], mix("interleave_under", [0.75, 0.25]), seed=3)
    assert counts[0] == 10_000
    assert abs(counts[1] - 3333) < 5 * 67  # the standard deviation of the number of draws until then


def test_a_source_without_rows_ends_the_turns_at_once_or_is_left_out() -> None:
    for probabilities in (None, [0.5, 0.5]):
        assert mixed_counts([0, 5], mix("interleave_under", probabilities), seed=0) == [0, 0]
        assert mixed_counts([0, 5], mix("interleave_over", probabilities), seed=0) == [0, 5]

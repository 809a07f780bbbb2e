"""A step's sequences are dealt over the ranks evenly, each once.

Run: pytest tests/trainer/plan/test_deal.py
"""

from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.plan import deal

_TOKENS = st.lists(st.integers(0, 5000), max_size=80)
_RANKS = st.integers(1, 20)


@given(tokens=_TOKENS, ranks=_RANKS)
def test_every_sequence_goes_to_exactly_one_rank(tokens: list[int], ranks: int) -> None:
    hands = deal(tokens, ranks=ranks)
    assert len(hands) == ranks
    assert sorted(place for hand in hands for place in hand) == list(range(len(tokens)))


@given(tokens=_TOKENS, ranks=_RANKS)
def test_numbers_of_sequences_differ_by_at_most_one(tokens: list[int], ranks: int) -> None:
    counts = [len(hand) for hand in deal(tokens, ranks=ranks)]
    assert max(counts) - min(counts) <= 1


@given(tokens=_TOKENS)
def test_one_rank_has_all_as_they_stand(tokens: list[int]) -> None:
    assert deal(tokens, ranks=1) == [list(range(len(tokens)))]


@given(tokens=_TOKENS, ranks=_RANKS)
def test_a_ranks_sequences_keep_their_order(tokens: list[int], ranks: int) -> None:
    assert all(hand == sorted(hand) for hand in deal(tokens, ranks=ranks))


@given(tokens=_TOKENS, ranks=_RANKS)
def test_the_same_question_has_the_same_answer(tokens: list[int], ranks: int) -> None:
    assert deal(tokens, ranks=ranks) == deal(tuple(tokens), ranks=ranks)


@given(pairs=st.integers(1, 20), ranks=st.just(2), tokens=st.integers(1, 5000))
def test_equal_sequences_are_shared_equally(pairs: int, ranks: int, tokens: int) -> None:
    hands = deal([tokens] * (pairs * ranks), ranks=ranks)
    assert len({sum(tokens for _ in hand) for hand in hands}) == 1


def test_long_and_short_are_mixed() -> None:
    tokens = [1000, 900, 10, 10, 10, 10]
    sums = [sum(tokens[place] for place in hand) for hand in deal(tokens, ranks=2)]
    assert max(sums) <= 1020, "the two long ones do not meet on one rank"

"""The order of sequences is a function of (seed, epoch) alone, with groups also of these and the
batch, and loses and repeats nothing.

Run: pytest tests/plan
"""

import itertools
import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.trainer.plan import SequenceStream, order_by_group, permutation, steps_for_tokens

FOREVER = [1, 4, 2, 0, 8, 7, 6, 5, 9, 3]
sizes = st.integers(1, 200)
seeds = st.integers(0, 2**32 - 1)
epochs = st.integers(0, 50)


@given(sizes, seeds, epochs)
def test_an_epoch_has_every_sequence_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(n, seed=seed, epoch=epoch)) == list(range(n))


@given(sizes, seeds, epochs)
def test_the_order_depends_on_seed_and_epoch_and_nothing_else(n: int, seed: int, epoch: int) -> None:
    first = permutation(n, seed=seed, epoch=epoch)
    random.seed(1)
    random.random()
    assert permutation(n, seed=seed, epoch=epoch) == first


def test_other_seeds_and_epochs_have_other_orders() -> None:
    orders = {tuple(permutation(50, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_is_the_same_in_a_different_process_and_for_ever() -> None:
    """A literal: whoever changes the order changes every resumed run."""
    assert permutation(10, seed=7, epoch=2) == FOREVER
    program = "from unisono.trainer.plan import permutation; print(permutation(10, seed=7, epoch=2))"
    environment = {"PYTHONHASHSEED": "12345"}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == str(FOREVER)


@given(sizes, seeds, st.integers(1, 40), st.integers(1, 300))
def test_steps_cut_the_stream_without_gap_or_overlap(n: int, seed: int, batch: int, total: int) -> None:
    stream = SequenceStream(n, seed)
    steps = -(-total // batch)
    dealt = [
        s
        for step in range(1, steps + 1)
        for s in stream.step(step, global_batch=batch, total_sequences=total)
    ]
    assert dealt == [SequenceStream(n, seed).at(position) for position in range(total)]
    for epoch in range(total // n):
        assert sorted(dealt[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(sizes, seeds, st.lists(st.integers(0, 2000), max_size=20))
def test_a_stream_may_be_entered_anywhere(n: int, seed: int, positions: list[int]) -> None:
    """Resuming asks for a late position first; what was looked at before does not matter."""
    stream = SequenceStream(n, seed)
    assert [stream.at(position) for position in positions] == [
        SequenceStream(n, seed).at(position) for position in positions
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 12), seeds, epochs)
def test_steps_are_of_one_group_as_far_as_it_goes(
    groups: list[int], batch: int, seed: int, epoch: int
) -> None:
    """Each epoch has every sequence once; a step is mixed only if what is left of the groups makes
    it.
    """
    n, done = len(groups), epoch * len(groups) % batch
    order = order_by_group(permutation(n, seed=seed, epoch=epoch), groups, batch=batch, done=done)
    assert sorted(order) == list(range(n))
    head = (batch - done) % batch
    full = [order[i : i + batch] for i in range(head, n - batch + 1, batch)]
    pure = [step for step in full if len({groups[i] for i in step}) == 1]
    assert len(pure) >= min(len(full), sum(groups.count(group) // batch for group in set(groups)))
    for step in full:  # within a mixed step each group is contiguous, except for whole steps that did not fit
        changes = sum(groups[a] != groups[b] for a, b in itertools.pairwise(step))
        assert changes < 2 * len(set(groups))
    stream = SequenceStream(n, seed, groups, batch)
    assert [stream.at(epoch * n + place) for place in range(n)] == order


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 3000), st.integers(1, 9), seeds)
def test_steps_for_tokens_is_what_counting_one_by_one_gives(
    lengths: list[int], target: int, batch: int, seed: int
) -> None:
    stream, seen, steps = SequenceStream(len(lengths), seed), 0, 0
    while seen < target:
        steps += 1
        seen += sum(lengths[stream.at(position)] for position in range((steps - 1) * batch, steps * batch))
    assert steps_for_tokens(lengths, target=target, global_batch=batch, seed=seed) == steps

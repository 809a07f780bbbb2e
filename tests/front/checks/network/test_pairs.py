"""A slow node is told from a slow link, whatever the network.

Run: pytest tests/front/checks/network/test_pairs.py
"""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from unisono.front.checks.node_speed import ALL_PAIRS_UP_TO, Pair, SlowParts, find_slow, rounds

NODES = st.integers(3, 20)


def speeds(nodes: int, seed: int) -> dict[Pair, float]:
    """A network on which all is well: speeds differ by a fifth."""
    noise = random.Random(seed)
    return {pair: 1e9 * noise.uniform(0.8, 1.0) for pairs in rounds(range(nodes)) for pair in pairs}


@given(st.integers(2, 40))
def test_no_node_has_two_partners_in_a_round_or_the_same_partner_twice(nodes: int) -> None:
    plan = rounds(range(nodes))
    for pairs in plan:
        assert max(Counter(node for pair in pairs for node in pair).values()) == 1
    met = [pair for pairs in plan for pair in pairs]
    assert len(set(met)) == len(met)
    if nodes <= ALL_PAIRS_UP_TO:
        assert len(met) == nodes * (nodes - 1) // 2
    else:
        assert len(plan) <= 3
    if nodes > 2:
        assert min(Counter(node for pair in met for node in pair).values()) >= 2


@given(NODES, st.integers())
def test_where_all_is_well_nobody_is_named(nodes: int, seed: int) -> None:
    assert not find_slow(speeds(nodes, seed))


@given(NODES, st.integers(), st.data(), st.floats(0.0, 0.3))
def test_a_slow_node_is_named_and_no_link(nodes: int, seed: int, data: st.DataObject, share: float) -> None:
    slow = data.draw(st.integers(0, nodes - 1))
    measured = {pair: speed * share if slow in pair else speed for pair, speed in speeds(nodes, seed).items()}
    found = find_slow(measured)
    assert (found.nodes, found.links, found.undetermined) == ((slow,), (), ())


@given(NODES, st.integers(), st.data(), st.floats(0.0, 0.3))
def test_a_slow_link_is_named_and_no_node(nodes: int, seed: int, data: st.DataObject, share: float) -> None:
    measured = speeds(nodes, seed)
    pair = data.draw(st.sampled_from(sorted(measured)))
    measured[pair] *= share
    found = find_slow(measured)
    assert (found.nodes, found.links, found.undetermined) == ((), (pair,), ())


@given(st.integers(6, 20), st.integers(), st.data())
def test_a_slow_node_and_a_slow_link_elsewhere_are_both_named(
    nodes: int, seed: int, data: st.DataObject
) -> None:
    measured = speeds(nodes, seed)
    node = data.draw(st.integers(0, nodes - 1))
    partners = {other for pair in measured if node in pair for other in pair}
    elsewhere = [
        pair
        for pair in sorted(measured)
        if node not in pair and (nodes <= ALL_PAIRS_UP_TO or not partners.intersection(pair))
    ]
    if not elsewhere:
        return
    link = data.draw(st.sampled_from(elsewhere))
    found = find_slow(
        {pair: speed / 10 if node in pair or pair == link else speed for pair, speed in measured.items()}
    )
    assert (found.nodes, found.links) == ((node,), (link,))


@given(NODES, st.integers(), st.permutations(range(20)))
def test_names_of_nodes_do_not_matter(nodes: int, seed: int, order: list[int]) -> None:
    """Only who is slow does."""
    measured = {pair: speed / 10 if 0 in pair else speed for pair, speed in speeds(nodes, seed).items()}
    renamed = {
        (min(order[a], order[b]), max(order[a], order[b])): speed for (a, b), speed in measured.items()
    }
    assert find_slow(renamed).nodes == tuple(order[node] for node in find_slow(measured).nodes)


def test_two_nodes_cannot_be_reported_apart() -> None:
    assert find_slow({(0, 1): 1e6}, usual=1e9) == SlowParts(undetermined=((0, 1),), usual=1e9)
    assert not find_slow({(0, 1): 1e6})


def test_where_everything_is_slow_no_node_is_blamed() -> None:
    found = find_slow(dict.fromkeys([(0, 1), (0, 2), (1, 2)], 1e6), usual=1e9)
    assert (found.nodes, found.links) == ((), ())
    assert len(found.undetermined) == 3

"""Who is the odd one out, and how nodes and ranks are written.

Run: pytest tests/guard/agree/test_groups.py
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.agree.agreement import differing, odd_out, partition
from unisono.guard.agree.reports import Member, freeze, name_all, number_list, show, show_bytes, show_setting


def node(rank: int) -> Member:
    return Member(rank, -1, chr(ord("a") + rank) if rank < 26 else f"n{rank}")


def groups_of(values: Sequence[int]) -> list[int]:
    groups = partition((node(rank), value) for rank, value in enumerate(values))
    return [who.node_rank for who in odd_out(groups)]


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([1, 1, 1], []),
        ([1, 2], []),  # a tie of two
        ([2, 1, 2], [1]),
        ([2, 2, 1, 1], []),  # a tie of two pairs
        ([2, 2, 1, 3, 2], [2, 3]),  # all but a strict majority
        ([1, 1, 2, 2, 3], [4]),  # no majority, one smallest
        ([1, 1, 2, 3], []),  # no majority, two smallest
    ],
)
def test_the_odd_one_is_the_smallest_group_and_nobody_on_a_tie(values: list[int], odd: list[int]) -> None:
    assert groups_of(values) == odd


def test_on_a_tie_a_suspect_is_odd_unless_all_are_suspects() -> None:
    groups = partition([(node(0), 8), (node(1), 2)])
    assert odd_out(groups, suspect=lambda who: who.node_rank == 1) == (node(1),)
    assert odd_out(groups, suspect=lambda _: True) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.randoms())
def test_order_changes_nothing_and_a_strict_majority_is_never_odd(values: list[int], random: object) -> None:
    printed = [(node(rank), value) for rank, value in enumerate(values)]
    shuffled = list(printed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    groups = partition(printed)
    assert groups == partition(shuffled)
    odd = set(odd_out(groups))
    assert len(odd) < len(values)
    for group in groups:
        if 2 * len(group.members) > len(values):
            assert not odd & set(group.members)


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), max_size=4), min_size=1, max_size=6)
)
def test_differing_keys_are_those_that_a_plain_comparison_finds(mappings: list[dict[str, int]]) -> None:
    found = differing([(node(rank), mapping) for rank, mapping in enumerate(mappings)])
    keys = {key for mapping in mappings for key in mapping}
    assert set(found) == {key for key in keys if len({mapping.get(key) for mapping in mappings}) > 1}
    for key, groups in found.items():
        for group in groups:
            assert {mappings[who.node_rank].get(key) for who in group.members} == {group.value}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "node 1 (b)"),
        ([2, 0], "nodes 0 (a) and 2 (c)"),
        ([0, 1, 2], "nodes 0 (a), 1 (b) and 2 (c)"),
        ([*range(512), *range(513, 1024)], "nodes 0–511 and 513–1023"),
        ([*range(0, 40, 2)], "nodes 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([], "nobody"),
    ],
)
def test_nodes_are_named_with_their_host_and_shortened_if_there_are_many(ranks: list[int], text: str) -> None:
    assert name_all(node(rank) for rank in ranks) == text


def test_ranks_are_named_with_node_and_host() -> None:
    assert name_all([Member(1, 3, "b")]) == "rank 3, node 1 (b)"
    assert name_all([Member(1, 3, "b"), Member(1, 2, "b")]) == "ranks 2 and 3, node 1 (b)"
    assert (
        name_all([Member(1, 2, "b"), Member(0, 0, "a"), Member(0, 1, "a")])
        == "ranks 0–2, nodes 0 (a) and 1 (b)"
    )


def test_a_host_name_cannot_steer_a_terminal() -> None:
    assert name_all([Member(0, -1, "\x1b[31mevil\nhost")]) == "node 0 (evil host)"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_list_of_numbers_names_its_first(numbers: set[int]) -> None:
    assert f" {min(numbers)}" in number_list("node", numbers)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "1e-4"), (2.5e-5, "2.5e-5"), (2e-4, "2e-4"), (0.001, "0.001"), (0.0, "0.0"), (1e9, "1e9"), (-3e-7, "-3e-7"),
        (None, "not set"), ("", '""'), ("  ", '"  "'.replace("  ", " ")), (True, "true"), (16, "16"), ("two\nlines", "two lines"),
        ([1, "a", True], "[1, a, true]"), ({"b": 1, "a": None}, "{a: not set, b: 1}"),
    ],
)  # fmt: skip
def test_values_are_shown_shortly_on_one_line(value: object, text: str) -> None:
    assert show(freeze(value)) == text


def test_what_means_the_same_is_the_same_and_a_switch_is_not_a_number() -> None:
    assert freeze(1) == freeze(1.0)
    assert freeze(1) != freeze(True)
    assert freeze([1, [2]]) == freeze((1, (2,)))
    assert freeze({"a": 1, "b": 2}) == freeze({"b": 2, "a": 1})


def test_secrets_are_not_shown_and_long_values_are_cut() -> None:
    assert show_setting("HF_TOKEN", "hf_abc") == "HF_TOKEN (set)"
    assert show_setting("HTTPS_PROXY", "http://me:pw@proxy") == "HTTPS_PROXY (set)"
    assert show_setting("TOKENIZERS_PARALLELISM", "false") == "TOKENIZERS_PARALLELISM=false"
    assert len(show_setting("NCCL_ALGO", "x" * 500)) < 120


def test_bytes_are_shown_in_the_units_of_limits() -> None:
    assert [show_bytes(n) for n in (100, 64 * 2**20, 3 * 2**29, 2**41)] == [
        "100 bytes",
        "64 MiB",
        "1.5 GiB",
        "2.0 TiB",
    ]

"""How nodes and ranks are written in a verdict: always with their host, and shortened where there are many."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.text import one_line

_MANY_NODES = 6  # more are written as ranges of numbers
_MANY_RANGES = 8
_LONGEST_HOST = 60


class Who(NamedTuple):
    """A node, or with `rank` a rank. It sorts by node, then rank."""

    node_rank: int
    rank: int
    """-1: the node as a whole."""
    host: str

    @property
    def is_rank(self) -> bool:
        """Whether a rank is meant, not its whole node."""
        return self.rank >= 0


def plain_host(host: str) -> str:
    """A host's name as it may be shown: one line, bounded."""
    return one_line(host, limit=_LONGEST_HOST) or "?"


def name_node(node_rank: int, host: str) -> str:
    """`node 1 (b)`."""
    return f"node {node_rank} ({plain_host(host)})"


def name_all(everybody: Iterable[Who]) -> str:
    """`node 1 (b)`, `nodes 0 (a) and 2 (c)`, `nodes 0–511 and 513–1023`, `rank 3, node 1 (b)`, `ranks 2 and 3, node 1 (b)`."""
    people = sorted(set(everybody))
    if not people:
        return "nobody"
    nodes = _name_nodes(sorted({(who.node_rank, who.host) for who in people}))
    if not people[0].is_rank:
        return nodes
    ranks = sorted({who.rank for who in people})
    return f"{number_list('rank', ranks)}, {nodes}"


def name_ranks(everybody: Iterable[Who]) -> str:
    """Their numbers alone, `ranks 0 and 3`: where all are on one machine and the host says nothing."""
    return number_list("rank", [who.rank for who in everybody])


def _name_nodes(nodes: Sequence[tuple[int, str]]) -> str:
    if len(nodes) > _MANY_NODES:
        return number_list("node", [rank for rank, _ in nodes])
    words = [f"{rank} ({plain_host(host)})" for rank, host in nodes]
    return f"{'node' if len(words) == 1 else 'nodes'} {enumerate_words(words)}"


def number_list(noun: str, numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `nodes 0–511 and 513–1023`; after a few ranges `and 12 more`."""
    ordered = sorted(set(numbers))
    ranges = _ranges(ordered)
    words = [_range_text(first, last) for first, last in ranges[:_MANY_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_MANY_RANGES:])
    if left:
        words.append(f"{left} more")
    return f"{noun if len(ordered) == 1 else noun + 's'} {enumerate_words(words)}"


def _ranges(ordered: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in ordered:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return [
        part
        for first, last in found
        for part in ([(first, last)] if last != first + 1 else [(first, first), (last, last)])
    ]


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def enumerate_words(words: Sequence[str], *, at_most: int = 0) -> str:
    """`a`, `a and b`, `a, b and c`; with `at_most` the rest is `and 3 more`."""
    shown = list(words)
    if at_most and len(shown) > at_most:
        shown = [*shown[:at_most], f"{len(shown) - at_most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`, `1,024 nodes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def culprit_hosts(everybody: Iterable[Who]) -> tuple[str, ...]:
    """Their hosts, each once, in the order of the nodes."""
    return tuple(dict.fromkeys(plain_host(who.host) for who in sorted(set(everybody))))


def culprit_ranks(everybody: Iterable[Who]) -> tuple[int, ...]:
    """Their ranks, in order; none where whole nodes are meant."""
    return tuple(sorted({who.rank for who in everybody if who.is_rank}))

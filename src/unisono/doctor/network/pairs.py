"""Tells a slow node from a slow link: who measures with whom in which round, and what the speeds mean. Pure.

A node that is slow with every partner is slow itself; a pair that is slow, and both of whose ends are quick with others, has a slow way between
them. So two rounds with different partners are enough, and few nodes measure all pairs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

Pair = tuple[int, int]
"""Two nodes, the lower first."""

ALL_PAIRS_UP_TO = 8
"""Nodes; above that there are two rounds, or three for an odd number, so that each node has two partners at the least."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Who is slow.

    Attributes:
        nodes: slow with every partner.
        links: slow ways between two nodes that are quick with others.
        undetermined: slow pairs of which it cannot be said which.
        usual: the speed that others have.
    """

    nodes: tuple[int, ...] = ()
    links: tuple[Pair, ...] = ()
    undetermined: tuple[Pair, ...] = ()
    usual: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.nodes or self.links or self.undetermined)


def rounds(nodes: Iterable[int]) -> list[list[Pair]]:
    """Who measures with whom: in a round each node has one partner at the most, so that pairs do not disturb each other."""
    places: list[int | None] = [*sorted(nodes)]
    if len(places) < 2:
        return []
    few = len(places) <= ALL_PAIRS_UP_TO
    odd = len(places) % 2
    if odd:
        places.append(None)
    count = len(places) - 1 if few else 2 + odd
    found = []
    for _ in range(count):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]  # the first stays, the others go round
    return found


def tell_apart(speeds: Mapping[Pair, float], *, factor: float = 2.0, usual: float | None = None) -> Slow:
    """Names slow nodes and slow links.

    Args:
        speeds: of each pair that was measured; more is better, 0 is not at all.
        factor: so many times below the usual is slow.
        usual: what is to be expected; None: the upper quartile of what was measured, since with three nodes one slow node makes two of three
            pairs slow, and the median with them.
    """
    if not speeds:
        return Slow()
    ordered = sorted(speeds.values())
    reference = ordered[ceil(0.75 * len(ordered)) - 1] if usual is None else usual
    slow = {pair for pair, speed in speeds.items() if speed * factor < reference}
    partners: dict[int, list[Pair]] = {}
    for pair in speeds:
        for node in pair:
            partners.setdefault(node, []).append(pair)
    nodes = _slow_nodes(partners, slow)
    rest = sorted(pair for pair in slow if not nodes.intersection(pair))
    quick = {node for node, pairs in partners.items() if any(pair not in slow for pair in pairs)}
    links = tuple(pair for pair in rest if quick.issuperset(pair))
    return Slow(tuple(sorted(nodes)), links, tuple(pair for pair in rest if pair not in links), reference)


def _slow_nodes(partners: Mapping[int, list[Pair]], slow: set[Pair]) -> set[int]:
    """Slow with each of two or more partners, of whom one at the least is not like that himself: else it may be the whole network."""
    always = {node for node, pairs in partners.items() if len(pairs) > 1 and slow.issuperset(pairs)}
    return {
        node
        for node in always
        if any(other not in always for pair in partners[node] for other in pair if other != node)
    }

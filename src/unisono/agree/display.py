"""Nodes, ranks and values as text in a verdict: short, on one line, with the host, without secrets."""

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from unisono.text import one_line

_MANY_NODES = 6  # more are written as ranges of numbers
_MANY_RANGES = 8
_LONGEST_HOST = 60


class Member(NamedTuple):
    """A node, or a rank of it. Members sort by node, then rank."""

    node_rank: int
    rank: int
    """-1: the whole node."""
    host: str

    @property
    def is_rank(self) -> bool:
        """Whether this is a rank, not a whole node."""
        return self.rank >= 0


def plain_host(host: str) -> str:
    """A host name for display: one line, of limited length."""
    return one_line(host, limit=_LONGEST_HOST) or "?"


def name_node(node_rank: int, host: str) -> str:
    """`node 1 (b)`."""
    return f"node {node_rank} ({plain_host(host)})"


def name_all(members: Iterable[Member]) -> str:
    """`node 1 (b)`, `nodes 0 (a) and 2 (c)`, `nodes 0–511 and 513–1023`, `rank 3, node 1 (b)`, `ranks 2 and 3, node 1 (b)`."""
    people = sorted(set(members))
    if not people:
        return "nobody"
    nodes = _name_nodes(sorted({(who.node_rank, who.host) for who in people}))
    if not people[0].is_rank:
        return nodes
    ranks = sorted({who.rank for who in people})
    return f"{number_list('rank', ranks)}, {nodes}"


def name_ranks(members: Iterable[Member]) -> str:
    """Ranks without hosts, `ranks 0 and 3`: for members that are all on one machine."""
    return number_list("rank", [who.rank for who in members])


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


def culprit_hosts(members: Iterable[Member]) -> tuple[str, ...]:
    """The members' hosts, each once, in node order."""
    return tuple(dict.fromkeys(plain_host(who.host) for who in sorted(set(members))))


def culprit_ranks(members: Iterable[Member]) -> tuple[int, ...]:
    """The members' ranks, in order; empty for whole nodes."""
    return tuple(sorted({who.rank for who in members if who.is_rank}))


_LONGEST = 80
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PROXY|_KEY$", re.IGNORECASE)


def freeze(value: Any) -> Hashable:
    """A hashable equivalent: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # nan is not even equal to itself
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return ("map", tuple(sorted((str(key), freeze(item)) for key, item in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(freeze(item) for item in value))
    return repr(value)


def show(value: Any) -> str:
    """`value` for people: `1e-4`, `not set`, `"two words"`, cut where it is long."""
    match value:
        case None:
            text = "not set"
        case bool():
            text = str(value).lower()
        case float():
            text = show_float(value)
        case str():
            text = value if value and not value.isspace() else json.dumps(value)
        case ("bool", bool() as flag):
            text = str(flag).lower()
        case ("list", tuple() as items):
            text = f"[{', '.join(show(item) for item in items)}]"
        case ("map", tuple() as items):
            text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in items) + "}"
        case int():
            text = str(value)
        case _:
            text = repr(value)
    return one_line(text, limit=_LONGEST)


def show_float(value: float) -> str:
    """The shortest spelling that reads back as the same number: 0.001, 1e-4, 2.5e-5."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    mantissa = str(digits[0]) + ("." + "".join(map(str, digits[1:])) if len(digits) > 1 else "")
    return f"{'-' if sign else ''}{mantissa}e{exponent + len(digits) - 1}"


def show_setting(name: str, value: str | None) -> str:
    """`NCCL_ALGO=Ring`, `NCCL_ALGO not set`; for a variable that may hold a secret only that it is set."""
    if value is None:
        return f"{name} not set"
    return f"{name} (set)" if holds_secret(name) else f"{name}={show_value(name, value)}"


def show_value(name: str, value: str | None) -> str:
    """The value of an environment variable, hidden if it may be a secret."""
    if value is not None and holds_secret(name):
        return "(set)"
    return show(value)


def holds_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return bool(_SECRET.search(name)) and name not in {"TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy"}


def show_digest(digest: str) -> str:
    """The first characters of a digest, enough to compare two by eye."""
    return one_line(digest, limit=16) or "none"


def show_bytes(amount: int) -> str:
    """`64 MiB`, `1.5 GiB`: a size of memory or disk space in binary units, as limits use them."""
    size = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

"""Packs rows into sequences: best fit decreasing, deterministic. Pure."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], *, limit: int) -> list[list[int]]:
    """Bins of row indices; each row is in one bin, and no bin holds more than `limit` tokens.

    Longer rows are placed first, each in the fullest bin that still takes it. Rows of equal length keep their order,
    a bin lists its rows in order, and bins are ordered by their first row.

    Args:
        lengths: tokens of each row; every one in 1..limit.
        limit: tokens that a bin holds at the most.

    Raises:
        ValueError: if a row is longer than the limit.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free tokens: the bins that have just so many
    rooms: list[int] = []  # the keys of by_room, sorted
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[row]
        if length > limit:
            raise ValueError(f"row {row} has {length} tokens, more than the {limit} of a bin")
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, chosen = limit, len(bins)
            bins.append([])
        bins[chosen].append(row)
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    for rows in bins:
        rows.sort()
    return sorted(bins)

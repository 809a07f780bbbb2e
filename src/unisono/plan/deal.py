"""Which rank takes which sequences of a step. Pure: every rank works it out for itself, and all come to the same."""

import heapq
from collections.abc import Sequence


def deal(tokens: Sequence[int], *, ranks: int) -> list[list[int]]:
    """The places of a step's sequences, dealt over the ranks: as evenly as it goes by number, and within that by tokens.

    Longest first, each goes to the rank with the fewest tokens so far that may still take one (on a tie the lower rank). A rank's
    places are in rising order, so one rank alone has them all as they stand. Where there are fewer sequences than ranks, some have none.

    Args:
        tokens: of each sequence of the step, in its order.
        ranks: how many there are.
    """
    share, longer = divmod(len(tokens), ranks)  # `longer` ranks take one more than the share
    hands: list[list[int]] = [[] for _ in range(ranks)]
    everyone = [(0, rank) for rank in range(ranks)]  # tokens so far, rank: a heap
    below, at_share = (everyone, []) if share else ([], everyone)
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        heap = at_share if longer and at_share and (not below or at_share[0] < below[0]) else below
        longer -= heap is at_share
        held, rank = heapq.heappop(heap)
        hands[rank].append(place)
        entry = (held + tokens[place], rank)
        if len(hands[rank]) < share:
            heapq.heappush(below, entry)
        elif len(hands[rank]) == share:
            heapq.heappush(at_share, entry)
    return [sorted(hand) for hand in hands]

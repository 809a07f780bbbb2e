"""Which sequences make which step, and which rank takes which of them. Pure.

The order is a function of (seed, epoch) alone, never of the world size: every rank computes it, and all get the same.
"""

import hashlib
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field


def permutation(n: int, *, seed: int, epoch: int) -> list[int]:
    """The order of `n` sequences in one epoch.

    Sorted by a key that only `random.Random.random` makes: the one generator whose sequence Python promises to keep.
    """
    material = hashlib.sha256(f"unisono order {seed} {epoch}".encode()).digest()
    draw = random.Random(int.from_bytes(material, "big")).random  # noqa: S311 - an order, not a secret
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


@dataclass
class Stream:
    """The endless stream of sequences: epoch after epoch, each with its own permutation.

    Attributes:
        sequences: how many there are in an epoch.
        seed: the run's seed.
    """

    sequences: int
    seed: int
    _epochs: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def at(self, position: int) -> int:
        """The sequence at a position of the stream, counted from 0."""
        epoch, place = divmod(position, self.sequences)
        return self._epoch(epoch)[place]

    def step(self, step: int, *, global_batch: int, total_sequences: int) -> list[int]:
        """The sequences of optimizer step `step` (from 1); the last step of a run may be short."""
        first = (step - 1) * global_batch
        return [self.at(position) for position in range(first, min(first + global_batch, total_sequences))]

    def _epoch(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = permutation(self.sequences, seed=self.seed, epoch=epoch)
        return self._epochs[epoch]


def steps_for_tokens(lengths: Sequence[int], *, target: int, global_batch: int, seed: int) -> int:
    """The steps after which a run has seen `target` tokens; it ends with the step that reaches them.

    Args:
        lengths: tokens of each sequence.
        target: non-padding input tokens.
        global_batch: sequences of a step.
        seed: the run's seed.
    """
    per_epoch = sum(lengths)
    whole_epochs = max(0, target // per_epoch - 1)
    position = whole_epochs * len(lengths)
    seen = whole_epochs * per_epoch
    stream = Stream(len(lengths), seed)
    while seen < target:
        seen += lengths[stream.at(position)]
        position += 1
    return -(-position // global_batch)


def deal(tokens: Sequence[int], *, ranks: int) -> list[list[int]]:
    """The indices of a step's sequences, distributed over the ranks: evenly by number, and within that evenly by tokens.

    Longest first, each goes to the rank with the fewest tokens so far that may still take one (the lower rank on a tie). A rank's
    indices are ascending, so a single rank has all in order. With fewer sequences than ranks, some ranks have none.

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

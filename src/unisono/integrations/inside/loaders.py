"""What each rank is about to read: counts and a digest of its rows, compared before the first batch where all ranks must have the same.

They must where the program has a sampler deal one data set out over all ranks: then each must hold all of it, in one order. An unseeded
split gives each rank rows of its own, and nobody notices. Where ranks read files of their own nothing is compared.
"""

import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unisono.integrations.inside.here import Here, here
from unisono.integrations.inside.rows import Dealt, dealt_by

_NAMES = ("split", "split_b", "split_c", "split_d")
"""Of the agreements on the first, second … loader: for training, for evaluation."""
_LIMIT_S = 10.0  # others may have more to do before they read; what comes later still ends the run


def hook(module: ModuleType) -> None:
    """Changes torch.utils.data.dataloader."""
    at = here()
    if at is None:
        return
    loader = module.DataLoader
    original = loader.__iter__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    names = iter(_NAMES)

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if self not in seen and at.registration is not None and at.is_main_thread():
            seen.add(self)
            dealt = dealt_by(self)
            if dealt is not None:
                _compare(dealt, at, names)
        return original(self)

    loader.__iter__ = iterate
    # What all of torch's loaders give at iter(); it has no public name, and a test notices if it goes.
    of_batches = getattr(module, "_BaseDataLoaderIter", None)
    if of_batches is not None:
        of_batches.__next__ = _reading(of_batches.__next__, at)


def _reading(original: Callable[[Any], Any], at: Here) -> Callable[[Any], Any]:
    """A sign of life where a batch is asked for, and another where it is there."""

    @functools.wraps(original)
    def read(self: Any) -> Any:
        if at.inside or not at.is_main_thread():
            return original(self)
        at.inside = True
        beats = at.beats
        before = beats.phase
        beats.enter("data")
        try:
            batch = original(self)
            if at.loop.batch(getattr(self, "_dataset", None)):
                beats.take_batch()
            return batch
        finally:
            at.inside = False
            beats.enter(before)

    return read


def _compare(dealt: Dealt, at: Here, names: Any) -> None:
    who = at.registration
    if who is None or not who.grouped or who.world_size < 2 or dealt.replicas != who.world_size:
        return
    name = next(names, None)
    if name is None:
        return
    before = at.beats.phase
    at.phase("agree.ranks")
    answer = at.presence.bring(
        name, dealt.facts, rank=who.rank, world_size=who.world_size, own=dealt.own, limit_s=_LIMIT_S
    )
    at.phase(before)
    if answer is not None and not answer.agreed:
        at.presence.tell("refused", text=answer.text, exit_code=answer.exit_code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(answer.exit_code)  # the program must not go on, nor write over what it has

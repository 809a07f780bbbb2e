"""Counts optimizer steps, by a hook that torch has for it."""

import weakref
from types import ModuleType
from typing import Any

from unisono.integrations.border import own_registration
from unisono.integrations.inside.here import Here, here

_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


def hook(module: ModuleType) -> None:
    """Changes torch.optim.optimizer."""
    at = here()
    if at is not None:
        module.register_optimizer_step_post_hook(Counting(at))


class Counting:
    """Counts the steps of the first optimizer that makes one: where there are several, a step is one of that.

    A process that nothing has called a rank is the only one of its program once it trains: launchers load torch, too, and never step.
    """

    def __init__(self, at: Here) -> None:
        self._at = at
        self._first: weakref.ref[Any] | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has made a step."""
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
            if not self._at.is_rank:
                self._at.become(own_registration(_ALONE))
        if self._first() is optimizer:
            self._at.stepped()

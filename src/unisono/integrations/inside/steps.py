"""Counts optimizer steps, by a hook that torch has for it; at the first one it is known who trains."""

import sys
import weakref
from collections.abc import Container
from types import ModuleType
from typing import Any

from unisono.integrations.border import own_registration
from unisono.integrations.inside.here import Here, here

_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
_FRAMEWORKS = {
    "llamafactory": "llamafactory.train",
    "axolotl": "axolotl.train",
    "torchtune": "torchtune.training",
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
    "trl": "trl.trainer.utils",
    "transformers": "transformers.trainer",
}
"""A module of each that is loaded where it trains, and not where a program takes something else from it; first those that use others."""


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
            if framework := framework_in(sys.modules):
                self._at.tell("framework", name=framework)
        if self._first() is optimizer:
            self._at.stepped()


def framework_in(modules: Container[str]) -> str:
    """Whose loop it is, as diagnose.gather calls it; empty where it is the program's own, or not known.

    Args:
        modules: that the process has loaded.
    """
    found = next((name for name, module in _FRAMEWORKS.items() if module in modules), "")
    return "lightning" if found == "pytorch_lightning" else found

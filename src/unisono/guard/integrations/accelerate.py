"""Accelerate's Accelerator with a check that ranks agree on data and number of batches, and with
progress reports.

>>> from unisono.guard.integrations.accelerate import Accelerator
"""

from dataclasses import replace
from typing import Any

import accelerate

from unisono.guard.integrations.trainer_callback import CallbackReporter, TrainerFacts, read_loader


class Accelerator(accelerate.Accelerator):
    """An Accelerator whose `prepare` of a model or optimizer compares the loaders of all ranks, and
    which reports steps and phases.

    It does not change the training: it draws no random number, calls no collective, reads no value
    from a device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unisono = CallbackReporter()
        self._unisono_steps = 0
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as Accelerate does; with a model or an optimizer among `args`, all ranks compare
        the loaders in `args`.

        Loaders that are prepared alone are not compared: a program may do that on one rank only.

        Raises:
            Disagreed: on every rank, with the same message.
        """
        prepared = super().prepare(*args, device_placement=device_placement)
        parts = prepared if isinstance(prepared, tuple) else (prepared,)
        loaders = [one for one in parts if _is_loader(one)]
        optimizers = [one for one in parts if hasattr(one, "zero_grad") and hasattr(one, "param_groups")]
        for optimizer in optimizers:
            self._report_steps_of(optimizer)
        if loaders and len(loaders) < len(parts):
            self.agree(*loaders)
        return prepared

    def agree(self, *loaders: Any, steps: int | None = None) -> None:
        """Compares these loaders on all ranks, and the number of optimizer steps if given; all
        ranks must call it.

        Raises:
            Disagreed: on every rank, with the same message.
        """
        for facts in [read_loader(loader) for loader in loaders] or [TrainerFacts()]:
            self._unisono.begin(replace(facts, steps=steps))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Accelerate's backward."""
        self._unisono.phase("compute")
        super().backward(loss, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's save_state."""
        self._unisono.phase("save")
        saved = super().save_state(*args, **kwargs)
        self._unisono.phase("data")
        return saved

    def _report_steps_of(self, optimizer: Any) -> None:
        """Uses torch's own hooks: Accelerate calls the optimizer only when a step is due."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(plain, "register_step_post_hook"):
            return  # DeepSpeed's
        plain.register_step_pre_hook(lambda *_: self._unisono.phase("update"))
        plain.register_step_post_hook(lambda *_: self._made_step())

    def _made_step(self) -> None:
        self._unisono_steps += 1
        self._unisono.step(self._unisono_steps + 1)
        self._unisono.phase("data")


def _is_loader(thing: Any) -> bool:
    return hasattr(thing, "dataset") and hasattr(thing, "__iter__")

"""Several adapters on one base model: how they are put on it, and which one computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.trainer.families.text.input_files import adapter_settings
from unisono.trainer.plan.task_requests import NamedAdapter
from unisono.trainer.task.target import Target, find_target, verify_target


@dataclass(frozen=True)
class PlacedAdapter:
    """An adapter that shares its base model with others.

    Attributes:
        name: for clients.
        target: its files.
        key: its name in the peft model, where names have no dots.
    """

    name: str
    target: Target
    key: str


def find_adapters(
    adapters: Sequence[NamedAdapter], base: Target, report: Reporter, *, first: int = 0
) -> tuple[PlacedAdapter, ...]:
    """Finds and verifies adapters of a base model; their keys are numbered from `first`.

    Raises:
        UsageError: if `base` is not a base model, or one is not a finished adapter of it.
        ModelError, IntegrityError: as `find_target` and `verify_target`.
    """
    if base.source != "model":
        raise UsageError.of(
            f"{base.name} already has an adapter",
            where="--adapter",
            why="several adapters share a base model without one",
            fix=f"serve the base model {base.base}, and name this one, too: --adapter NAME={base.name}",
        )
    placed = []
    for number, adapter in enumerate(adapters, first):
        target = find_target(adapter.target, base=str(base.base))
        if target.source != "adapter":
            raise UsageError.of(
                f"{adapter.target} is not a finished adapter",
                where=f"--adapter {adapter.name}",
                fix=f"write it with `unisono export {adapter.target} OUT`, and name OUT",
            )
        _refuse_different_base(adapter, target, base)
        verify_target(target, report)
        placed.append(PlacedAdapter(adapter.name, target, f"adapter{number}"))
    return tuple(placed)


def _refuse_different_base(adapter: NamedAdapter, target: Target, base: Target) -> None:
    named = adapter_settings(target.weights).get("base_model_name_or_path")
    if isinstance(named, str) and Path(named).is_dir() and Path(named).resolve() != base.base.resolve():
        raise UsageError.of(
            f"{adapter.target} was trained on a different base model",
            where=f"--adapter {adapter.name}",
            why=f"its adapter_config.json names {named}, and {base.base} is served",
            fix="serve it on its own base model",
        )


class AdapterSwitch:
    """Lets one adapter of a model compute, or none."""

    def __init__(self, model: Any, keys: Sequence[str]) -> None:
        """A switch of a peft model with these adapters; of any model without any."""
        self._model = model
        self._keys = list(keys)
        self._active: str | None = "unknown"

    def activate(self, key: str | None) -> None:
        """Lets an adapter compute; None: the base model alone."""
        if not self._keys or key == self._active:
            return
        self._active = key
        if key is None:
            self._model.base_model.disable_adapter_layers()
            return
        self._model.base_model.enable_adapter_layers()
        self._model.set_adapter(key)
        self._model.requires_grad_(False)

    def add(self, model: Any, key: str) -> None:
        """An adapter has been put on the model, which is a peft model now."""
        self._model = model
        self._keys.append(key)
        self._active = "unknown"

    def remove(self, key: str) -> None:
        """Takes an adapter off the model."""
        self.activate(None)  # peft would activate a different one
        self._keys.remove(key)
        self._model.delete_adapter(key)
        self._active = "unknown"

"""Callbacks for other trainers, each imported on first use, with the library that it is for.

from unisono.integrations import TransformersCallback   # Hugging Face Trainer, TRL
from unisono.integrations import LightningCallback
from unisono.integrations import Accelerator            # in place of accelerate's
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.guard.integrations.accelerate import Accelerator
    from unisono.guard.integrations.lightning import LightningCallback
    from unisono.guard.integrations.transformers import TransformersCallback

__all__ = ["Accelerator", "LightningCallback", "TransformersCallback"]

_MODULES = {
    "Accelerator": "accelerate",
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
}


def __getattr__(name: str) -> Any:
    """Imports a callback."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.guard.integrations.{_MODULES[name]}"), name)

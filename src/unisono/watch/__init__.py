"""Detects stalls while a run is active, and finds the rank that causes them.

The names are loaded on first access: a rank of a foreign program needs only `unisono.watch.beat`, which is of the standard
library alone, and starts without what the judge needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.watch.beat import PHASES, Beats, Phase, Pulse, phase_named
    from unisono.watch.views import (
        Beat,
        BeatMemory,
        Collective,
        Look,
        NodeView,
        ProcessView,
        RankView,
        RunView,
        Suspicion,
    )

__all__ = [
    "PHASES",
    "Beat",
    "BeatMemory",
    "Beats",
    "Collective",
    "Look",
    "NodeView",
    "Phase",
    "ProcessView",
    "Pulse",
    "RankView",
    "RunView",
    "Suspicion",
    "phase_named",
]
_HOME = {
    "beat": ("PHASES", "Beats", "Phase", "Pulse", "phase_named"),
    "views": (
        "Beat",
        "BeatMemory",
        "Collective",
        "Look",
        "NodeView",
        "ProcessView",
        "RankView",
        "RunView",
        "Suspicion",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:  # each name has its own type, see the imports above
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)

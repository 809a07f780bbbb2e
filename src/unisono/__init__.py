"""unisono: fine-tune language models; nodes agree before a run starts, and a failed run reports its
cause.

    config = unisono.Config.from_file("train.yaml", {"optim.lr": 1e-4})
    result = unisono.train(config, nproc=2)
    model, tokenizer = unisono.load(result)

Names are imported on first use: `import unisono` is quick, and only `load` and `Objective` import
torch.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.base.causes.verdict import Verdict
    from unisono.base.errors import (
        ConfigError,
        DataError,
        Disagreed,
        EndedByVerdict,
        IntegrityError,
        ModelError,
        Problem,
        RankDied,
        UnfitError,
        UnisonoError,
        UsageError,
    )
    from unisono.front.api import Result
    from unisono.front.api.calls import Config, Diagnosis, Report, diagnose, doctor, stream, train
    from unisono.front.api.front import (
        Checkpoint,
        Ended,
        Evaluation,
        Event,
        Failed,
        Notice,
        Phase,
        Planned,
        Sample,
        Started,
        Step,
        Stream,
    )
    from unisono.front.api.loading import load
    from unisono.guard.integrations.inside.guarded_process import guarded
    from unisono.trainer.batches.source import Counts, Micro
    from unisono.trainer.model.forward import Forward
    from unisono.trainer.objectives.objective import Objective, Part

__version__ = "0.1.0"

_PLACES = {
    "unisono.front.api.calls": ("Config", "Diagnosis", "Report", "diagnose", "doctor", "stream", "train"),
    "unisono.front.api.front": (
        *("Checkpoint", "Ended", "Evaluation", "Event", "Failed", "Notice", "Phase", "Planned"),
        *("Sample", "Started", "Step", "Stream"),
    ),
    "unisono.front.api.loading": ("load",),
    "unisono.front.api": ("Result",),
    "unisono.trainer.batches.source": ("Counts", "Micro"),
    "unisono.base.causes.verdict": ("Verdict",),
    "unisono.base.errors": (
        *("ConfigError", "DataError", "Disagreed", "EndedByVerdict", "IntegrityError", "ModelError"),
        *("Problem", "RankDied", "UnfitError", "UnisonoError", "UsageError"),
    ),
    "unisono.guard.integrations.inside.guarded_process": ("guarded",),
    "unisono.trainer.model.forward": ("Forward",),
    "unisono.trainer.objectives.objective": ("Objective", "Part"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [  # noqa: RUF022 - in the order of use
    "Config",
    "train",
    "Result",
    "stream",
    "Stream",
    "Event",
    "Planned",
    "Started",
    "Phase",
    "Step",
    "Evaluation",
    "Sample",
    "Checkpoint",
    "Notice",
    "Failed",
    "Ended",
    "load",
    "doctor",
    "Report",
    "diagnose",
    "Diagnosis",
    "Verdict",
    "UnisonoError",
    "UsageError",
    "ConfigError",
    "DataError",
    "ModelError",
    "Disagreed",
    "EndedByVerdict",
    "RankDied",
    "UnfitError",
    "IntegrityError",
    "Problem",
    "Objective",
    "Forward",
    "Micro",
    "Counts",
    "Part",
    "guarded",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports a public name; nobody pays for names that are not used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _CALLED_ROOMS:  # what the name means does not depend on what has been imported
        return importlib.import_module(f"unisono.{name}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_CALLED_ROOMS = ("train", "doctor", "diagnose")
"""Names of public functions that rooms have, too. Importing a module of such a room replaces the
package's attribute.
"""


class _CalledRoom(ModuleType):
    """A room that is the public function of its name when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        function: Callable[..., Any] = getattr(importlib.import_module(_MODULES[name]), name)
        return function


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED_ROOMS and isinstance(value, ModuleType):  # the import system binds the room
            value.__class__ = _CalledRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

"""unisono: fine-tune language models; nodes agree before a run starts, and a failed run reports its
cause.

    config = unisono.Config.from_file("train.yaml", {"optim.lr": 1e-4})
    result = unisono.train(config, nproc=2)
    model, tokenizer = unisono.load(result)

Names are imported on first use: `import unisono` is quick, and only `load` and `Objective` import
torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from unisono.base._version import __version__

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
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError:
        from unisono.base.requirements import refuse_without_trainer

        refuse_without_trainer(f"unisono.{name}")
        raise
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The user's code that a config refers to: `FILE.py:CLASS`, or a model repository's code."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MODEL_CODE = {"/transformers_modules/": "the model's own code (model.trust_remote_code)"}
"""Python code of a model's repository: its name, by the folder to which transformers copies it."""


def own_class(name: str) -> tuple[Path, str] | None:
    """File and class of a `FILE.py:CLASS`; None for any other name."""
    path, colon, kind = name.rpartition(":")
    return (Path(path), kind) if colon and path.endswith(".py") else None


FUNCTIONS_OF = ("reward", "metric")
"""What of the user's own is a function, and called in processes of its own."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A class, or the function of a reward or metric, of the user's own that a config names.

    Attributes:
        key: of the config; that of a reward is `rewards.` and its index.
        what: objective, optimizer, reward, metric or environment.
        path: of the file.
        name: of the class or function.
    """

    key: str
    what: str
    path: Path
    name: str


def own_code(
    *,
    objective: str,
    optimizer: str,
    rewards: Sequence[str] = (),
    metrics: Sequence[str] = (),
    environment: str = "",
) -> list[OwnCode]:
    """The user's own classes and functions among values of a config."""
    values = [("objective", "objective", objective), ("optim.kind", "optimizer", optimizer)]
    values += [(f"rewards.{number}", "reward", reward) for number, reward in enumerate(rewards)]
    values += [(f"eval.metrics.{number}", "metric", metric) for number, metric in enumerate(metrics)]
    values.append(("rollout.environment.use", "environment", environment))
    return [
        OwnCode(key, what, *class_parts) for key, what, value in values if (class_parts := own_class(value))
    ]


def execute_source(code: OwnCode, source: bytes) -> ModuleType:
    """The module of a file, from its source.

    Raises:
        Exception: what the file raises; see `unisono.trainer.config.own_code.refusing`.
    """
    module = ModuleType(f"unisono_{code.what}_{code.path.stem}")
    module.__file__ = str(code.path)
    sys.modules[module.__name__] = module  # where dataclasses look for their annotations
    exec(compile(source, str(code.path), "exec"), vars(module))  # noqa: S102 - trusted with --trust-code
    return module

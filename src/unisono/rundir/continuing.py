"""Whether a run that goes on is still the same: its data, its model, and what its exactness rests on.

The config's digest is equal by then (see start). But files behind the same names may have changed meanwhile, and then a
run that went on would learn from other rows, or go on with weights that were never its own.
"""

from typing import Any

from unisono.errors import Problem, UsageError
from unisono.files import read_object
from unisono.rundir.layout import RunDir
from unisono.text import one_line

_MUST_STAY = {
    "data.digest": (
        "the rows, their order or the tokenizer are not those that the run began with",
        "data.train",
    ),
    "model.digest": ("the model's files are not those that the run began with", "model.path"),
}
_EXACT = {
    "threads": "set OMP_NUM_THREADS={0} to have the same again",
    "dtype": "set model.dtype to {0} to have the same again",
    "device.kind": "set device to {0} to have the same again",
    "device.name": "",
    "micro_batch": "set batch.micro to {0} to have the same again",
    "gradient_checkpointing": "",
    "world_size": "",
}
_PACKAGES = ("python", "torch", "transformers", "peft", "tokenizers", "numpy", "unisono")


def check_same_run(run: RunDir, plan: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Compares a new plan with the one in the run's directory, before that is written over.

    Args:
        run: whose last start left plan.json and environment.json.
        plan: the object of the new plan.json.
        versions: of the packages that are installed now.

    Returns:
        A line for each change that costs bit-equality.

    Raises:
        UsageError: if the data or the model are others.
    """
    lines = refuse_changed_plan(read_object(run.plan), plan)
    packages = read_object(run.environment).get("packages")
    return lines + (changed_packages(packages, versions) if isinstance(packages, dict) else [])


def refuse_changed_plan(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Refuses to go on with other data or another model; gives a line for each change that costs bit-equality.

    Args:
        before: the object of plan.json of the start that the run goes on from.
        after: that of the new one.

    Raises:
        UsageError: with everything that must stay and has changed.
    """
    problems = [
        Problem(
            why, key, f"digest {_shown(old)} then, {_shown(new)} now",
            "put the files back, or set another output_dir, or pass --fresh: it sets this run aside",
        )
        for dotted, (why, key) in _MUST_STAY.items()
        if (old := _at(before, dotted)) != (new := _at(after, dotted))
    ]  # fmt: skip
    if problems:
        raise UsageError(*problems)
    lines = []
    for dotted, remedy in _EXACT.items():
        old, new = _at(before, dotted), _at(after, dotted)
        if old != new:
            fix = f"; {remedy.format(_shown(old))}" if remedy else ""
            lines.append(
                f"{dotted} is {_shown(new)}, and was {_shown(old)}: losses agree to rounding, not to the bit{fix}"
            )
    return lines


def changed_packages(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each package that numbers depend on and whose version is another one.

    Args:
        before: versions by package, as in environment.json of the earlier start.
        after: those of this one.
    """
    return [
        f"{name} is {_shown(after.get(name))}, and was {_shown(before.get(name))}: losses may not agree to the bit"
        for name in _PACKAGES
        if before.get(name) != after.get(name)
    ]


def _at(value: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _shown(value: object) -> str:
    return "none" if value is None else one_line(str(value), limit=60)

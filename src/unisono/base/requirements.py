"""The packages of the trainer, which `pip install 'unisono[train]'` installs, and the error if one
is missing.

`pip install unisono` alone brings the guard and the fronts, so that it changes no package of an
environment that another trainer owns.
"""

import re
from functools import cache
from importlib import metadata

from unisono.base.errors import UsageError

INSTALL_TRAINER = "pip install 'unisono[train]'"
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:[^;]*?>=([\d.]+))?[^;]*; extra == ['"]train['"]""")


@cache
def missing_trainer_packages() -> list[str]:
    """What the trainer lacks here, e.g. `torch` or `transformers>=5.0 (4.57.6 is installed)`, by
    unisono's own metadata; nothing where it runs without being installed.

    A version above those that pip would choose is not reported: it may be a choice of the user.
    """
    try:
        lines = metadata.requires("unisono") or []
    except metadata.PackageNotFoundError:
        return []
    missing = []
    for name, lowest in [match.groups("0") for line in lines if (match := _REQUIREMENT.fullmatch(line))]:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
        else:
            if _numbers(version) < _numbers(lowest):
                missing.append(f"{name}>={lowest} ({version} is installed)")
    return missing


def refuse_without_trainer(where: str) -> None:
    """Refuses a command that needs the trainer, before anything else is done.

    Raises:
        UsageError: if a package of the trainer is missing, or older than the trainer supports.
    """
    if missing := missing_trainer_packages():
        raise UsageError.of(
            "the trainer is not installed here",
            where=where,
            why=f"missing: {', '.join(missing)}",
            fix=INSTALL_TRAINER,
        )


def _numbers(version: str) -> list[int]:
    """`2.13.0+cpu` as `[2, 13, 0]`."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]

"""What an environment variable of distributed training is: data, from which `explain` and the docs page are made."""

from dataclasses import dataclass
from typing import Literal

Group = Literal["equal", "unique", "per-node", "free"]

GROUP_MEANING: dict[Group, str] = {
    "equal": "must be equal on all ranks",
    "unique": "is set by the launcher and differs by design",
    "per-node": "may differ between nodes, and must be right on each",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable, with what a person needs to know before setting or keeping it.

    Attributes:
        name: as it is written in the environment.
        group: whether ranks must agree on it.
        meaning: what it does.
        suspicious: values or situations that call for a second look; empty if there are none.
        causes: ids of the catalogue that a wrong value can lead to.
    """

    name: str
    group: Group
    meaning: str
    suspicious: str = ""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """What it costs to set a variable, and when that is right.

    Attributes:
        costs: what a run pays while it is set as `explain` says.
        right: when to set it, and how long to leave it set.
    """

    costs: str
    right: str


@dataclass(frozen=True, slots=True)
class Takes:
    """Which values a variable has.

    Attributes:
        text: for people: `0 or 1`.
        pattern: a whole value, in any case.
        otherwise: what comes of another value.
        fatal: whether a process group with NCCL cannot be made with another value.
    """

    text: str
    pattern: str
    otherwise: str = "it is silently ignored"
    fatal: bool = False

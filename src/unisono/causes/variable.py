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

"""The environment variables that affect how ranks find each other and communicate: when they are
suspicious, which values they take, what they cost.

The table is in variables.toml.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.base.causes.entries import read_table

Group = Literal["equal", "unique", "per-node", "free"]

GROUP_MEANING: dict[Group, str] = {
    "equal": "must be equal on all ranks",
    "unique": "differs by design; the launcher sets it",
    "per-node": "may differ between nodes, and must be valid on each node",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable, with what to know before setting it.

    Attributes:
        name: as in the environment.
        group: whether ranks must agree on it.
        meaning: what it does.
        suspicious: values or situations to check; empty if there are none.
        causes: ids of the causes that a wrong value can lead to.
    """

    name: str
    group: Group
    meaning: str
    suspicious: str = ""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """The cost of setting a variable, and when to set it.

    Attributes:
        costs: the cost while it is set.
        right: when to set it, and how long to leave it set.
    """

    costs: str
    right: str


@dataclass(frozen=True, slots=True)
class ValidValues:
    """The valid values of a variable.

    Attributes:
        text: for people: `0 or 1`.
        pattern: matches a complete value, case-insensitive.
        otherwise: the effect of a different value.
        fatal: whether a different value prevents the creation of an NCCL process group.
    """

    text: str
    pattern: str
    otherwise: str = "it is silently ignored"
    fatal: bool = False


_TABLE = read_table(Path(__file__).with_name("variables.toml"))

KNOWN_TO_LIBRARIES = frozenset[str](_TABLE["known_to_libraries"])
"""Valid names without a description here. Nodes on which they differ are compared as for unknown
names.
"""

VARIABLES = tuple(
    Variable(name, **{key: row[key] for key in ("group", "meaning", "suspicious", "causes") if key in row})
    for name, row in _TABLE["variables"].items()
)
"""In the order in which `explain` lists them."""

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def find_variable(name: str) -> Variable | None:
    """The entry of this environment variable, or None; lower case is understood."""
    return _BY_NAME.get(name.upper())


def _valid_values(values: str | dict[str, Any]) -> ValidValues:
    return ValidValues(**(_TABLE["kinds"][values] if isinstance(values, str) else values))


VALUES = {name: _valid_values(row["values"]) for name, row in _TABLE["variables"].items() if "values" in row}
"""By name; matched whole, in any case."""

ADVICE = {
    name: Advice(row["costs"], row["right"]) for name, row in _TABLE["variables"].items() if "costs" in row
}
"""By name. What is not in it costs nothing worth a word, or is nobody's to set by hand."""

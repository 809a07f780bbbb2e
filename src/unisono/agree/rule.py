"""What one line of the table of agreement says."""

from dataclasses import dataclass
from typing import Literal

Need = Literal["equal", "unique", "valid", "free"]

NEED_MEANING: dict[Need, str] = {
    "equal": "must be equal everywhere",
    "unique": "must be unique",
    "valid": "may differ, and must be right on each node",
    "free": "may differ freely",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that nodes or ranks bring to the table, and what is asked of it.

    Attributes:
        id: of the check in agreement.json.
        subject: what is looked at, for people.
        need: equal, unique, valid or free.
        violated: what comes of it where it does not hold; `warn` is said and the run starts.
        cause: id of the catalogue.
        remedy: what to do; `{who}` is the odd one, `{key}` what differs, `{value}` what most have,
            `{choices}` what one may decide for where there is no majority.
        absent: what to do where most have none of it.
    """

    id: str
    subject: str
    need: Need
    violated: Literal["fail", "warn"]
    cause: str
    remedy: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

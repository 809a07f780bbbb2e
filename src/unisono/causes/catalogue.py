"""The catalogue of causes. Ids are stable; texts are for people."""

from unisono.causes import before, during, files, joining, machine, program
from unisono.causes.cause import Cause

ALL_CAUSES: tuple[Cause, ...] = (
    *before.CAUSES,
    *joining.CAUSES,
    *during.CAUSES,
    *program.CAUSES,
    *machine.CAUSES,
    *files.CAUSES,
)
"""In the order in which `explain` lists them."""

CATALOGUE: dict[str, Cause] = {cause.id: cause for cause in ALL_CAUSES}


def find_cause(cause_id: str) -> Cause | None:
    """The entry with this id, or None."""
    return CATALOGUE.get(cause_id)

"""The catalogue of causes. Ids are stable; texts are for people."""

from unisono.causes.cause import Cause

_CAUSES: tuple[Cause, ...] = (
    Cause(
        "nan_loss", "the loss or its gradient is not a number", "…", (), (), (), 4, False, ("during", "after"),
    ),
)  # fmt: skip

CATALOGUE: dict[str, Cause] = {cause.id: cause for cause in _CAUSES}


def find_cause(cause_id: str) -> Cause | None:
    """The entry with this id, or None."""
    return CATALOGUE.get(cause_id)

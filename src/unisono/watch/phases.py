"""What a rank can be doing: a fixed table, so that a beat carries a number."""

from dataclasses import dataclass
from typing import Literal

Share = Literal["data", "compute", "comm", "other"]
"""To which part of a step its time is counted."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a rank does.

    Attributes:
        name: as in messages, verdicts and the table of ranks.
        text: what it does, for people: "rank 1 is …".
        share: of a step's time.
        in_step: whether it is part of an optimizer step, and comes back every few milliseconds or seconds; how long others last is not
            known before they have been seen.
        waits: whether the rank waits for others in it, and is a victim where it does not come back.
    """

    name: str
    text: str
    share: Share = "other"
    in_step: bool = False
    waits: bool = False


PHASES: tuple[Phase, ...] = (
    Phase("start", "starting"),
    Phase("load_model", "loading the model"),
    Phase("load_data", "opening the data"),
    Phase("agree.ranks", "waiting for the word that all ranks agree", waits=True),
    Phase("join", "joining the other ranks", waits=True),
    Phase("resume", "reading the checkpoint"),
    Phase("rehearse", "trying the longest batch"),
    Phase("data", "reading its batch", share="data", in_step=True),
    Phase("compute", "in forward and backward", share="compute", in_step=True),
    Phase("comm", "in a collective", share="comm", in_step=True, waits=True),
    Phase("update", "updating the weights", share="compute", in_step=True),
    Phase("log", "writing metrics", in_step=True),
    Phase("evaluate", "evaluating"),
    Phase("sample", "writing sample answers"),
    Phase("save", "saving a checkpoint"),
    Phase("finish", "writing the result"),
    Phase("close", "leaving"),
    # Of somebody else's program nothing more is known than that it is not in a collective that was called from Python.
    Phase("program", "in the program's own code", in_step=True),
)

_NUMBERS = {phase.name: number for number, phase in enumerate(PHASES)}


def phase_named(name: str) -> int:
    """The number of a phase. Names that only people read, as of a phase that a newer worker has, count as "start".

    A rank must never fail over what it says of itself.
    """
    return _NUMBERS.get(name, 0)

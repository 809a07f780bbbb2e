"""What a signature is: a line of somebody's log that means something, as data."""

import functools
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["warning", "error", "consequence", "progress", "finished", "death"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of line, and what it says. It is a hint and never a verdict: the same words stand in healthy logs, and in those of victims.

    Attributes:
        id: the stable name.
        hints: strings of which the line must hold at least one; looked for first, since that is quick.
        pattern: a regular expression that is searched in the line. Every repetition in it is bounded and none is inside another one,
            so that its time is bounded, too.
        kind: warning: perhaps harmless; error: something failed here; consequence: somebody else failed, and this rank was told so or
            waited in vain; progress: work goes on; finished: the work is done; death: how a process ended, as its launcher tells it.
        cause: an id of the catalogue that it points to; None: to none in particular.
        source: whose wording it is, with the version or the address where it can be read.
        example: a line that it must match.
        look_alike: a line of the same field that it must not match.
        beside: ids of signatures of other causes that match the example, too.
    """

    id: str
    hints: tuple[str, ...]
    pattern: str
    kind: Kind
    cause: str | None
    source: str
    example: str
    look_alike: str
    beside: tuple[str, ...] = ()


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Made when first needed: most runs never need most of them."""
    return re.compile(pattern)

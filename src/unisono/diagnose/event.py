"""Events: what a line of a log says, who says it, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["warning", "error", "consequence", "progress", "finished", "death", "fact"]


@dataclass(frozen=True, slots=True)
class Who:
    """Whom a line speaks of, as far as it says so itself. None: it does not say.

    Attributes:
        rank: the global rank.
        host: the host's name or address, as written.
        local_rank: the rank on its host.
        pid: the process.
        node_rank: the number of the host.
    """

    rank: int | None = None
    host: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    node_rank: int | None = None


NOBODY = Who()


@dataclass(frozen=True, slots=True)
class Event:
    """A line that means something.

    Attributes:
        source: the name of the log, as it is shown.
        line: its number, from 1; only line feeds count, as in an editor.
        order: a number that grows along the source; pieces of one line have numbers of their own.
        signature: the id of the signature that the line has, or of the part of diagnose that made the event.
        kind: what kind of line it is.
        cause: an id of the catalogue that it points to; None: to none in particular.
        text: the line without its prefixes, control characters and secrets.
        who: whom it speaks of.
        time: seconds since 1970 by the host's clock read as if it were UTC; None: the line has none.
        fields: what was read from it: numbers and names, as text.
    """

    source: str
    line: int
    order: int
    signature: str
    kind: EventKind
    cause: str | None
    text: str
    who: Who = NOBODY
    time: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """The rank that it speaks of."""
        return self.who.rank

    @property
    def where(self) -> str:
        """As `file:line`."""
        return f"{self.source}:{self.line}"

    def number(self, name: str) -> int | None:
        """The field as a whole number, or None where it is absent or is none."""
        text = self.fields.get(name) or ""
        return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else None

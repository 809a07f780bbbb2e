"""A row on its way from a file to the model: where it stands, what it holds, why it is refused."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A message of a conversation in OpenAI's form: role, content, tool_calls."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands. Lines and rows are counted from 1.

    Attributes:
        file: as the config spells it.
        number: the line, or for files without lines the row.
        by_line: whether `number` is a line.
    """

    file: str
    number: int
    by_line: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.by_line else f"{self.file}#{self.number}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file has it: names of columns and their values."""

    place: Place
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: the row.
        why: one line.
        fix: what the user can do about it.
        column: of the character at which reading failed, from 1; 0 where there is none.
    """

    place: Place
    why: str
    fix: str = ""
    column: int = 0

    @property
    def where(self) -> str:
        """`file:line` or `file:line:column`."""
        return f"{self.place}:{self.column}" if self.column else str(self.place)


class RowError(Exception):
    """What is wrong with one row, raised where its place is not known."""

    def __init__(self, why: str, fix: str = "", *, column: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix
        self.column = column

    def at(self, place: Place) -> BadRow:
        """The same as a bad row of a place."""
        return BadRow(place, self.why, self.fix, self.column)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template renders."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its answer as plain strings."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text without parts."""

    text: str


Example = Conversation | Completion | Text

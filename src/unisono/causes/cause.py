"""What a cause is: data, from which `explain`, the docs page and the error texts are made."""

from dataclasses import dataclass
from typing import Literal


class Ours(str):
    """A line of a remedy that holds only for a run of `unisono train`: it names a key of its config, or promises how it resumes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why training fails, with what a person needs to know about it.

    Attributes:
        id: the stable name, for example `nan_loss`.
        title: one line.
        meaning: what it is, in two or three sentences.
        telltales: how it shows: exact wordings in logs, or what one sees.
        neighbours: other causes that look alike, each with how to tell it apart: (id, difference).
        remedy: what to do, in order; commands and keys as they are typed. Lines for our own runs alone are `Ours`.
        exit_code: the exit code of a run that ends with it (DESIGN A2), 0 for a mere warning.
        retry_helps: whether starting again from the last checkpoint can help.
        when: where it can be found: before, during, after.
    """

    id: str
    title: str
    meaning: str
    telltales: tuple[str, ...]
    neighbours: tuple[tuple[str, str], ...]
    remedy: tuple[str, ...]
    exit_code: int
    retry_helps: bool
    when: tuple[Literal["before", "during", "after"], ...]

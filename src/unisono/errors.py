"""The exception tree. The class says when, the instance holds the data, the exit code is part of the class (DESIGN A2)."""

from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from unisono.causes import Verdict
from unisono.text import one_line, plain


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: what it is, where it is, why it is refused, and how to mend it. One line each."""

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """Up to four plain lines for a terminal."""
        lines = [f"error: {one_line(self.what)}"]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':<6} {one_line(text)}")
        return lines


class UnisonoError(Exception):
    """What a person must be told: one or more problems, without a traceback.

    Attributes:
        exit_code: the exit code of a program that ends with it.
        problems: all that was found, not only the first.
        verdict: the same as a Verdict, where there is a cause in the catalogue.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *problems: Problem, verdict: Verdict | None = None) -> None:
        self.problems = problems
        self.verdict = verdict
        super().__init__("; ".join(problem.what for problem in problems))

    @classmethod
    def of(
        cls, what: str, *, where: str = "", why: str = "", fix: str = "", verdict: Verdict | None = None
    ) -> Self:
        """An error with one problem."""
        return cls(Problem(what, where, why, fix), verdict=verdict)

    def lines(self) -> list[str]:
        """Everything as plain lines."""
        return [plain(line) for problem in self.problems for line in problem.lines()]

    def to_json(self) -> dict[str, object]:
        """For a message to the front: the exit code and the problems."""
        verdict = self.verdict.to_json() if self.verdict else None
        return {
            "exit_code": self.exit_code,
            "problems": [asdict(p) for p in self.problems],
            "verdict": verdict,
        }


class UsageError(UnisonoError):
    """The command line is off, or the moment is: nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """The config is refused."""


class DataError(UsageError):
    """The data are refused: a file, a row, a template."""


class ModelError(UsageError):
    """The model or its tokenizer is refused: files missing, shapes off, unknown type."""


class Disagreed(UnisonoError):  # noqa: N818 - named for what happened
    """Ranks or nodes disagree, one is missing, or one refused after the call: nothing was trained.

    Attributes:
        said: whether its verdict has been shown already, by who had to say it before waiting for others to hear it.
    """

    exit_code = 3
    said: bool = False


class UnfitError(UnisonoError):
    """The machine is not fit, or storage failed."""

    exit_code = 6


class IntegrityError(UnisonoError):
    """Damage was found, or no intact checkpoint where one was needed."""

    exit_code = 7


class EndedByVerdict(UnisonoError):  # noqa: N818 - named for what happened
    """The run was ended by a verdict while its ranks lived."""

    exit_code = 4


class RankDied(UnisonoError):  # noqa: N818 - named for what happened
    """A rank ended by itself: an exception, a signal, out of memory."""

    exit_code = 5

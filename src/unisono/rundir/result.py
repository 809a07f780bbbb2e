"""How a start ended: result.json and verdict.json, and the verdicts of earlier starts."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from unisono.causes import Verdict
from unisono.files import make_private_dir, read_json, write_json
from unisono.rundir.layout import RunDir
from unisono.rundir.metrics import without_nan

Outcome = Literal[
    "completed",
    "refused",
    "disagreed",
    "stalled",
    "died",
    "unfit",
    "corrupt",
    "preempted",
    "interrupted",
    "failed",
]


class Restart(BaseModel):
    """One time that the run went on by itself.

    Attributes:
        verdict: after which.
        from_step: from which.
        seconds: for how long the ranks had run.
        cost_s: from the verdict to the first step that was made after it; null where none was.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    verdict: dict[str, Any]
    from_step: int
    seconds: float
    cost_s: float | None = None


class RunResult(BaseModel):
    """The object of result.json (DESIGN A3). A field of a newer version is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", serialize_by_alias=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    run_id: str = ""
    outcome: Outcome
    exit_code: int
    output_dir: str = ""
    step: int = 0
    tokens: int = 0
    """Input tokens since step 1, padding excluded."""
    loss: float | None = None
    eval: dict[str, Any] = {}
    tokens_per_second: float | None = None
    checkpoint: str | None = None
    weights: str | None = None
    """adapter/ or model/, once the run is completed."""
    verdict: dict[str, Any] | None = None
    problems: list[dict[str, str]] = []
    """What a refusal said."""
    restarts: list[Restart] = []
    wall_time_s: float = 0.0

    @property
    def is_completed(self) -> bool:
        """Whether the run came to its planned end."""
        return self.outcome == "completed"

    def to_json(self) -> dict[str, Any]:
        """The object of result.json; what is not a number is null."""
        exclude = None if self.problems else {"problems"}
        body: dict[str, Any] = without_nan(self.model_dump(mode="python", exclude=exclude))
        return body

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Reads what to_json wrote.

        Raises:
            pydantic.ValidationError: if it is no result.
        """
        return cls.model_validate(value)


def write_result(run: RunDir, result: RunResult) -> None:
    """Writes result.json, whole or not at all."""
    write_json(run.result, result.to_json(), mode=0o600)


def read_result(run: RunDir) -> RunResult | None:
    """How the last start ended; None if it has not, or the file cannot be read."""
    try:
        return RunResult.from_json(read_json(run.result))
    except (OSError, ValueError):
        return None


def set_verdict(run: RunDir, verdict: Verdict | None) -> None:
    """Makes verdict.json that of this start; an earlier one goes to verdicts/, and with None no new one takes its place."""
    if run.verdict.exists():
        make_private_dir(run.verdicts)
        run.verdict.rename(_next_number(run.verdicts))
    if verdict is not None:
        write_json(run.verdict, verdict.to_json(), mode=0o600)


def complete_verdict(run: RunDir, verdict: Verdict) -> None:
    """Puts what has been found out since into this start's verdict.json."""
    write_json(run.verdict, verdict.to_json(), mode=0o600)


def _next_number(directory: Path) -> Path:
    """0001.json, or what comes after the highest that is there."""
    numbers = [int(path.stem) for path in directory.glob("*.json") if path.stem.isdecimal()]
    return directory / f"{max(numbers, default=0) + 1:04d}.json"

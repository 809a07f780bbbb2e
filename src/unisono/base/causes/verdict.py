"""The types of this room: Cause, an entry of the catalogue, and Verdict, a finding before, during
or after a run; and the exit codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator

from unisono.base.text import one_line, plain


class OwnRunOnly(str):
    """A line of a remedy that applies only to `unisono train`, e.g. because it names a config
    key.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a failed run, with what to know about it.

    Attributes:
        id: the stable name, for example `nan_loss`.
        title: one line.
        meaning: an explanation in two or three sentences.
        telltales: symptoms: exact log lines, or observations.
        neighbours: similar causes, each with the difference: (id, difference).
        remedy: how to fix it, in order, with exact commands and keys. Lines for `unisono train`
            alone are `OwnRunOnly`.
        exit_code: the exit code of a run that ends with it, 0 for a warning.
        retry_helps: whether a restart from the last checkpoint can help.
        when: when it can be detected: before, during, after.
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


EXIT_CODES: dict[int, str] = {
    0: "completed",
    1: "a bug in unisono: the traceback is shown; please report it",
    2: "invalid usage, config or data: nothing was started",
    3: "ranks or nodes disagree, or a node is missing: nothing was trained",
    4: "stopped by unisono: a hang, or a NaN loss",
    5: "a rank exited by itself: an exception, a signal, out of memory",
    6: "the machine is not fit for the run, or storage failed",
    7: (
        "damage was found, the written result is not the trained model, or no valid checkpoint exists where"
        " one is needed"
    ),
    75: "preempted (SIGTERM, SIGUSR1) with a valid checkpoint: run the same command again",
    130: "interrupted from the keyboard, with a valid checkpoint",
}


class Evidence(BaseModel):
    """One observation: where it was made, and the text that shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: str
    text: str


class Verdict(BaseModel):
    """A finding, as in verdict.json. `ranks` and `hosts` are the culprits, never the victims."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_: Literal[1] = 1
    cause: str
    when: Literal["before", "during", "after"]
    severity: Literal["fatal", "warning", "none"] = "fatal"
    summary: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    phase: str | None = None
    step: int | None = None
    evidence: tuple[Evidence, ...] = ()
    fix: tuple[str, ...] = ()
    confidence: float = 1.0
    named_after_s: float | None = None

    @field_validator("summary")
    @classmethod
    def _summary_is_one_line(cls, text: str) -> str:
        return one_line(text)

    def to_json(self) -> dict[str, object]:
        """Returns the JSON object of verdict.json."""
        body = self.model_dump(mode="json")
        body.pop("schema_")
        return {"schema": 1, **body}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Reads an object that `to_json` returned.

        Raises:
            pydantic.ValidationError: if it is not a verdict.
        """
        return cls.model_validate({k: v for k, v in value.items() if k != "schema"})

    def lines(self) -> list[str]:
        """Returns the verdict as plain lines: WHAT, WHO, DETECTED, EVIDENCE, FIX.

        No colour, no wrapping.
        """
        who = [f"rank {rank}" for rank in self.ranks] + [f"host {plain(host)}" for host in self.hosts]
        lines = [f"WHAT      {self.summary}  [{self.cause}]"]
        if who:
            lines.append(f"WHO       {', '.join(who)}")
        if detected := self._detected():
            lines.append(f"DETECTED  {detected}")
        lines += [f"EVIDENCE  {one_line(item.where)}: {one_line(item.text)}" for item in self.evidence]
        lines += [f"FIX       {one_line(item)}" for item in self.fix]
        return lines

    def _detected(self) -> str:
        """After how many seconds and where, e.g. `after 3.3 s (phase compute, step 48)`; empty if
        neither is known.
        """
        parts = [f"phase {self.phase}"] if self.phase else []
        parts += [f"step {self.step}"] if self.step is not None else []
        position = ", ".join(parts)
        if self.named_after_s is None:
            return position and f"{'in' if self.phase else 'at'} {position}"
        after = f"after {self.named_after_s:.1f} s"
        return f"{after} ({position})" if position else after

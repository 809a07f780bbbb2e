"""The Verdict: what is wrong, who it is, the evidence, and what to do. One type for before, during and after."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator

from unisono.text import one_line, plain


class Evidence(BaseModel):
    """One observation: where it was made, and the text that shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: str
    text: str


class Verdict(BaseModel):
    """A finding in the form of DESIGN A4. `ranks` and `hosts` are culprits, never victims."""

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
        """The JSON object of DESIGN A4."""
        body = self.model_dump(mode="json")
        body.pop("schema_")
        return {"schema": 1, **body}

    @classmethod
    def from_json(cls, value: dict[str, object]) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            pydantic.ValidationError: if it is no verdict.
        """
        return cls.model_validate({k: v for k, v in value.items() if k != "schema"})

    def lines(self) -> list[str]:
        """The verdict in plain lines: WHAT, WHO, DETECTED, EVIDENCE, FIX. No colour, no wrapping."""
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
        """After how many seconds and where, e.g. `after 3.3 s (phase compute, step 48)`; empty if neither is known."""
        parts = [f"phase {self.phase}"] if self.phase else []
        parts += [f"step {self.step}"] if self.step is not None else []
        place = ", ".join(parts)
        if self.named_after_s is None:
            return place and f"{'in' if self.phase else 'at'} {place}"
        after = f"after {self.named_after_s:.1f} s"
        return f"{after} ({place})" if place else after

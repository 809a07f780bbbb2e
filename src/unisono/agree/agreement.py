"""What came of looking at all reports: every check with its status, and a verdict for each thing that is wrong."""

from dataclasses import dataclass, field
from typing import Any, Self

from unisono.agree.report import Check, Status
from unisono.causes import Verdict


@dataclass(frozen=True)
class Agreement:
    """Checks and verdicts. The first fatal verdict is the decisive one; all are kept."""

    checks: list[Check] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    """Fatal ones first, each kind in the order of judgement."""

    @classmethod
    def noted(cls, check_id: str, status: Status, text: str, *, where: str = "", fix: str = "") -> Self:
        """One check without a verdict."""
        return cls([Check(id=check_id, status=status, text=text, where=where, fix=fix)])

    @classmethod
    def found(cls, check_id: str, verdict: Verdict, *, where: str = "") -> Self:
        """One check that failed (a fatal verdict) or warns (a mere warning)."""
        status: Status = "fail" if verdict.severity == "fatal" else "warn"
        fix = verdict.fix[0] if verdict.fix else ""
        check = Check(id=check_id, status=status, text=verdict.summary, where=where, fix=fix)
        return cls([check], [verdict])

    @property
    def fatal(self) -> list[Verdict]:
        """The verdicts that forbid a start, the decisive one first."""
        return [verdict for verdict in self.verdicts if verdict.severity == "fatal"]

    @property
    def warnings(self) -> list[Verdict]:
        """The verdicts that are only said."""
        return [verdict for verdict in self.verdicts if verdict.severity != "fatal"]

    @property
    def agreed(self) -> bool:
        """Whether nothing forbids a start. A check that could not be made does not forbid it; it is listed as unknown."""
        return not self.fatal

    def with_status(self, *status: Status) -> list[Check]:
        """The checks that ended so."""
        return [check for check in self.checks if check.status in status]

    def merged(self, *others: "Agreement") -> "Agreement":
        """This one's checks and verdicts, then the others', with all fatal verdicts first."""
        all_of_them = (self, *others)
        return Agreement(
            checks=[check for one in all_of_them for check in one.checks],
            verdicts=[verdict for one in all_of_them for verdict in one.fatal]
            + [verdict for one in all_of_them for verdict in one.warnings],
        )

    def to_json(self) -> dict[str, Any]:
        """For agreement.json: how many checks ended how, all of them, and the verdicts."""
        counts = {status: len(self.with_status(status)) for status in ("pass", "warn", "fail", "unknown")}
        return {
            "agreed": self.agreed,
            "counts": counts,
            "checks": [check.to_json() for check in self.checks],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }

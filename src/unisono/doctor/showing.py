"""The report as a table of plain text that a person can paste into an issue. Pure."""

import platform
from collections.abc import Iterator

from unisono import __version__
from unisono.doctor.check import AREAS, Finding, Status
from unisono.doctor.examining import Examination

_STATUS: dict[Status, str] = {"pass": "pass", "warn": "WARN", "fail": "FAIL", "unknown": "?"}
_WIDTH = 26
_INDENT = " " * 9


def lines(examination: Examination) -> list[str]:
    """All lines: area by area, then what to do, then how many of each."""
    shown = [heading(examination)]
    for area, title in AREAS.items():
        findings = [finding for finding in examination.findings if finding.id.partition(".")[0] == area]
        if findings:
            shown += ["", title, *(line for finding in findings for line in _rows(finding))]
    return [*shown, "", closing(examination)]


def heading(examination: Examination) -> str:
    """Which machine, and with what it was looked at."""
    return f"unisono {__version__} doctor on {examination.host}: Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"


def _rows(finding: Finding) -> Iterator[str]:
    """One line for the finding, one for each row of its table, and what to do."""
    first, *rest = finding.evidence
    where = f"{finding.where}: " if finding.where else ""
    yield f"  {_STATUS[finding.status]:<6} {finding.id:<{_WIDTH}} {where}{first}"
    yield from (f"{_INDENT}{row}" for row in rest)
    if finding.status != "pass":
        yield from (f"{_INDENT}do: {line}" for line in finding.fix)


def closing(examination: Examination) -> str:
    """How many of each; what it comes to."""
    counts = {
        "passed": examination.number_of("pass"), "warn": examination.number_of("warn"), "failed": examination.number_of("fail"),
        "could not be looked at": examination.number_of("unknown"),
    }  # fmt: skip
    said = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{len(examination.findings)} checks: {said}"

"""One doctor run: the table of all checks, the examination that runs them side by side, and its
report.
"""

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TypedDict

from unisono.base._version import __version__
from unisono.base.causes import Verdict
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.text import plain, redact
from unisono.front.checks.check import (
    AREAS,
    Area,
    CheckFunction,
    DoctorCheck,
    DoctorRequest,
    Finding,
    FindingJson,
    Status,
    Surroundings,
    read_local_run,
    read_surroundings,
)
from unisono.front.checks.config_checks import CATALOGUE as NEEDS
from unisono.front.checks.config_checks import CHECKS as NEEDS_CHECKS
from unisono.front.checks.device_checks import CATALOGUE as DEVICES
from unisono.front.checks.device_checks import CHECKS as DEVICES_CHECKS
from unisono.front.checks.ladder_attempts import CATALOGUE as LADDER
from unisono.front.checks.ladder_attempts import CHECKS as LADDER_CHECKS
from unisono.front.checks.machine_checks import CATALOGUE as SYSTEM
from unisono.front.checks.machine_checks import CHECKS as SYSTEM_CHECKS
from unisono.front.checks.machine_checks import NETWORK_CHECKS, SETTINGS, SETTINGS_CHECKS
from unisono.front.checks.network_rules import CATALOGUE as NETWORK
from unisono.front.checks.node_trials import CATALOGUE as PEERS
from unisono.front.checks.node_trials import compare_nodes, disagreement_findings
from unisono.guard.facts import read_environment, take_token
from unisono.guard.rendezvous.party import BackgroundWork
from unisono.guard.rendezvous.remote_fronts import token_of_step
from unisono.jobs.runs.planning import party_of, report_early_refusal

REGISTRY: tuple[tuple[Area, tuple[CheckFunction, ...]], ...] = (
    ("system", SYSTEM_CHECKS),
    ("settings", SETTINGS_CHECKS),
    ("config", NEEDS_CHECKS),
    ("devices", DEVICES_CHECKS),
    ("network", (*NETWORK_CHECKS, *LADDER_CHECKS)),
)
"""In display order; areas run concurrently."""

CATALOGUE: tuple[DoctorCheck, ...] = (
    *SYSTEM,
    *SETTINGS,
    *NEEDS,
    *DEVICES,
    *NETWORK,
    *LADDER,
    *PEERS,
)
"""All checks."""


UNFIT = 6
_LONGEST_LINE = 600


class ReportJson(TypedDict):
    """The object of `unisono doctor --json`."""

    schema: int
    checks: list[FindingJson]


@dataclass(frozen=True)
class Examination:
    """Result of a doctor run.

    Attributes:
        findings: of all checks, area by area.
        verdict: why the nodes do not agree, in a job of several.
        agreed: whether they do; if not and without a verdict, the findings say why.
    """

    host: str
    findings: list[Finding] = field(default_factory=list)
    verdict: Verdict | None = None
    agreed: bool = True

    def number_of(self, status: Status) -> int:
        """Number of findings with this status."""
        return sum(finding.status == status for finding in self.findings)

    def to_json(self) -> ReportJson:
        """The object of `unisono doctor --json`."""
        return {"schema": 1, "checks": [finding.to_json() for finding in self.findings]}

    def exit_code(self, *, strict: bool) -> int:
        """0; 6 if a check failed, with `strict` also if one warns or is unknown; 3 if the nodes do
        not agree.
        """
        if self.verdict is not None or not self.agreed:
            return 3
        bad: tuple[Status, ...] = ("fail", "warn", "unknown") if strict else ("fail",)
        return UNFIT if any(self.number_of(status) for status in bad) else 0


def examine(request: DoctorRequest) -> Examination:
    """Checks this machine; with several nodes each checks itself, then they meet.

    Raises:
        ConfigError: with every problem of the config.
        UsageError: if the options contradict each other or the machine.
    """
    environment = read_environment()
    token = take_token() or token_of_step(environment)
    try:
        local_run = read_local_run(request, environment)
        topology, host = local_run.local_node.topology, local_run.local_node.machine.host
        party = (
            party_of(request, topology, host=host, token=token, show=request.show)
            if topology.nodes > 1
            else None
        )
    except UnisonoError as error:
        report_early_refusal(request, environment, error, token=token, show=request.show)
        raise
    findings = redacted(run_checks(read_surroundings(request, local_run)))
    if party is None:
        return Examination(host, findings)
    try:
        return Examination(
            host,
            redacted(compare_nodes(request, local_run, findings, party)),
        )
    except Disagreed as error:
        if error.verdict is None:
            raise
        return Examination(host, redacted([*findings, *disagreement_findings(error)]), error.verdict)


def run_checks(facts: Surroundings) -> list[Finding]:
    """Findings of all areas, which run concurrently: a check that waits for a disk or a name server
    does not delay the others.

    On an interrupt nothing waits for these threads, and their tasks end with this process.
    """
    areas = [BackgroundWork(partial(_run_area, checks, facts)) for _, checks in REGISTRY]
    return [finding for area in areas for finding in area.result()]


def _run_area(checks: Sequence[CheckFunction], facts: Surroundings, _show: object) -> list[Finding]:
    return [finding for check in checks for finding in check(facts)]


def redacted(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without secrets and without terminal control characters: people paste them into
    issues.
    """
    return [
        replace(
            finding,
            id=plain(finding.id),
            where=_redacted_text(finding.where),
            evidence=tuple(map(_redacted_text, finding.evidence)),
            fix=tuple(map(_redacted_text, finding.fix)),
        )
        for finding in findings
    ]


def _redacted_text(text: str) -> str:
    flat = plain(text).replace("\n", " ")  # spaces are kept: some lines are rows of a table
    return redact(flat if len(flat) <= _LONGEST_LINE else f"{flat[: _LONGEST_LINE - 1]}…")


# ---- the report, as text and as HTML

_STATUS_WORDS: dict[Status, str] = {"pass": "pass", "warn": "WARN", "fail": "FAIL", "unknown": "?"}
_WIDTH = 26
_INDENT = " " * 9


def report_lines(examination: Examination) -> list[str]:
    """All lines of the report: area by area, then the summary."""
    shown = [heading(examination)]
    for area, title in AREAS.items():
        findings = [finding for finding in examination.findings if finding.id.partition(".")[0] == area]
        if findings:
            shown += ["", title, *(line for finding in findings for line in _text_rows(finding))]
    return [*shown, "", summary_line(examination)]


def heading(examination: Examination) -> str:
    """Machine, versions and platform."""
    return (
        f"unisono {__version__} doctor on {examination.host}: Python {platform.python_version()},"
        f" {platform.system()} {platform.release()} {platform.machine()}"
    )


def _text_rows(finding: Finding) -> Iterator[str]:
    """One line for the finding, one for each row of its table, and its fixes."""
    first, *more = finding.evidence
    where = f"{finding.where}: " if finding.where else ""
    yield f"  {_STATUS_WORDS[finding.status]:<6} {finding.id:<{_WIDTH}} {where}{first}"
    yield from (f"{_INDENT}{row}" for row in more)
    if finding.status != "pass":
        yield from (f"{_INDENT}fix: {line}" for line in finding.fix)


def summary_line(examination: Examination) -> str:
    """Number of findings by status."""
    counts = {
        "passed": examination.number_of("pass"),
        "warn": examination.number_of("warn"),
        "failed": examination.number_of("fail"),
        "unknown": examination.number_of("unknown"),
    }
    totals = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{len(examination.findings)} checks: {totals}"


def html_page(examination: Examination, *, made: str) -> str:
    """The report as one HTML page.

    Args:
        examination: with findings that are already redacted.
        made: date and time as text.
    """
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>unisono doctor: {escape(examination.host)}</title><style>{style}</style>",
        (
            "<h1>unisono doctor:"
            f" {escape(examination.host)}</h1><p>{escape(heading(examination))}<br>{escape(made)}</p>"
        ),
        f"<p><strong>{escape(summary_line(examination))}</strong></p>",
    ]
    if examination.verdict is not None:
        parts.append(f"<p class=fail>{escape(examination.verdict.summary)}</p>")
    for area, title in AREAS.items():
        findings = [finding for finding in examination.findings if finding.id.partition(".")[0] == area]
        if findings:
            parts += [f"<h2>{escape(title)}</h2><table>", *map(_html_row, findings), "</table>"]
    return "\n".join(parts) + "\n"


def _html_row(finding: Finding) -> str:
    check = _CHECKS.get(finding.id)
    title = f"<br><small>{escape(check.title)}: {escape(check.why)}</small>" if check else ""
    where = f"<br>{escape(finding.where)}" if finding.where else ""
    evidence = "\n".join(map(escape, finding.evidence))
    fix = (
        "".join(f"<li><code>{escape(line)}</code>" for line in finding.fix)
        if finding.status != "pass"
        else ""
    )
    return (
        "<tr><td"
        f" class={finding.status}>{finding.status.upper()}<td><code>{escape(finding.id)}</code>{title}{where}"
        f"<td><pre>{evidence}</pre>{f'<ol>{fix}</ol>' if fix else ''}"
    )


_CHECKS = {check.id: check for check in CATALOGUE}

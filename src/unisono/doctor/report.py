"""The report as plain text for a terminal or an issue, and as one self-contained HTML page. Pure."""

import platform
from collections.abc import Iterator
from html import escape

from unisono import __version__
from unisono.doctor.check import AREAS, Finding, Status
from unisono.doctor.examination import CATALOGUE, Examination

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
    return f"unisono {__version__} doctor on {examination.host}: Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"


def _text_rows(finding: Finding) -> Iterator[str]:
    """One line for the finding, one for each row of its table, and its fixes."""
    first, *rest = finding.evidence
    where = f"{finding.where}: " if finding.where else ""
    yield f"  {_STATUS_WORDS[finding.status]:<6} {finding.id:<{_WIDTH}} {where}{first}"
    yield from (f"{_INDENT}{row}" for row in rest)
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
    said = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{len(examination.findings)} checks: {said}"


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin-bottom:1.5rem}td,th{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #ddd}
code,pre{font:13px/1.4 ui-monospace,monospace;white-space:pre-wrap;margin:0}.pass{color:#1a6e36}.warn{color:#8a5a00}.fail{color:#b00020;font-weight:700}.unknown{color:#666}
small{color:#555}@media(prefers-color-scheme:dark){body{background:#16181b;color:#ddd}td,th{border-color:#333}small{color:#aaa}.pass{color:#6fcf8f}.warn{color:#e0b050}.fail{color:#ff6b7d}}
"""


def html_page(examination: Examination, *, made: str) -> str:
    """The report as one HTML page.

    Args:
        examination: with findings that are already redacted.
        made: date and time as text.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>unisono doctor: {escape(examination.host)}</title><style>{_STYLE}</style>",
        f"<h1>unisono doctor: {escape(examination.host)}</h1><p>{escape(heading(examination))}<br>{escape(made)}</p>",
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
        f"<tr><td class={finding.status}>{finding.status.upper()}<td><code>{escape(finding.id)}</code>{title}{where}"
        f"<td><pre>{evidence}</pre>{f'<ol>{fix}</ol>' if fix else ''}"
    )


_CHECKS = {check.id: check for check in CATALOGUE}

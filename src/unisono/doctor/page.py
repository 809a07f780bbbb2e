"""The report as one self-contained HTML page: no script, no link to anything but our own words. Pure."""

from html import escape

from unisono.doctor.check import AREAS, Finding
from unisono.doctor.examining import Examination
from unisono.doctor.registry import CATALOGUE
from unisono.doctor.showing import closing, heading

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin-bottom:1.5rem}td,th{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #ddd}
code,pre{font:13px/1.4 ui-monospace,monospace;white-space:pre-wrap;margin:0}.pass{color:#1a6e36}.warn{color:#8a5a00}.fail{color:#b00020;font-weight:700}.unknown{color:#666}
small{color:#555}@media(prefers-color-scheme:dark){body{background:#16181b;color:#ddd}td,th{border-color:#333}small{color:#aaa}.pass{color:#6fcf8f}.warn{color:#e0b050}.fail{color:#ff6b7d}}
"""


def page(examination: Examination, *, made: str) -> str:
    """The whole page.

    Args:
        examination: its findings are without secrets already.
        made: when, for people.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>unisono doctor: {escape(examination.host)}</title><style>{_STYLE}</style>",
        f"<h1>unisono doctor: {escape(examination.host)}</h1><p>{escape(heading(examination))}<br>{escape(made)}</p>",
        f"<p><strong>{escape(closing(examination))}</strong></p>",
    ]
    if examination.verdict is not None:
        parts.append(f"<p class=fail>{escape(examination.verdict.summary)}</p>")
    for area, title in AREAS.items():
        findings = [finding for finding in examination.findings if finding.id.partition(".")[0] == area]
        if findings:
            parts += [f"<h2>{escape(title)}</h2><table>", *map(_row, findings), "</table>"]
    return "\n".join(parts) + "\n"


def _row(finding: Finding) -> str:
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

"""One doctor run: the table of all checks, the examination that runs them side by side, here or on all nodes of a job, and its report."""

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.agree.agreement import Agreement
from unisono.agree.reports import Member, NodeReport, name_all
from unisono.causes import Verdict
from unisono.doctor.check import (
    AREAS,
    NO_FILES,
    Area,
    Check,
    CheckFunction,
    DoctorRequest,
    Finding,
    LocalRun,
    Status,
    Surroundings,
    findings_of,
    read_local_run,
    read_surroundings,
)
from unisono.doctor.config_checks import CATALOGUE as NEEDS
from unisono.doctor.config_checks import CHECKS as NEEDS_CHECKS
from unisono.doctor.device_checks import CATALOGUE as DEVICES
from unisono.doctor.device_checks import CHECKS as DEVICES_CHECKS
from unisono.doctor.ladder_attempts import CATALOGUE as LADDER
from unisono.doctor.ladder_attempts import CHECKS as LADDER_CHECKS
from unisono.doctor.network_checks import CHECKS as NETWORK_CHECKS
from unisono.doctor.network_checks import SETTINGS, SETTINGS_CHECKS
from unisono.doctor.network_rules import CATALOGUE as NETWORK
from unisono.doctor.node_trials import CATALOGUE as BETWEEN
from unisono.doctor.system_checks import CATALOGUE as SYSTEM
from unisono.doctor.system_checks import CHECKS as SYSTEM_CHECKS
from unisono.errors import Disagreed, UnisonoError
from unisono.events import Show
from unisono.facts import read_environment, take_token
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.files import make_private_dir
from unisono.launch.meeting_entry import party_of, report_early_refusal
from unisono.launch.node_report import look_at_files, look_at_output, make_node_report
from unisono.launch.train_request import TrainRequest
from unisono.rendezvous.party import NONCE_FILE, BackgroundWork, ChannelFacts, MakeReport, Party
from unisono.rendezvous.remote_fronts import SshFronts, start_others, token_of_step
from unisono.rundir import RunDir
from unisono.rundir.lock import read_holder
from unisono.text import plain, redact

AGREEMENT = Check(
    "peers.agreement",
    "whether all nodes have the same run",
    "nodes that differ in ranks, versions, settings, code, config or files train wrongly or wait for each other forever",
    "With `--nodes` or `--hosts`: all nodes meet at the head, as before a run. Each sends its report and its own findings; every node dials the others with"
    " small and large messages, and one process per node takes part in a small collective. [All rules](agreement.md). Fails, with exit code 3 on every node, if a rule"
    " forbids a start; a warning is listed under its rule, e.g. peers.clock.",
    (
        "nproc_mismatch",
        "version_mismatch",
        "env_mismatch",
        "config_mismatch",
        "node_missing",
        "address_unreachable",
    ),
)
_FINDINGS_S = 60.0
_CONFIG_RULES = ("files.data", "files.tokenizer", "files.model", "storage.shared")

REGISTRY: tuple[tuple[Area, tuple[CheckFunction, ...]], ...] = (
    ("system", SYSTEM_CHECKS),
    ("settings", SETTINGS_CHECKS),
    ("config", NEEDS_CHECKS),
    ("devices", DEVICES_CHECKS),
    ("network", (*NETWORK_CHECKS, *LADDER_CHECKS)),
)
"""In display order; areas run concurrently."""

CATALOGUE: tuple[Check, ...] = (
    *SYSTEM,
    *SETTINGS,
    *NEEDS,
    *DEVICES,
    *NETWORK,
    *LADDER,
    AGREEMENT,
    *BETWEEN,
)
"""All checks."""


UNFIT = 6
_LONGEST_LINE = 600


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

    def exit_code(self, *, strict: bool) -> int:
        """0; 6 if a check failed, with `strict` also if one warns or is unknown; 3 if the nodes do not agree."""
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
            party_of(request.training, topology, host=host, token=token, show=request.show)
            if topology.nodes > 1
            else None
        )
    except UnisonoError as error:
        report_early_refusal(request.training, environment, error, token=token, show=request.show)
        raise
    own = redacted(run_checks(read_surroundings(request, local_run)))
    if party is None:
        return Examination(host, own)
    try:
        return Examination(
            host,
            redacted(compare_nodes(request, local_run, own, party)),
        )
    except Disagreed as error:
        if error.verdict is None:
            raise
        return Examination(host, redacted([*own, *disagreement_findings(error)]), error.verdict)


def run_checks(facts: Surroundings) -> list[Finding]:
    """Findings of all areas, which run concurrently: a check that waits for a disk or a name server does not delay the others.

    On an interrupt nothing waits for these threads, and their tasks end with this process.
    """
    areas = [BackgroundWork(partial(_run_area, checks, facts)) for _, checks in REGISTRY]
    return [finding for area in areas for finding in area.result()]


def _run_area(checks: Sequence[CheckFunction], facts: Surroundings, _show: object) -> list[Finding]:
    return [finding for check in checks for finding in check(facts)]


def redacted(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without secrets and without terminal control characters: people paste them into issues."""
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
    totals = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{len(examination.findings)} checks: {totals}"


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


# ---- All nodes of a job: the agreement of a start, without the run. Every node gets the same table.


def compare_nodes(
    request: DoctorRequest, local_run: LocalRun, own: list[Finding], party: Party
) -> list[Finding]:
    """Findings of all nodes together; every node gets the same.

    Raises:
        Disagreed: with the verdict that all nodes receive.
    """
    make = _report_maker(request.training, local_run)
    if party.topology.is_head:
        return _as_head(request, party, make, local_run, own)
    return _as_node(request, party, make, own)


def disagreement_findings(error: Disagreed) -> list[Finding]:
    """Why the nodes do not agree: the decisive verdict in full, one line for each other one."""
    verdict = error.verdict
    assert verdict is not None
    rest = tuple(f"also: {problem.what}" for problem in error.problems[1:])
    evidence = tuple(f"{item.where}: {item.text}" for item in verdict.evidence)
    return [Finding(AGREEMENT.id, "fail", (verdict.summary, *evidence, *rest), verdict.fix)]


def _as_head(
    request: DoctorRequest, party: Party, make: MakeReport, local_run: LocalRun, own: list[Finding]
) -> list[Finding]:
    from unisono.doctor.node_trials import LADDER, head_trial
    from unisono.rendezvous.head_side import hold_meeting

    def start(address: tuple[str, int]) -> SshFronts:
        variables = local_run.local_node.environment.variables
        return start_others(request.remote, party.topology, party.token, address, variables=variables)

    between: list[Finding] = []
    trial = head_trial(ladder=request.ladder, debug_comm=request.debug_comm, findings=between)
    with (
        _storage_mark(local_run) as mark,
        hold_meeting(
            party,
            make,
            welcome={**mark, LADDER: request.ladder},
            trial=trial,
            start_others=start if party.topology.hosts else None,
        ) as meeting,
    ):
        answers = meeting.gather("findings", timeout_s=_FINDINGS_S, what="the node's own findings")
        hosts = meeting.roll.hosts
        by_node = {Member(0, -1, party.host): own}
        by_node |= {
            Member(rank, -1, hosts.get(rank, "?")): findings_of(message)
            for rank, message in sorted(answers.items())
        }
        findings = [
            *merge_findings(by_node),
            *between,
            *_agreement_results(meeting.agreement, len(by_node), given=local_run.given),
        ]
        result = {"checks": [finding.to_json() for finding in findings]}
        meeting.end({"kind": "ended", "exit_code": 0, "verdicts": [], "problems": [], "result": result})
    return findings


def _as_node(request: DoctorRequest, party: Party, make: MakeReport, own: list[Finding]) -> list[Finding]:
    from unisono.doctor.node_trials import node_trial
    from unisono.rendezvous.member_side import join_meeting

    trial = node_trial(ladder=request.ladder, debug_comm=request.debug_comm)
    with join_meeting(party, make, trial=trial) as member_side:
        member_side.send({"kind": "findings", "checks": [finding.to_json() for finding in own]})
        return findings_of(member_side.wait_for("ended").get("result"))


def merge_findings(by_node: Mapping[Member, list[Finding]]) -> list[Finding]:
    """Findings of all nodes merged: one line for a check that passes everywhere, else one for each group of nodes."""
    ids = dict.fromkeys(finding.id for findings in by_node.values() for finding in findings)
    merged = []
    for check in ids:
        reported = [(who, one) for who, findings in by_node.items() for one in findings if one.id == check]
        if all(one.status == "pass" for _, one in reported):
            first = min(who for who, _ in reported)
            merged += [_merged_pass(one, reported) for who, one in reported if who == first]
        else:
            merged += _group_by_node([(who, one) for who, one in reported if one.status != "pass"])
    return merged


def _merged_pass(finding: Finding, reported: list[tuple[Member, Finding]]) -> Finding:
    nodes = name_all(who for who, _ in reported)
    same = all(one.evidence == finding.evidence for _, one in reported if one.id == finding.id)
    evidence = (
        finding.evidence if same else (f"on the first one: {finding.evidence[0]}", *finding.evidence[1:])
    )
    return Finding(finding.id, "pass", evidence, finding.fix, nodes)


def _group_by_node(reported: list[tuple[Member, Finding]]) -> list[Finding]:
    groups: dict[Finding, list[Member]] = {}
    for who, finding in reported:
        groups.setdefault(finding, []).append(who)
    return [
        Finding(one.id, one.status, one.evidence, one.fix, name_all(whos)) for one, whos in groups.items()
    ]


def _agreement_results(agreement: Agreement, nodes: int, *, given: bool) -> list[Finding]:
    """One finding for all rules that pass; one for each rule that warns or is unknown.

    `given`: there is a config. Without one, rules on its files and output_dir are left out.
    """
    fixes = {verdict.summary: verdict.fix for verdict in agreement.verdicts}
    passed = agreement.with_status("pass")
    rows = tuple(f"{check.id}: {check.text}" for check in passed)
    found = [
        Finding(AGREEMENT.id, "pass", (f"{nodes} nodes have the same run, by {len(passed)} rules", *rows))
    ]
    for check in agreement.with_status("warn", "unknown"):
        if not given and check.id in _CONFIG_RULES:
            continue
        fix = fixes.get(check.text, (check.fix,) if check.fix else ())
        found.append(Finding(f"peers.{check.id}", check.status, (check.text,), fix, check.where))
    return found


def _report_maker(request: TrainRequest, local_run: LocalRun) -> MakeReport:
    def make(channel: ChannelFacts, show: Show) -> NodeReport:
        files = (
            look_at_files(local_run.loaded, local_run.local_node, programs=request.programs, show=show)
            if local_run.given
            else NO_FILES
        )
        return make_node_report(
            loaded=local_run.loaded,
            local_node=local_run.local_node,
            channel=channel,
            files=files,
            output=look_at_output(local_run.loaded, channel),
            probes=request.probes,
        )

    return make


@contextlib.contextmanager
def _storage_mark(local_run: LocalRun) -> Iterator[dict[str, Any]]:
    """Creates a file in the head's output_dir, by which the others see whether theirs is the same. It is removed on exit."""
    folder = Path(local_run.loaded.config.output_dir)
    if (
        not local_run.given or read_holder(RunDir(folder).lock) is not None
    ):  # an active run has a mark of its own there
        yield {}
        return
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        make_private_dir(folder)
        nonce = leave_nonce(folder)
    except OSError:  # this node's check of output_dir says why
        yield {}
        return
    try:
        yield {NONCE_FILE: nonce}
    finally:
        with contextlib.suppress(OSError):
            remove_nonce(folder, nonce)
            for place in made:
                place.rmdir()

"""Comparison of all nodes of a job: the agreement of a start, without the run. Every node gets the same table."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.reports import Member, NodeReport, name_all
from unisono.doctor.check import NO_FILES, Check, DoctorRequest, Finding, LocalRun, findings_of
from unisono.errors import Disagreed
from unisono.events import Show
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.files import make_private_dir
from unisono.launch.node_report import look_at_files, look_at_output, make_node_report
from unisono.launch.train_request import TrainRequest
from unisono.rendezvous.party import NONCE_FILE, ChannelFacts, MakeReport, Party
from unisono.rendezvous.remote_fronts import SshFronts, start_others
from unisono.rundir import RunDir
from unisono.rundir.lock import read_holder

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
CATALOGUE: tuple[Check, ...] = (AGREEMENT,)

_FINDINGS_S = 60.0
_CONFIG_RULES = ("files.data", "files.tokenizer", "files.model", "storage.shared")


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

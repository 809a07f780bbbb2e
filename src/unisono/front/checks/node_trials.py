"""Checks between all nodes of a job: the agreement of a start without the run; and trials led by
the head: speed of each pair, and the ladder.

                                                             node → head  measures_ready {port}
    head → node  measure {target: [address, port] or null}   node → head  measured {…}
    head → node  measures_end
    head → node  ladder {settings, …}                        node → head  ladder_ready {ok, port, …}
    head → node  ladder_go {store: [address, port] or null}  node → head  ladder_done {…}
    head → node  ladder_end

After measures_end follow the dials and the collective, as before a run; with --ladder the dials and
the ladder.

All nodes run the same command; if only one of node and head has --ladder, the node refuses.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from unisono.base.errors import Disagreed, UsageError
from unisono.base.files import make_private_dir
from unisono.base.messages import Show
from unisono.front.checks.check import NO_FILES, DoctorCheck, DoctorRequest, Finding, LocalRun, findings_of
from unisono.front.checks.ladder import OWN, SETTABLE, AttemptOutcome, Settings, climb, ladder_finding, rungs
from unisono.front.checks.ladder_attempts import (
    DEADLINE_S,
    ENDING_S,
    STARTING_S,
    AttemptLogs,
    AttemptRank,
    AttemptRanks,
    logs_name,
    outcome_of,
    with_logs,
)
from unisono.front.checks.network_rules import leads_out, usable_interfaces
from unisono.front.checks.node_speed import (
    SPEED,
    LinkSpeed,
    Pair,
    judge_speed,
    measure,
    rounds,
    stream_listener,
)
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import Member, NodeReport, name_all, settings_of
from unisono.guard.control.protocol import derive
from unisono.guard.facts.storage import leave_nonce, remove_nonce
from unisono.guard.rendezvous.meeting import Meeting
from unisono.guard.rendezvous.meeting_sides import MemberSide, try_network_as_member, try_network_at_head
from unisono.guard.rendezvous.network_trial import head_dials, node_dials, nodes_present
from unisono.guard.rendezvous.party import NONCE_FILE, ChannelFacts, MakeReport, Party
from unisono.guard.rendezvous.remote_fronts import SshFronts, start_others
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import read_holder
from unisono.guard.supervise.child_process import INTERFACE_VARIABLES, Programs, interface_name
from unisono.guard.supervise.node_messages import JobEnded
from unisono.jobs.runs.node_report import look_at_files, look_at_output, make_node_report
from unisono.jobs.runs.train_request import TrainRequest

LADDER = "ladder"
"""In the head's welcome: whether it was started with --ladder."""
_MEASURING_S = 30.0
_ENOUGH = {"gloo": 20e6, "nccl": 500e6}
"""Minimum bytes per second of an all-reduce over the nodes, if their interfaces are fast enough."""
_SHARE = 0.1
_STORE_PORTS = range(29_510, 29_520)
"""Below the ephemeral ports: if only those are blocked, ranks still meet, and the backend is what
fails.
"""
AGREEMENT = DoctorCheck(
    "peers.agreement",
    "whether all nodes have the same run",
    "nodes that differ in ranks, versions, settings, code, config or files train wrongly or wait for each"
    " other forever",
    "With `--nodes` or `--hosts`: all nodes meet at the head, as before a run. Each sends its report and its"
    " own findings; every node dials the others with small and large messages, and one process per node takes"
    " part in a small collective. [All rules](agreement.md). Fails, with exit code 3 on every node, if a rule"
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
CATALOGUE: tuple[DoctorCheck, ...] = (AGREEMENT, SPEED)

_FINDINGS_S = 60.0
_CONFIG_RULES = ("files.data", "files.tokenizer", "files.model", "storage.shared")


def head_trial(*, ladder: bool, debug_comm: bool, findings: list[Finding]) -> Callable[[Meeting], None]:
    """The head's trial for `hold_meeting`; it adds to `findings`.

    Args:
        ladder: whether a failed collective is retried with different settings; otherwise its
            failure ends the meeting.
        debug_comm: whether the libraries' logs are kept.
    """

    def trial(meeting: Meeting) -> None:
        with stream_listener(
            meeting.server.address[0], _key(meeting.party.token, meeting.run_nonce)
        ) as listener:
            answers = meeting.gather("measures_ready", timeout_s=_MEASURING_S, what="a port for measurements")
            ports = {0: listener.ports[0], **{rank: _port_of(message) for rank, message in answers.items()}}
            findings.append(judge_speed(_measure_pairs(meeting, ports), meeting.reports))
        meeting.broadcast({"kind": "measures_end"})
        if findings[-1].status != "pass":  # should the collective end the meeting, this is why
            meeting.note(f"{SPEED.id}: {findings[-1].evidence[0]}", everywhere=True)
        if not ladder:
            try_network_at_head(meeting)
            return
        findings.extend(_dial_findings(meeting))
        record = AttemptLogs.of(logs_name(meeting.run_nonce)) if debug_comm else None
        findings.append(with_logs(_climb_ladder(meeting, record), record))
        meeting.broadcast({"kind": "ladder_end"})

    return trial


def node_trial(*, ladder: bool, debug_comm: bool) -> Callable[[MemberSide, NodeReport], None]:
    """A node's trial for `join_meeting`: follows the head's requests until the last one.

    Args:
        ladder: must be the same at the head.
        debug_comm: whether the libraries' logs of this node are kept, in the folder that the head
            names.
    """

    def trial(member_side: MemberSide, report: NodeReport) -> None:
        if member_side.welcome.get(LADDER) is not ladder:
            raise UsageError.of(
                "this node's command differs from the head's",
                where="--ladder",
                why="the head runs a different command, or only one of the two has --ladder",
                fix="run the same `unisono doctor` on every node, with --ladder on all or on none",
            )
        key = _key(member_side.party.token, str(member_side.welcome["run_nonce"]))
        with stream_listener(report.address, key) as listener:
            member_side.send({"kind": "measures_ready", "port": listener.ports[0]})
            while (message := member_side.wait_for("measure", "measures_end"))["kind"] == "measure":
                member_side.send({"kind": "measured", **_measure_target(member_side, message, key)})
        if not ladder:
            try_network_as_member(member_side, report)
            return
        node_dials(member_side, member_side.wait_for("dial"))
        record = None
        while (message := member_side.wait_for("ladder", "ladder_end"))["kind"] == "ladder":
            if debug_comm and record is None:
                record = AttemptLogs.of(message.get("record"))
            _take_part(member_side, report, message, record)

    return trial


def _key(token: bytes, run_nonce: str) -> bytes:
    return derive(token, "speed", run_nonce)


def _dial_findings(meeting: Meeting) -> list[Finding]:
    """Findings of the dial matrix. The meeting continues: settings may be found that work."""
    agreement = head_dials(meeting)
    fixes = {verdict.summary: verdict.fix for verdict in agreement.verdicts}
    return [
        Finding(
            f"peers.{check.id}",
            check.status,
            (check.text,),
            fixes.get(check.text, (check.fix,) if check.fix else ()),
            check.where,
        )
        for check in agreement.checks
        if check.status != "pass"
    ]


def _measure_pairs(meeting: Meeting, ports: Mapping[int, int]) -> dict[Pair, LinkSpeed]:
    """Speeds of all rounds. The lower node of a pair dials the other one."""
    addresses = {report.node_rank: report.address for report in meeting.reports}
    speeds: dict[Pair, LinkSpeed] = {}
    key = _key(meeting.party.token, meeting.run_nonce)
    for pairs in rounds(addresses):
        partner = dict(pairs)
        for rank in meeting.roll.others:
            target = [addresses[partner[rank]], ports[partner[rank]]] if rank in partner else None
            meeting.server.send(rank, {"kind": "measure", "target": target})
        if 0 in partner:
            other = partner[0]
            work = partial(_measure_peer, addresses[other], ports[other], key)
            speeds[0, other] = meeting.run_in_background(work)
        answers = meeting.gather("measured", timeout_s=_MEASURING_S, what="the speed to another node")
        speeds |= {
            (rank, partner[rank]): _link_speed_of(message)
            for rank, message in answers.items()
            if rank in partner
        }
    return speeds


def _measure_peer(address: str, port: int, key: bytes, _show: Show) -> LinkSpeed:
    return measure(address, port, key)


def _measure_target(
    member_side: MemberSide, message: Mapping[str, object], key: bytes
) -> Mapping[str, object]:
    match message.get("target"):
        case [str(address), int(port)]:
            return asdict(member_side.run_in_background(partial(_measure_peer, address, port, key)))
        case _:
            return {}


def _link_speed_of(message: Mapping[str, object]) -> LinkSpeed:
    up, down, rtt_s = message.get("up"), message.get("down"), message.get("rtt_s")
    return LinkSpeed(
        float(rtt_s) if isinstance(rtt_s, int | float) else None,
        float(up) if isinstance(up, int | float) else 0.0,
        float(down) if isinstance(down, int | float) else 0.0,
        str(message.get("trouble") or ""),
    )


def _port_of(message: Mapping[str, object]) -> int:
    port = message.get("port")
    return port if isinstance(port, int) and 0 < port < 1 << 16 else 0


def _climb_ladder(meeting: Meeting, record: AttemptLogs | None) -> Finding:
    """The ladder over one process on each node."""
    reports = meeting.reports
    backend = "nccl" if all(report.device_kind == "cuda" for report in reports) else "gloo"
    by_hand = sorted({name for report in reports for name in settings_of(report)})
    interface = interface_name(reports[0].interfaces, reports[0].address) or ""
    steps = rungs(backend, interfaces=[OWN, *_common_interfaces(reports)], set_by_hand=by_hand)

    def attempt(settings: Settings, name: str) -> AttemptOutcome:
        meeting.note(f"ladder: {name}")
        return _attempt_on_all(meeting, settings, backend, name, record)

    return ladder_finding(climb(steps, attempt, enough=_enough_rate(reports, backend)), interface=interface)


def _common_interfaces(reports: list[NodeReport]) -> list[str]:
    """Names of external interfaces that all nodes have; the interfaces on which the nodes met are
    OWN.
    """
    named = [
        {one.name for one in usable_interfaces(report.interfaces) if leads_out(one)} for report in reports
    ]
    met = {interface_name(report.interfaces, report.address) for report in reports}
    return sorted(name for name in set.intersection(*named) if met != {name})


def _enough_rate(reports: list[NodeReport], backend: str) -> float:
    speeds = [
        one.speed_mbit * 125_000
        for report in reports
        for one in report.interfaces
        if one.speed_mbit and report.address in one.addresses
    ]
    return min([_ENOUGH[backend], *(_SHARE * speed for speed in speeds)])


def _attempt_on_all(
    meeting: Meeting, settings: Settings, backend: str, name: str, record: AttemptLogs | None
) -> AttemptOutcome:
    """One collective over all nodes; the worst outcome of any."""
    present = [report.node_rank for report in meeting.reports]
    meeting.broadcast(
        {
            "kind": "ladder",
            "settings": dict(settings),
            "backend": backend,
            "present": present,
            "name": name,
            "record": record.folder.name if record else None,
        }
    )
    head_report = meeting.reports[0]
    folder = record.attempt(name) if record else None
    with _attempt_ranks(head_report, present, settings, backend, meeting.party.programs, folder) as ranks:
        port, problem = meeting.run_in_background(lambda _show: ranks.ready())
        answers = meeting.gather("ladder_ready", timeout_s=STARTING_S, what="a process with torch")
        if record is not None:
            record.elsewhere |= {
                f"node {rank}": text for rank, message in answers.items() if (text := _missing_logs(message))
            }
        late = next((message for message in answers.values() if message.get("ok") is not True), None)
        store = None if problem or late else [head_report.address, port]
        meeting.broadcast({"kind": "ladder_go", "store": store})
        if store is None:
            return AttemptOutcome(ok=False, text=problem or outcome_of(late or {}).text)
        own_run = meeting.run_in_background(lambda _show: ranks.run(head_report.address, port))
        messages = meeting.gather("ladder_done", timeout_s=DEADLINE_S + 2 * ENDING_S, what="the collective")
    others = [outcome_of(message) for _, message in sorted(messages.items())]
    worst = min([own_run, *others], key=lambda outcome: outcome.rate)
    return AttemptOutcome(worst.ok, worst.text, worst.bytes_per_second, worst.small_s, own_run.rows)


def _missing_logs(message: Mapping[str, object]) -> str:
    """Why a node has no logs of its libraries; empty: it has, or was not asked for them."""
    text = message.get("unkept")
    return text[:300] if isinstance(text, str) else ""


def _take_part(
    member_side: MemberSide, report: NodeReport, message: Mapping[str, object], record: AttemptLogs | None
) -> None:
    """This node's rank in one attempt."""
    settings = _allowed_settings(message.get("settings"))
    backend = "nccl" if message.get("backend") == "nccl" else "gloo"
    present = nodes_present(message, node_rank=report.node_rank)
    folder = record.attempt(str(message.get("name"))) if record else None
    with _attempt_ranks(report, present, settings, backend, member_side.party.programs, folder) as ranks:
        _, problem = member_side.run_in_background(lambda _show: ranks.ready())
        unkept = record.problem if record else ""
        member_side.send({"kind": "ladder_ready", "ok": not problem, "text": problem, "unkept": unkept})
        match member_side.wait_for("ladder_go").get("store"):
            case [str(host), int(port)]:
                outcome = member_side.run_in_background(lambda _show: ranks.run(host, port))
                member_side.send({"kind": "ladder_done", **asdict(outcome)})
            case _:
                return


def _allowed_settings(settings: object) -> dict[str, str | None]:
    """Settings that a head may apply to this node's rank: some variables can be set, any can be
    removed.
    """
    if not isinstance(settings, dict):
        return {}
    return {
        str(name): None if value is None else str(value)
        for name, value in settings.items()
        if value is None or name in SETTABLE
    }


def _attempt_ranks(
    report: NodeReport,
    present: list[int],
    settings: Settings,
    backend: str,
    programs: Programs,
    record: Path | None,
) -> AttemptRanks:
    """Started as this node's first rank would be: unless the user sets one, the interface is the
    one on which the nodes met.
    """
    interface = interface_name(report.interfaces, report.address) or ""
    child = AttemptRank(sorted(present).index(report.node_rank), report.places[0], f"node {report.node_rank}")
    return AttemptRanks(
        [child],
        len(present),
        backend,
        settings,
        report.address,
        DEADLINE_S,
        programs,
        interface,
        dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {},
        [f"node {rank}" for rank in sorted(present)],
        _STORE_PORTS,
        record,
    )


def compare_nodes(
    request: DoctorRequest, local_run: LocalRun, findings: list[Finding], party: Party
) -> list[Finding]:
    """Findings of all nodes together; every node gets the same.

    Raises:
        Disagreed: with the verdict that all nodes receive.
    """
    make = _report_maker(request, local_run)
    if party.topology.is_head:
        return _as_head(request, party, make, local_run, findings)
    return _as_node(request, party, make, findings)


def disagreement_findings(error: Disagreed) -> list[Finding]:
    """Why the nodes do not agree: the decisive verdict in full, one line for each other one."""
    verdict = error.verdict
    assert verdict is not None
    others = tuple(f"also: {problem.what}" for problem in error.problems[1:])
    evidence = tuple(f"{item.where}: {item.text}" for item in verdict.evidence)
    return [Finding(AGREEMENT.id, "fail", (verdict.summary, *evidence, *others), verdict.fix)]


def _as_head(
    request: DoctorRequest, party: Party, make: MakeReport, local_run: LocalRun, head_findings: list[Finding]
) -> list[Finding]:
    from unisono.front.checks.node_trials import LADDER, head_trial
    from unisono.guard.rendezvous.meeting_sides import hold_meeting

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
        by_node = {Member(0, -1, party.host): head_findings}
        by_node |= {
            Member(rank, -1, hosts.get(rank, "?")): findings_of(message)
            for rank, message in sorted(answers.items())
        }
        findings = [
            *merge_findings(by_node),
            *between,
            *_agreement_results(meeting.agreement, len(by_node), given=local_run.given),
        ]
        result: dict[str, object] = {"checks": [finding.to_json() for finding in findings]}
        meeting.end(JobEnded(exit_code=0, result=result))
    return findings


def _as_node(
    request: DoctorRequest, party: Party, make: MakeReport, findings: list[Finding]
) -> list[Finding]:
    from unisono.front.checks.node_trials import node_trial
    from unisono.guard.rendezvous.meeting_sides import join_meeting

    trial = node_trial(ladder=request.ladder, debug_comm=request.debug_comm)
    with join_meeting(party, make, trial=trial) as member_side:
        member_side.send({"kind": "findings", "checks": [finding.to_json() for finding in findings]})
        return findings_of(member_side.wait_for("ended").get("result"))


def merge_findings(by_node: Mapping[Member, list[Finding]]) -> list[Finding]:
    """Findings of all nodes merged: one line for a check that passes everywhere, else one for each
    group of nodes.
    """
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
    findings = [
        Finding(AGREEMENT.id, "pass", (f"{nodes} nodes have the same run, by {len(passed)} rules", *rows))
    ]
    for check in agreement.with_status("warn", "unknown"):
        if not given and check.id in _CONFIG_RULES:
            continue
        fix = fixes.get(check.text, (check.fix,) if check.fix else ())
        findings.append(Finding(f"peers.{check.id}", check.status, (check.text,), fix, check.where))
    return findings


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
def _storage_mark(local_run: LocalRun) -> Iterator[dict[str, str]]:
    """Creates a file in the head's output_dir, by which the others see whether theirs is the same.

    It is removed on exit.
    """
    folder = Path(local_run.loaded.config.output_dir)
    if (
        not local_run.given or read_holder(RunDir(folder).lock) is not None
    ):  # an active run has a mark of its own there
        yield {}
        return
    made = [directory for directory in (folder, *folder.parents) if not os.path.lexists(directory)]
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
            for directory in made:
                directory.rmdir()

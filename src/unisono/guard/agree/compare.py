"""Compares the nodes of one run and their files: nodes that train a config, and those that start a
foreign program.

Pure, and the same for any order of reports.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from unisono.base.text import one_line
from unisono.guard.agree.addresses import judge_addresses, judge_interfaces, judge_mtu, judge_names
from unisono.guard.agree.agreement import (
    NODES,
    Agreement,
    Stage,
    Wording,
    evidence_of,
    judge_keys,
    odd_first,
    odd_out,
    partition,
    remedy_for,
    unknown_for,
    violation,
)
from unisono.guard.agree.environment_rules import judge_environment, judge_settings
from unisono.guard.agree.machines import judge_clocks, judge_devices, judge_limits
from unisono.guard.agree.membership import Members, judge_identity, judge_nodes, judge_nproc
from unisono.guard.agree.reports import (
    FileDigest,
    Member,
    NodeReport,
    count,
    freeze,
    name_all,
    show_bytes,
    show_digest,
)
from unisono.guard.agree.rules import NODE_RULES, Rule
from unisono.guard.agree.version_rules import judge_code, judge_known_bad, judge_packages, judge_versions

_READERS: dict[str, Callable[[NodeReport], list[FileDigest]]] = {
    "files.data": lambda report: report.data_files,
    "files.tokenizer": lambda report: report.tokenizer_files,
    "files.model": lambda report: report.model_files,
}


def judge_files(members: Members, rule_id: str) -> Agreement:
    """Files of one kind have the same content on all nodes, compared by label, size and digest."""
    rule = NODE_RULES[rule_id]
    read = _READERS[rule_id]
    listed = [(who, report, read(report)) for who, report in members]
    digests = [(who, _by_label(files)) for who, report, files in listed if _known(report, files)]
    unknown = [(who, report.files_note) for who, report, files in listed if not _known(report, files)]
    missing = unknown_for(
        rule,
        [who for who, _ in unknown],
        one_line(next((note for _, note in unknown if note), "not digested")),
    )
    if not digests:
        return missing
    number = len(digests[0][1])
    good = f"{count(number, 'file')}, the same everywhere" if number else "none to compare"
    if len(digests) == 1 and len(members) > 1:
        return missing  # a single list cannot be compared
    return judge_keys(rule, digests, Wording(shown=_shown_content, good=good)).merged(missing)


def _known(report: NodeReport, files: list[FileDigest]) -> bool:
    """Whether a node's files can be compared: an empty list with a note means that they could not
    be read.
    """
    return all(file.digest for file in files) and bool(files or not report.files_note)


def _by_label(files: Iterable[FileDigest]) -> dict[str, Hashable]:
    contents_of: dict[str, list[tuple[int, str]]] = {}
    for file in files:
        contents_of.setdefault(file.label, []).append((file.bytes, file.digest))
    return {label: tuple(contents) for label, contents in contents_of.items()}


def _shown_content(_: str, value: Hashable) -> str:
    if not isinstance(value, tuple):
        return "missing"
    return " + ".join(f"{count(size, 'byte')}, digest {show_digest(digest)}" for size, digest in value[:4])


_LEAST_FREE = 64 * 2**20


def judge_storage(members: Members) -> Agreement:
    """Each node can write to output_dir; whether it is shared is reported."""
    return _judge_writing(members).merged(_judge_sharing(members))


def _judge_writing(members: Members) -> Agreement:
    rule = NODE_RULES["storage.write"]
    troubles = partition((who, _storage_problem(report)) for who, report in members)
    bad = [group for group in troubles if group.value]
    unknown = [
        who for who, report in members if report.output.writable is None and not _storage_problem(report)
    ]
    reports = dict(members)
    why = next(
        (one_line(reports[who].output.trouble) for who in unknown if reports[who].output.trouble), "not tried"
    )
    missing = unknown_for(rule, unknown, why)
    if not bad:
        return missing if len(unknown) == len(members) else _room(members).merged(missing)
    people = sorted(who for group in bad for who in group.members)
    return violation(
        rule,
        "; ".join(f"{name_all(group.members)}: {group.value}" for group in bad[:3]),
        people=people,
        evidence=evidence_of(bad, NODES, str),
        fix=_with_path(rule.remedy, people, reports[people[0]]),
    ).merged(missing)


def _with_path(remedy: tuple[str, ...], people: list[Member], report: NodeReport) -> list[str]:
    path = one_line(report.output.path)
    return [line.replace("{who}", name_all(people)).replace("OUTPUT_DIR", path) for line in remedy]


def _storage_problem(report: NodeReport) -> str:
    """Why output_dir is not writable, or an empty string."""
    output = report.output
    path = one_line(output.path)
    if output.writable is False:
        return f"output_dir {path} cannot be written: {one_line(output.trouble) or 'no reason given'}"
    if output.free_bytes is None or not (report.node_rank == 0 or output.shared):
        return ""
    least = max(_LEAST_FREE, report.reserved.get("disk_bytes", 0))
    if output.free_bytes < least:
        return f"output_dir {path} has {show_bytes(output.free_bytes)} free, and {show_bytes(least)} are reserved"
    return ""


def _room(members: Members) -> Agreement:
    rule = NODE_RULES["storage.write"]
    measured = [report for _, report in members if report.output.free_bytes is not None]
    if not measured:
        return Agreement.noted(rule.id, "pass", "written, read back and renamed; free space unknown")
    tightest = min(measured, key=lambda report: (report.output.free_bytes or 0, report.node_rank))
    free = tightest.output.free_bytes or 0
    text = f"written, read back and renamed; {show_bytes(free)} free"
    if len(measured) > 1:
        text += f" on {name_all([Member(tightest.node_rank, -1, tightest.host)])}, the least"
    reserved = max((report.reserved.get("disk_bytes", 0) for report in measured), default=0)
    if reserved:
        text += f"; {show_bytes(reserved)} are reserved for the system"
    return Agreement.noted(rule.id, "pass", text)


def _judge_sharing(members: Members) -> Agreement:
    rule = NODE_RULES["storage.shared"]
    if len(members) == 1:
        return Agreement()
    seen = [(who, report.output.shared) for who, report in members if who.node_rank != 0]
    answers = [(who, shared) for who, shared in seen if shared is not None]
    missing = unknown_for(
        rule, [who for who, shared in seen if shared is None], "the head's marker could not be checked"
    )
    groups = partition(answers)
    if not answers or (len(groups) == 1 and groups[0].value):
        text = f"shared by {count(len(answers) + 1, 'node')}"
        return (Agreement.noted(rule.id, "pass", text) if answers else Agreement()).merged(missing)
    holder = next((who for who, _ in members if who.node_rank == 0), None)
    holds = name_all([holder]) if holder else "the head"
    apart = next(group.members for group in groups if not group.value)
    # If some nodes share it, the head is one of them.
    odd = odd_out(partition([*answers, *([(holder, True)] if holder else [])])) if len(groups) > 1 else ()
    summary = f"output_dir of {name_all(apart)} is not shared with {holds}"
    if len(groups) > 1:
        together = next(group.members for group in groups if group.value)
        summary += f", unlike on {name_all(together)}"
    summary += f": {holds} stores the run, the other nodes store copies of result.json and verdict.json"
    paths = partition((who, _place(report)) for who, report in members)
    return violation(
        rule,
        summary,
        people=odd,
        evidence=evidence_of(odd_first(paths, apart), NODES, str),
        fix=remedy_for(rule, apart),
        where=apart,
    ).merged(missing)


def _place(report: NodeReport) -> Hashable:
    output = report.output
    kind = f" ({one_line(output.file_system)})" if output.file_system else ""
    seen = {True: ", with the head's marker", False: ", without the head's marker", None: ""}[output.shared]
    return f"{one_line(output.path)}{kind}{'' if report.node_rank == 0 else seen}"


def judge_config(members: Members) -> Agreement:
    """All keys of the resolved config are equal, but for those of the sources."""
    return _judge_config_keys("config", members, lambda key: not _OF_A_SOURCE.match(key))


def judge_sources(members: Members) -> Agreement:
    """The sources are read the same way: their number, formats, columns, tags and numbers of
    rows.
    """
    return _judge_config_keys("sources", members, lambda key: _OF_A_SOURCE.match(key) is not None)


_OF_A_SOURCE = re.compile(r"data\.(train|eval)\.")


def _judge_config_keys(rule: str, members: Members, takes: Callable[[str], bool]) -> Agreement:
    reported = [
        (who, {key: freeze(value) for key, value in report.config.items() if takes(key)})
        for who, report in members
    ]
    good = f"{len(reported[0][1])} keys, the same everywhere"
    return judge_keys(NODE_RULES[rule], reported, Wording(good=good))


IN_ORDER: tuple[Callable[[Members], Agreement], ...] = (
    judge_identity,
    judge_nodes,
    judge_nproc,
    judge_devices,
    judge_environment,
    judge_versions,
    judge_code,
    judge_sources,
    judge_config,
    lambda members: judge_files(members, "files.data"),
    lambda members: judge_files(members, "files.tokenizer"),
    lambda members: judge_files(members, "files.model"),
    judge_names,
    judge_addresses,
    judge_interfaces,
    judge_mtu,
    judge_storage,
    judge_limits,
    judge_packages,
    judge_known_bad,
    judge_settings,
    judge_clocks,
)
"""Cheap and decisive checks first: an earlier difference may be the cause of a later one."""


BEFORE_A_RESTART = (judge_devices, judge_interfaces, judge_storage, judge_limits)
"""Checks of what may have changed while ranks ran. File contents and settings were compared at the
start.
"""


def compare_again(reports: Sequence[NodeReport]) -> Agreement:
    """The checks before ranks are restarted."""
    members = _in_order(reports)
    return Agreement().merged(*(judge(members) for judge in BEFORE_A_RESTART))


def compare_nodes(reports: Sequence[NodeReport]) -> Agreement:
    """All checks of the nodes, and a verdict for each violation, the decisive one first."""
    members = _in_order(reports)
    if not members:
        return Agreement.noted("nodes", "unknown", "no node has reported")
    return Agreement().merged(*(judge(members) for judge in IN_ORDER))


def _in_order(reports: Sequence[NodeReport]) -> Members:
    """By node rank; if two have the same, by their whole report, so that the result does not depend
    on the order of arrival.
    """
    unique = len({report.node_rank for report in reports}) == len(reports)
    ordered = sorted(
        reports, key=lambda report: (report.node_rank, "" if unique else report.model_dump_json())
    )
    return [(Member(report.node_rank, -1, report.host), report) for report in ordered]


UNEVEN = "or add --uneven to the command on every node, if different numbers are intended"
_COMMAND = Rule(
    "command",
    "the program's command line",
    "equal",
    "fail",
    "config_mismatch",
    ("pass the same command after -- on every node; only node ranks may differ",),
)
_RANK_STAGE = Stage("agree.ranks")
_RANK_FACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rows": (
        "split_mismatch",
        "rows, their order, and steps",
        (
            "give every split and shuffle the same fixed seed",
            "or split once, and write the rows to files that all ranks read",
        ),
    ),
    "data": ("data_mismatch", "data", ("let all ranks read the same files",)),
    "seed": ("split_mismatch", "seeds", ("use the same seed on all ranks to split or shuffle data",)),
}


def compare_programs(reports: Sequence[NodeReport], *, uneven: bool) -> Agreement:
    """The checks of nodes that are about to start a foreign program, the decisive one first.

    Args:
        reports: of all nodes.
        uneven: whether nodes may have different numbers of ranks.
    """
    members: Members = [
        (Member(report.node_rank, -1, report.host), report)
        for report in sorted(reports, key=lambda report: (report.node_rank, report.pid))
    ]
    if not members:
        return Agreement.noted("nodes", "unknown", "no node has reported")
    agreements = [judge_identity(members), judge_nodes(members)]
    if not uneven:
        agreements.append(_with_uneven(judge_nproc(members, may_differ=False)))
    agreements += [judge_devices(members), _judge_command(members)]
    agreements += [
        judge(members)
        for judge in (
            judge_environment,
            judge_versions,
            judge_code,
            judge_names,
            judge_addresses,
            judge_interfaces,
            judge_mtu,
            judge_packages,
            judge_known_bad,
            judge_settings,
            judge_clocks,
        )
    ]
    return Agreement().merged(*agreements)


def keyed_arguments(words: Sequence[str]) -> dict[str, str]:
    """A command line as keys and values, so that a difference has a key: `--lr` → 1e-4, `word 2` →
    train.py.
    """
    arguments: dict[str, str] = {}
    option = ""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.startswith("-") and len(word) > 1:
            option = "" if equals else word
            arguments[_free_key(arguments, name)] = value if equals else "given"
        elif option:
            arguments[option] = word
            option = ""
        else:
            arguments[f"word {number + 1}"] = word
    return arguments


def _free_key(arguments: Mapping[str, str], name: str) -> str:
    """A key for an option that is repeated."""
    number = 2
    free = name
    while free in arguments:
        free, number = f"{name} ({number})", number + 1
    return free


def _judge_command(members: Members) -> Agreement:
    reported = [
        (who, {key: freeze(value) for key, value in report.config.items()}) for who, report in members
    ]
    return judge_keys(_COMMAND, reported, Wording(good="the same command on every node"))


def _with_uneven(agreement: Agreement) -> Agreement:
    verdicts = [
        verdict.model_copy(update={"fix": (*verdict.fix, UNEVEN)})
        if verdict.cause == "nproc_mismatch"
        else verdict
        for verdict in agreement.verdicts
    ]
    return Agreement(agreement.checks, verdicts)


def compare_launchers(
    reports: Sequence[NodeReport], started: Mapping[int, int], *, uneven: bool
) -> Agreement:
    """The checks of the ranks that the program's own launchers are about to start, e.g.
    LLaMA-Factory's counts devices itself.

    Args:
        reports: of all nodes.
        started: ranks, by node rank.
        uneven: whether the numbers may differ.
    """
    if uneven:
        return Agreement.noted("nproc", "pass", "different numbers are allowed: --uneven")
    members: Members = [
        (Member(report.node_rank, -1, report.host), _as_started(report, started.get(report.node_rank)))
        for report in sorted(reports, key=lambda report: report.node_rank)
    ]
    return _with_uneven(judge_nproc(members, may_differ=False))


def _as_started(report: NodeReport, nproc: int | None) -> NodeReport:
    if nproc is None or nproc == report.nproc:
        return report
    origin = "the launcher inside the program"
    return report.model_copy(update={"nproc": nproc, "nproc_declared": False, "nproc_origin": origin})


def compare_rank_facts(
    name: str, facts_by_rank: Mapping[int, tuple[int, str, Mapping[str, Any]]]
) -> Agreement:
    """The comparison of facts that ranks of a foreign program report.

    Args:
        facts_by_rank: by rank: its node rank, host and facts.
    """
    first = sorted({key for _, _, facts in facts_by_rank.values() for key in facts})
    cause, subject, remedy = next(
        (value for key, value in _RANK_FACTS.items() if key in name), _RANK_FACTS["rows"]
    )
    rule = Rule(f"program.{name}", subject, "equal", "fail", cause, remedy)
    reported = [
        (Member(node_rank, rank, host), {key: freeze(value) for key, value in facts.items()})
        for rank, (node_rank, host, facts) in sorted(facts_by_rank.items())
    ]
    order = {key: number for number, key in enumerate(first)}
    return judge_keys(
        rule,
        reported,
        Wording(order=lambda key: order.get(key, 0), good=f"{name}: the same on all ranks"),
        stage=_RANK_STAGE,
    )

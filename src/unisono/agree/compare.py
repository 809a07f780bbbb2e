"""Compares the nodes of one run: those that train a config, and those that start a foreign program. Pure, and the same for any order of reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.agree.addresses import judge_addresses, judge_interfaces, judge_mtu, judge_names
from unisono.agree.agreement import Agreement, Stage, Wording, judge_keys
from unisono.agree.display import Member, freeze
from unisono.agree.environment_rules import judge_environment, judge_settings
from unisono.agree.machines import judge_clocks, judge_devices, judge_limits
from unisono.agree.membership import Members, judge_identity, judge_nodes, judge_nproc
from unisono.agree.node_files import judge_files, judge_storage
from unisono.agree.reports import NodeReport
from unisono.agree.rules import NODE_RULES, Rule
from unisono.agree.version_rules import judge_code, judge_known_bad, judge_packages, judge_versions


def judge_config(members: Members) -> Agreement:
    """All keys of the resolved config are equal."""
    said = [(who, {key: freeze(value) for key, value in report.config.items()}) for who, report in members]
    good = f"{len(members[0][1].config)} keys, the same everywhere"
    return judge_keys(NODE_RULES["config"], said, Wording(good=good))


IN_ORDER: tuple[Callable[[Members], Agreement], ...] = (
    judge_identity,
    judge_nodes,
    judge_nproc,
    judge_devices,
    judge_environment,
    judge_versions,
    judge_code,
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
"""Checks of what may have changed while ranks ran. File contents and settings were compared at the start."""


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
    """By node rank; if two have the same, by their whole report, so that the result does not depend on the order of arrival."""
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
    "seed": ("split_mismatch", "seeds", ("give all ranks the same seed where they split or shuffle data",)),
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
    found = [judge_identity(members), judge_nodes(members)]
    if not uneven:
        found.append(_with_uneven(judge_nproc(members, may_differ=False)))
    found += [judge_devices(members), _judge_command(members)]
    found += [
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
    return Agreement().merged(*found)


def keyed_arguments(words: Sequence[str]) -> dict[str, str]:
    """A command line as keys and values, so that a difference has a key: `--lr` → 1e-4, `word 2` → train.py."""
    found: dict[str, str] = {}
    option = ""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.startswith("-") and len(word) > 1:
            option = "" if equals else word
            found[_free_key(found, name)] = value if equals else "given"
        elif option:
            found[option] = word
            option = ""
        else:
            found[f"word {number + 1}"] = word
    return found


def _free_key(found: Mapping[str, str], name: str) -> str:
    """A key for an option that is repeated."""
    number = 2
    free = name
    while free in found:
        free, number = f"{name} ({number})", number + 1
    return free


def _judge_command(members: Members) -> Agreement:
    said = [(who, {key: freeze(value) for key, value in report.config.items()}) for who, report in members]
    return judge_keys(_COMMAND, said, Wording(good="the same command on every node"))


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
    """The checks of the ranks that the program's own launchers are about to start, e.g. LLaMA-Factory's counts devices itself.

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


def compare_rank_facts(name: str, brought: Mapping[int, tuple[int, str, Mapping[str, Any]]]) -> Agreement:
    """The comparison of facts that ranks of a foreign program report.

    Args:
        name: of the comparison.
        brought: by rank: its node rank, host and facts.
    """
    first = sorted({key for _, _, facts in brought.values() for key in facts})
    cause, subject, remedy = next(
        (value for key, value in _RANK_FACTS.items() if key in name), _RANK_FACTS["rows"]
    )
    rule = Rule(f"program.{name}", subject, "equal", "fail", cause, remedy)
    said = [
        (Member(node_rank, rank, host), {key: freeze(value) for key, value in facts.items()})
        for rank, (node_rank, host, facts) in sorted(brought.items())
    ]
    order = {key: number for number, key in enumerate(first)}
    return judge_keys(
        rule,
        said,
        Wording(order=lambda key: order.get(key, 0), good=f"{name}: the same on all ranks"),
        stage=_RANK_STAGE,
    )

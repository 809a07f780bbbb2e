"""Whether all nodes are about to run the same foreign program the same way, and what its launchers and ranks bring later. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.agree.addresses import judge_addresses, judge_mtu, judge_names
from unisono.agree.agreement import Agreement
from unisono.agree.clock import judge_clocks
from unisono.agree.counts import Members, judge_identity, judge_nodes, judge_nproc
from unisono.agree.devices import judge_devices
from unisono.agree.finding import Scene
from unisono.agree.interfaces import judge_interfaces
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.known_bad import judge_known_bad
from unisono.agree.lint import judge_settings
from unisono.agree.naming import Who
from unisono.agree.report import NodeReport
from unisono.agree.rule import Rule
from unisono.agree.settings import judge_environment
from unisono.agree.showing import freeze
from unisono.agree.version_rules import judge_code, judge_packages, judge_versions

UNEVEN = "or add --uneven to the command on every node, if unequal numbers are meant"
_COMMAND = Rule(
    "command", "the program's command line", "equal", "fail", "config_mismatch",
    ("give every node the same words after --; only those that say which node it is may differ",),
)  # fmt: skip
_RANKS = Scene("agree.ranks")
_FACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rows": ("split_mismatch", "rows, their order, and steps", ("give every split and shuffle the same fixed seed",
             "or split once, and write the rows to files that all ranks read")),
    "data": ("data_mismatch", "data", ("let all ranks read the same files",)),
    "seed": ("split_mismatch", "seeds", ("give all ranks the same seed where they split or shuffle data",)),
}  # fmt: skip


def compare_programs(reports: Sequence[NodeReport], *, uneven: bool) -> Agreement:
    """The checks of nodes that are about to start somebody else's program, the decisive one first.

    Args:
        reports: of all nodes.
        uneven: whether they may have unequal numbers of ranks.
    """
    members: Members = [
        (Who(report.node_rank, -1, report.host), report)
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
            judge_environment, judge_versions, judge_code, judge_names, judge_addresses, judge_interfaces, judge_mtu,
            judge_packages, judge_known_bad, judge_settings, judge_clocks,
        )
    ]  # fmt: skip
    return Agreement().merged(*found)


def keyed_words(words: Sequence[str]) -> dict[str, str]:
    """A command line as keys and values, so that a difference has a name: `--lr` → 1e-4, `word 2` → train.py."""
    found: dict[str, str] = {}
    option = ""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.startswith("-") and len(word) > 1:
            option = "" if equals else word
            found[_free(found, name)] = value if equals else "given"
        elif option:
            found[option] = word
            option = ""
        else:
            found[f"word {number + 1}"] = word
    return found


def _free(found: Mapping[str, str], name: str) -> str:
    """An option that is given again is another one."""
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
        verdict.model_copy(update={"fix": (*verdict.fix, UNEVEN)}) if verdict.cause == "nproc_mismatch" else verdict
        for verdict in agreement.verdicts
    ]  # fmt: skip
    return Agreement(agreement.checks, verdicts)


def compare_launchers(
    reports: Sequence[NodeReport], started: Mapping[int, int], *, uneven: bool
) -> Agreement:
    """What the launchers inside the program are about to start in fact: LLaMA-Factory's counts devices by itself.

    Args:
        reports: of all nodes.
        started: ranks, by node rank.
        uneven: whether the numbers may be unequal.
    """
    if uneven:
        return Agreement.noted("nproc", "pass", "unequal numbers are meant: --uneven")
    members: Members = [
        (Who(report.node_rank, -1, report.host), _as_started(report, started.get(report.node_rank)))
        for report in sorted(reports, key=lambda report: report.node_rank)
    ]
    return _with_uneven(judge_nproc(members, may_differ=False))


def _as_started(report: NodeReport, nproc: int | None) -> NodeReport:
    if nproc is None or nproc == report.nproc:
        return report
    origin = "the launcher inside the program"
    return report.model_copy(update={"nproc": nproc, "nproc_declared": False, "nproc_origin": origin})


def compare_brought(name: str, brought: Mapping[int, tuple[int, str, Mapping[str, Any]]]) -> Agreement:
    """What ranks have brought to an agreement of their own.

    Args:
        name: of the agreement.
        brought: by rank: its node's number and host, and the facts.
    """
    first = sorted({key for _, _, facts in brought.values() for key in facts})
    cause, subject, remedy = next((value for key, value in _FACTS.items() if key in name), _FACTS["rows"])
    rule = Rule(f"program.{name}", subject, "equal", "fail", cause, remedy)
    said = [
        (Who(node_rank, rank, host), {key: freeze(value) for key, value in facts.items()})
        for rank, (node_rank, host, facts) in sorted(brought.items())
    ]
    order = {key: number for number, key in enumerate(first)}
    return judge_keys(
        rule,
        said,
        Wording(order=lambda key: order.get(key, 0), good=f"{name}: the same on all ranks"),
        scene=_RANKS,
    )

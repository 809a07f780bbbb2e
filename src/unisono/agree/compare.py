"""Whether all nodes mean the same run: the head's judgement of their reports. Pure, and the same for any order of reports."""

from collections.abc import Callable, Sequence

from unisono.agree.addresses import judge_addresses, judge_mtu, judge_names
from unisono.agree.agreement import Agreement
from unisono.agree.clock import judge_clocks
from unisono.agree.contents import judge_files
from unisono.agree.counts import Members, judge_identity, judge_nodes, judge_nproc
from unisono.agree.devices import judge_devices
from unisono.agree.interfaces import judge_interfaces
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.known_bad import judge_known_bad
from unisono.agree.limits import judge_limits
from unisono.agree.lint import judge_settings
from unisono.agree.naming import Who
from unisono.agree.report import NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.settings import judge_environment
from unisono.agree.showing import freeze
from unisono.agree.storage import judge_storage
from unisono.agree.version_rules import judge_code, judge_packages, judge_versions


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
"""Cheap and decisive first: what stands above may be the reason of what stands below."""


BEFORE_A_RESTART = (judge_devices, judge_interfaces, judge_storage, judge_limits)
"""What may have changed while ranks ran. What files hold, and what was set, has been agreed on."""


def compare_again(reports: Sequence[NodeReport]) -> Agreement:
    """The checks before ranks are started again."""
    members = _in_order(reports)
    return Agreement().merged(*(judge(members) for judge in BEFORE_A_RESTART))


def compare_nodes(reports: Sequence[NodeReport]) -> Agreement:
    """All checks of the nodes, and a verdict for each thing that is wrong, the decisive one first."""
    members = _in_order(reports)
    if not members:
        return Agreement.noted("nodes", "unknown", "no node has reported")
    return Agreement().merged(*(judge(members) for judge in IN_ORDER))


def _in_order(reports: Sequence[NodeReport]) -> Members:
    """By node; where two claim one number, by all they say, so that the order of arrival decides nothing."""
    unique = len({report.node_rank for report in reports}) == len(reports)
    ordered = sorted(
        reports, key=lambda report: (report.node_rank, "" if unique else report.model_dump_json())
    )
    return [(Who(report.node_rank, -1, report.host), report) for report in ordered]

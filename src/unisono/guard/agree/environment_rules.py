"""Environment variables: which must be equal on all nodes, and which settings are wrong or
suspicious on any node.
"""

import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.base.causes import Evidence
from unisono.base.causes.variables import KNOWN_TO_LIBRARIES, VARIABLES, Group, find_variable
from unisono.base.text import nearest
from unisono.guard.agree.addresses import is_loopback
from unisono.guard.agree.agreement import Agreement, Keyed, Wording, judge_keys, partition, violation
from unisono.guard.agree.membership import Members
from unisono.guard.agree.reports import (
    Member,
    NodeReport,
    count,
    name_all,
    settings_of,
    show,
    show_setting,
    show_value,
)
from unisono.guard.agree.rules import NODE_RULES, Need
from unisono.guard.agree.version_rules import release_of

_NEED: dict[Group, Need] = {"equal": "equal", "unique": "unique", "per-node": "valid", "free": "free"}

LAUNCH: frozenset[str] = frozenset(
    {
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "NNODES",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RDZV_ID",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    }
)
"""Read by the command line or set for each rank: their effect is compared (nodes, nproc, address),
not their value.
"""

ONLY_WARN: dict[str, str] = {
    "PYTHONHASHSEED": "the rows and their order are compared by digest before the first step",
    "HF_HUB_OFFLINE": "the files are compared by digest",
    "HF_DATASETS_OFFLINE": "the files are compared by digest",
    "HF_ENDPOINT": "the files are compared by digest",
    "CUDA_LAUNCH_BLOCKING": "one node is slower",
    "CUDA_DEVICE_ORDER": "devices are named by UUID",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "devices are named by UUID",
    "PYTORCH_ALLOC_CONF": "one node may run out of memory earlier",
    "PYTORCH_CUDA_ALLOC_CONF": "one node may run out of memory earlier",
}
"""Variables whose difference is only a warning, and its effect."""

DEFAULTS: dict[str, str] = {
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_NAN_CHECK": "0",
    "TORCH_DIST_INIT_BARRIER": "0",
    "TORCH_GLOO_LAZY_INIT": "0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "CUDA_LAUNCH_BLOCKING": "0",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "HF_HUB_OFFLINE": "0",
    "HF_DATASETS_OFFLINE": "0",
    "HF_ENDPOINT": "https://huggingface.co",
}
"""Documented defaults: a variable with this value equals one that is not set."""

_ANY_CASE = {"TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_FAMILY"}
_EQUAL_FAMILY = re.compile(r"^(ACCELERATE|FSDP|DS|TORCHINDUCTOR|TORCH_COMPILE)_")
_CHECKED_NAMES = re.compile(r"^(NCCL|TORCH_NCCL|GLOO)_")


def need_of(name: str) -> Need:
    """The requirement on the variable: equal, unique, valid or free."""
    variable = find_variable(name)
    if variable is not None:
        return _NEED[variable.group]
    return "equal" if _EQUAL_FAMILY.match(name) or _CHECKED_NAMES.match(name) else "free"


def compared(name: str) -> bool:
    """Whether a difference of the variable is an error or a warning."""
    is_known = find_variable(name) is not None or bool(_EQUAL_FAMILY.match(name))
    return is_known and name not in LAUNCH and (need_of(name) == "equal" or name in ONLY_WARN)


def only_warns(name: str) -> bool:
    """Whether a difference is only a warning: its effect is compared elsewhere, or the variable is
    unknown.
    """
    return name in ONLY_WARN or find_variable(name) is None


def normalized(name: str, value: str) -> str | None:
    """The normalized value: None for the default; equivalent spellings are equal."""
    spelt = value.strip().upper() if name in _ANY_CASE else value.strip()
    return None if spelt == DEFAULTS.get(name) else spelt


def unknown_names(names: Iterable[str]) -> dict[str, str | None]:
    """Unknown names of NCCL, gloo or torch's NCCL, each with the closest known one."""
    all_names = [variable.name for variable in VARIABLES]
    return {
        name: nearest(name, all_names)
        for name in sorted(set(names) - KNOWN_TO_LIBRARIES)
        if _CHECKED_NAMES.match(name) and find_variable(name) is None
    }


NodeSettings = Sequence[tuple[Member, NodeReport, Mapping[str, str]]]


def judge_environment(members: Members) -> Agreement:
    """Variables that ranks must agree on have the same effect on all nodes."""
    rule = NODE_RULES["env"]
    settings = [(who, report, settings_of(report)) for who, report in members]
    names = {name for _, _, values in settings for name in values if compared(name)}
    fatal = sorted(name for name in names if not only_warns(name))
    nonfatal = sorted(names.difference(fatal))
    good = f"{len(fatal)} that must be equal are equal" if fatal else "no variable that must be equal is set"
    wording = Wording(shown=_shown(settings), typed=_typed(settings), remedies=_filed(members), good=good)
    agreement = judge_keys(rule, _effects(settings, fatal), wording)
    if not nonfatal:
        return agreement
    rule = replace(rule, violated="warn", subject="environment variables that should be equal")
    wording = replace(wording, label=_with_reason, good=f"{len(nonfatal)} that should be equal are equal")
    return agreement.merged(judge_keys(rule, _effects(settings, nonfatal), wording))


def _effects(settings: NodeSettings, names: Sequence[str]) -> Keyed:
    return [
        (who, {name: normalized(name, values[name]) for name in names if name in values})
        for who, _, values in settings
    ]


def _spelt(settings: NodeSettings, name: str, value: Hashable) -> list[tuple[NodeReport, str]]:
    """The reports that have the variable with this effect, each with its value."""
    return [
        (report, values[name])
        for _, report, values in settings
        if name in values and normalized(name, values[name]) == value
    ]


def _shown(settings: NodeSettings) -> Callable[[str, Hashable], str]:
    """Displays values as set, with the file if one sets them; the default and an unset variable are
    equal.
    """

    def shown(name: str, value: Hashable) -> str:
        holders = _spelt(settings, name, value)
        if value is None:
            return " or ".join(["not set", *sorted({show(spelt) for _, spelt in holders})])
        filed = bool(holders) and all(name not in report.variables for report, _ in holders)
        return show_value(name, min(spelt for _, spelt in holders)) + (" (in nccl.conf)" if filed else "")

    return shown


def _typed(settings: NodeSettings) -> Callable[[str, Hashable], str]:
    """Quotes values for a shell."""

    def typed(name: str, value: Hashable) -> str:
        return shlex.quote(min((spelt for _, spelt in _spelt(settings, name, value)), default=str(value)))

    return typed


def _filed(members: Members) -> dict[str, tuple[str, ...]]:
    """Remedies for variables that are set in a file, since a shell cannot unset them."""
    names = {name for _, report in members for name in report.nccl_files if name not in report.variables}
    line = "on {who}: check /etc/nccl.conf and ~/.nccl.conf: {key} must be equal on all nodes, or not set"
    return dict.fromkeys(names, (line,))


def _with_reason(name: str) -> str:
    return f"{name} ({ONLY_WARN.get(name, 'differs')})"


Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Lint:
    """One suspicious setting: the variable, its condition, why it is suspicious, and the fix."""

    name: str
    when: Callable[[str, Settings, NodeReport], bool]
    why: str
    fix: str
    fatal_cause: str = ""
    """Cause, if the run cannot start with this setting."""


def _on(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return value.strip() not in ("", "0")


def _off(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return value.strip() == "0"


def _always(_value: str, _settings: Settings, _report: NodeReport) -> bool:
    return True


def _on_cuda(value: str, settings: Settings, report: NodeReport) -> bool:
    return report.device_kind == "cuda" and _on(value, settings, report)


def _number(value: str) -> int | None:
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


def _infiniband_off(value: str, settings: Settings, report: NodeReport) -> bool:
    return _on(value, settings, report) and any(
        one.kind == "infiniband" and one.up for one in report.interfaces
    )


def _peer_to_peer_off(value: str, settings: Settings, report: NodeReport) -> bool:
    return _on_cuda(value, settings, report) and report.nproc > 1


def _two_ways_to_wait(value: str, settings: Settings, report: NodeReport) -> bool:
    return (
        _on(value, settings, report) and settings.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3").strip() != "0"
    )


def _empty_dump(value: str, settings: Settings, report: NodeReport) -> bool:
    sizes = [settings.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    return _on(value, settings, report) and any(size is not None and size.strip() == "0" for size in sizes)


def _short_heartbeat(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return (_number(value) or 480) < 120


def _is_verbose(value: str, settings: Settings, _report: NodeReport) -> bool:
    return value.strip().upper() in ("INFO", "TRACE") and not settings.get("NCCL_DEBUG_FILE")


def _detail(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return value.strip().upper() == "DETAIL"


def _no_ring(value: str, _settings: Settings, report: NodeReport) -> bool:
    nccl = release_of(report.versions.get("nccl", ""))
    text = value.lower()
    excludes_others = text.strip().startswith("^") and "ring" not in text
    return nccl >= (2, 24) and bool(text.strip()) and "ring" not in text and not excludes_others


def _two_allocators(value: str, settings: Settings, _report: NodeReport) -> bool:
    return settings.get("PYTORCH_ALLOC_CONF", value) != value


def _foreign_nccl(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return "nccl" in value.lower()


def _is_loopback_address(value: str, _settings: Settings, report: NodeReport) -> bool:
    return report.nodes > 1 and is_loopback(value) and not is_loopback(report.address)


def _is_invalid_port(value: str, _settings: Settings, report: NodeReport) -> bool:
    port = _number(value)
    return report.nodes > 1 and (port is None or port < 1024 or port > 65535)


def _random_port(value: str, _settings: Settings, report: NodeReport) -> bool:
    return report.nodes > 1 and 32768 <= (_number(value) or 0) <= 60999


def _hides_all(value: str, _settings: Settings, report: NodeReport) -> bool:
    return value.strip() in ("", "-1") and bool(report.physical)


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _has_duplicates(value: str, _settings: Settings, _report: NodeReport) -> bool:
    words = _words(value)
    return len(set(words)) < len(words)


def _mixed(value: str, _settings: Settings, _report: NodeReport) -> bool:
    return len({_number(word) is None for word in _words(value) if word != "-1"}) > 1


def _beyond(value: str, _settings: Settings, report: NodeReport) -> bool:
    numbers = [number for word in _words(value) if (number := _number(word)) is not None]
    return bool(report.physical) and any(number >= len(report.physical) for number in numbers)


_DEBUGGING = "for debugging: slows down training"
_OLD = "deprecated: newer NCCL versions may ignore it"

# fmt: off
LINTS: tuple[Lint, ...] = (
    Lint("CUDA_VISIBLE_DEVICES", _beyond, "no device has this index, and CUDA ignores all devices after it",
         "`nvidia-smi -L` lists the devices; indices start at 0", "invalid_device_ordinal"),
    Lint("CUDA_VISIBLE_DEVICES", _has_duplicates,
         "a device is listed twice, so CUDA shows fewer devices, or none", "list each device once",
         "duplicate_gpu"),
    Lint("CUDA_VISIBLE_DEVICES", _mixed, "indices and UUIDs are mixed, which CUDA does not support",
         "use indices, or use UUIDs"),
    Lint("CUDA_VISIBLE_DEVICES", _hides_all, "hides all devices", "unset it, or set `device: cpu` in the config"),
    Lint("MASTER_ADDR", _is_loopback_address, "a loopback address in a job of several nodes",
         "use the head's address, or --head HOST:PORT"),
    Lint("MASTER_PORT", _is_invalid_port, "not a valid port for a user's program",
         "choose one from 1024 to 32767, for example 29500"),
    Lint("MASTER_PORT", _random_port, "in the system's ephemeral port range: it may be in use",
         "choose one from 1024 to 32767, for example 29500"),
    Lint("TORCH_NCCL_ASYNC_ERROR_HANDLING", _off, "failed collectives hang forever",
         "unset it: the default, 3, kills the process"),
    Lint("TORCH_NCCL_ENABLE_MONITORING", _off, "disables the monitor that detects a stuck watchdog", "unset it"),
    Lint("TORCH_NCCL_BLOCKING_WAIT", _two_ways_to_wait,
         "conflicts with asynchronous error handling, and is slow", "unset it"),
    Lint("NCCL_ASYNC_ERROR_HANDLING", _always, "deprecated name", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    Lint("NCCL_BLOCKING_WAIT", _always, "deprecated name", "TORCH_NCCL_BLOCKING_WAIT"),
    Lint("NCCL_TIMEOUT", _always, "not an NCCL variable: it has no effect",
         "unset it; stalls are detected without a timeout"),
    Lint("TORCH_NCCL_DUMP_ON_TIMEOUT", _empty_dump,
         "the flight recorder's buffer has size 0: the dump is empty", "TORCH_FR_BUFFER_SIZE=2000"),
    Lint("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", _short_heartbeat,
         "shorter than a slow first step, a compilation or a save: healthy ranks are killed",
         "unset it, or set it to 480 or more"),
    Lint("NCCL_IB_DISABLE", _infiniband_off,
         "InfiniBand is up but disabled: probably a leftover workaround that costs most of the bandwidth",
         "unset it on all nodes"),
    Lint("NCCL_P2P_DISABLE", _peer_to_peer_off,
         "devices of one machine communicate through host memory: slow if they have NVLink",
         "unset it on all nodes, unless it fixes a hang"),
    Lint("NCCL_SHM_DISABLE", _peer_to_peer_off, "traffic inside the machine goes through the network: slow",
         "unset it on all nodes; start a container with --shm-size=8g"),
    Lint("NCCL_ALGO", _no_ring, "without ring: since NCCL 2.24 collectives that support only ring have no fallback",
         "add ring, or unset it on all nodes"),
    Lint("NCCL_DEBUG", _is_verbose, "excessive output in a long run",
         "NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=/tmp/nccl.%h.%p"),
    Lint("TORCH_DISTRIBUTED_DEBUG", _detail, "small collectives take about twice as long",
         "unset it on all nodes after debugging"),
    Lint("CUDA_LAUNCH_BLOCKING", _on_cuda, _DEBUGGING, "unset it on all nodes"),
    Lint("NCCL_CHECK_POINTERS", _on_cuda, _DEBUGGING, "unset it on all nodes"),
    Lint("TORCH_NCCL_NAN_CHECK", _on_cuda, _DEBUGGING,
         "unset it on all nodes; the loss is checked in every step anyway"),
    Lint("PYTORCH_CUDA_ALLOC_CONF", _two_allocators,
         "PYTORCH_ALLOC_CONF, its newer name, has a different value", "keep PYTORCH_ALLOC_CONF"),
    Lint("LD_PRELOAD", _foreign_nccl, "a different NCCL from the one included in torch", "unset it on all nodes"),
    *(
        Lint(name, _always, _OLD, f"unset {name} on all nodes")
        for name in ("NCCL_LAUNCH_MODE", "NCCL_NTHREADS", "NCCL_LL_THRESHOLD", "NCCL_TREE_THRESHOLD",
                     "NCCL_SINGLE_RING_THRESHOLD",
                     "NCCL_IB_CUDA_SUPPORT", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
    ),
)
# fmt: on


def judge_settings(members: Members) -> Agreement:
    """Each suspicious setting once, with the nodes that have it."""
    rule = NODE_RULES["settings"]
    agreement = Agreement()
    for lint in LINTS:
        hits = partition(
            (who, settings[lint.name])
            for who, report in members
            if lint.name in (settings := settings_of(report))
            and lint.when(settings[lint.name], settings, report)
        )
        for group in hits[:4]:
            agreement = agreement.merged(_suspicious(lint, group.value, members, set(group.members)))
    agreement = agreement.merged(_unknown(members), _same_machine_names(members))
    if not agreement.checks:
        number = len({name for _, report in members for name in settings_of(report)})
        return Agreement.noted(rule.id, "pass", f"{count(number, 'variable')} checked, none is suspicious")
    return agreement


def _suspicious(lint: Lint, value: str, members: Members, people: set[Member]) -> Agreement:
    rule = NODE_RULES["settings"]
    there = [who for who, _ in members if who in people]
    where = name_all(there)
    setting = show_setting(lint.name, value)
    if lint.fatal_cause and any(report.device_kind == "cuda" for who, report in members if who in people):
        rule = replace(rule, cause=lint.fatal_cause, violated="fail")
    return violation(
        rule,
        f"{setting} on {where}: {lint.why}",
        people=there,
        evidence=[Evidence(where=where, text=setting)],
        fix=[f"on {where}: {lint.fix}"],
    )


def _unknown(members: Members) -> Agreement:
    """Unknown names with the prefix of NCCL, gloo or torch."""
    agreement = Agreement()
    names = unknown_names(name for _, report in members for name in settings_of(report))
    for name, close in names.items():
        people = [who for who, report in members if name in settings_of(report)]
        normalized = f"did you mean {close}?" if close else "it may have no effect"
        fix = [f"`unisono explain {close}`"] if close else []
        fix.append(f"`unset {show(name)}` on {name_all(people)}, unless it is needed")
        summary = f"{show(name)} on {name_all(people)}: unknown variable; {normalized}"
        agreement = agreement.merged(violation(NODE_RULES["settings"], summary, people=people, fix=fix))
    return agreement


def _same_machine_names(members: Members) -> Agreement:
    """NCCL_HOSTID defines which ranks share a machine: two machines with the same value would try
    to share memory.
    """
    named = [(who, report) for who, report in members if settings_of(report).get("NCCL_HOSTID")]
    for group in partition((who, settings_of(report)["NCCL_HOSTID"]) for who, report in named):
        hosts = {who.host for who in group.members}
        if len(hosts) > 1:
            where = name_all(group.members)
            setting = show_setting("NCCL_HOSTID", group.value)
            fatal = all(report.device_kind == "cuda" for who, report in named if who in group.members)
            rule = replace(NODE_RULES["settings"], cause="p2p_blocked", violated="fail" if fatal else "warn")
            return violation(
                rule,
                f"{setting} on {where}: NCCL treats these machines as one",
                people=group.members,
                evidence=[Evidence(where=where, text=setting)],
                fix=[f"on {where}: `unset NCCL_HOSTID`"],
            )
    return Agreement()

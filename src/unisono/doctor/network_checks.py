"""Checks of this machine's network, and of the environment variables in force that decide how ranks find and understand each other. Nothing is sent to other machines."""

import difflib
import errno
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono.agree.environment_rules import LAUNCH, judge_settings, need_of
from unisono.agree.reports import Member, enumerate_words, settings_of, show_setting
from unisono.agree.rules import NEED_MEANING
from unisono.causes.variables import KNOWN_TO_LIBRARIES, VALUES, VARIABLES, find_variable
from unisono.doctor.check import Check, CheckFunction, Finding, Surroundings, agreement_findings, found
from unisono.doctor.network_rules import (
    PORT,
    judge_choice,
    judge_firewall,
    judge_infiniband,
    judge_interfaces,
    judge_names,
)
from unisono.facts.network import find_listener, is_loopback, read_firewall
from unisono.facts.processes import holder_of
from unisono.rendezvous.head_address import address_towards
from unisono.text import one_line

_TORCHRUN_PORT = 29500


def check_network(around: Surroundings) -> list[Finding]:
    """Interfaces, choices, names, ports of InfiniBand, and the firewall."""
    report, topology = around.report, around.local_node.topology
    settings = settings_of(report)
    cuda = report.device_kind == "cuda"
    head = topology.head_host
    began = time.monotonic()
    own = around.probes.network.resolve(report.host)
    took_s = time.monotonic() - began
    found_head = around.probes.network.resolve(head) if head and topology.nodes > 1 else []
    # Several "nodes" on one machine's loopback need no way out of it.
    several = topology.nodes > 1 and not (head == "localhost" or (found_head == [head] and is_loopback(head)))
    address = _own_address(around, found_head) if several else ""
    return [
        judge_interfaces(report.interfaces, several=several),
        *judge_choice(
            report.interfaces, settings, own_addresses=own, several=several, cuda=cuda, address=address
        ),
        judge_names(
            report.host,
            own,
            took_s,
            head=head,
            head_addresses=found_head,
            several=several,
            is_head=topology.is_head,
        ),
        *judge_infiniband(around.probes.infiniband(), settings),
        *judge_firewall(read_firewall() if several else None, several=several),
    ]


def _own_address(around: Surroundings, head: list[str]) -> str:
    """This machine's address, on which the other nodes reach it; empty if unknown."""
    topology = around.local_node.topology
    if not head:
        return ""
    return head[0] if topology.is_head else address_towards(topology.head_host, around.probes.network)


def check_port(around: Surroundings) -> list[Finding]:
    """The finding on the head's port: on node 0 of several nodes, or for torchrun's ranks."""
    topology = around.local_node.topology
    requested = around.environment.variables.get("MASTER_PORT") or around.environment.leftovers.get(
        "MASTER_PORT", ""
    )
    if topology.nodes > 1 and not topology.is_head:
        return []
    if topology.nodes > 1 and topology.hosts and topology.head_port == 0:
        return [
            found(PORT, "pass", "the system chooses a free one, and --hosts passes it to the other nodes")
        ]
    needed = topology.nodes > 1
    named = needed or requested.isdecimal()
    port = topology.head_port if needed else int(requested) if requested.isdecimal() else _TORCHRUN_PORT
    if not 0 < port < 1 << 16:
        return [
            found(
                PORT,
                "fail",
                f"{port} is not a valid port",
                fix=["--head HOST:29500, or export MASTER_PORT=29500"],
            )
        ]
    problem = _bind_error(port)
    if problem:
        listener = find_listener(port)
        who = (
            f": pid {listener.pid} ({one_line(holder_of(listener.pid).command, limit=80)})"
            if listener
            else ""
        )
        fix = [f"end that process: kill {listener.pid}"] if listener else []
        fix.append(
            "or use a different port: --head HOST:PORT on every node"
            if needed
            else "or use a different port: torchrun --master-port PORT"
        )
        return [found(PORT, "fail" if named else "warn", f"port {port}: {problem}{who}", fix=fix)]
    low, high = _ephemeral_range()
    if named and low <= port <= high:
        text = f"port {port} is free now, but in the ephemeral range ({low}–{high}), from which the system assigns ports"
        return [found(PORT, "warn", text, fix=[f"choose one below {low}, e.g. {_TORCHRUN_PORT}"])]
    return [found(PORT, "pass", f"port {port} is free")]


def _bind_error(port: int) -> str:
    """Why the port cannot be bound now; empty: it can. The port is released at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "in use by a different program"
            return one_line(error.strerror or str(error))
    return ""


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32_768, 60_999
    return int(low), int(high)


CHECKS: tuple[CheckFunction, ...] = (check_network, check_port)


VALUES_CHECK = Check(
    "settings.values",
    "values of variables that are set",
    "a library reads an invalid value as a different one or ignores it, usually without a message",
    "Every variable of the catalogue, and of the families NCCL_, TORCH_NCCL_, GLOO_ and similar, from the environment and from nccl.conf, with its meaning and whether"
    " nodes must agree on it. Warns for an invalid value; fails if no process group can be created with it.",
    ("env_suspicious",),
)
SUSPICIOUS = Check(
    "settings.suspicious",
    "suspicious settings",
    "workarounds stay in a shell profile, and slow down or hang later jobs",
    "A table of settings that are obsolete, slow, contradictory, or workarounds for hardware that this machine does not have; and unknown names of NCCL, torch and gloo"
    ", with the nearest known one. Warns; fails if the run could not start.",
    ("env_suspicious", "invalid_device_ordinal", "duplicate_gpu"),
)
MISSPELT = Check(
    "settings.misspelt",
    "misspelled names",
    "a misspelled variable has no effect, and no library reports it",
    "Unknown names that resemble known variables. Warns, with the probable name.",
    ("env_suspicious",),
)
LEFT_OVER = Check(
    "settings.left_over",
    "variables left over from an earlier job",
    "RANK, WORLD_SIZE or MASTER_ADDR in a shell make other programs wait for ranks that never start; unisono ignores them with a note",
    "Variables that launchers set for the processes of a job, found in an environment without a launcher. Warns.",
    ("world_mismatch", "env_suspicious"),
)
SETTINGS: tuple[Check, ...] = (VALUES_CHECK, SUSPICIOUS, MISSPELT, LEFT_OVER)

_SIMILARITY = 0.88  # CUDA_VISIBLE_DEVICE is, CUDA_HOME is not
_OF_FAMILY = re.compile(r"^(NCCL|GLOO|TORCH|CUDA|PYTORCH|OMP)_")
_JOB_VARIABLE = re.compile(r"^(TORCHELASTIC_|PET_|OMPI_COMM_WORLD_|PMI_|MV2_COMM_WORLD_|UNISONO_)")


def check_values(facts: Surroundings) -> list[Finding]:
    """Variables that are set, and their invalid values."""
    settings = settings_of(facts.report)
    wrong = [
        finding
        for name, value in settings.items()
        if (finding := _invalid_value(name, value, facts)) is not None
    ]
    if wrong:
        return wrong
    rows = [_explain(name, value, facts.report.variables) for name, value in settings.items()]
    rows += [
        f"{name}: {_unknown_name(name)}" for name in facts.environment.strangers if _OF_FAMILY.match(name)
    ]
    if not rows:
        return [found(VALUES_CHECK, "pass", "none is set: libraries use their defaults")]
    many = f"{len(rows)} set, each with a valid value" if len(rows) > 1 else "one set, with a valid value"
    return [found(VALUES_CHECK, "pass", many, *rows)]


def _invalid_value(name: str, value: str, facts: Surroundings) -> Finding | None:
    takes = VALUES.get(name)
    if takes is None or not value.strip() or re.fullmatch(takes.pattern, value.strip(), re.IGNORECASE):
        return None
    fatal = takes.fatal and facts.report.device_kind == "cuda"
    text = f"{show_setting(name, value)}: valid is {takes.text}; with this {takes.otherwise}"
    fix = [f"`unset {name}`, or set it to a valid value", f"`unisono explain {name}` describes it"]
    return found(VALUES_CHECK, "fail" if fatal else "warn", text, fix=fix)


def _explain(name: str, value: str, environment: Mapping[str, str]) -> str:
    """`NCCL_P2P_DISABLE=1: …; must be equal everywhere`."""
    known = find_variable(name)
    where = "" if name in environment else " (in nccl.conf)"
    meaning = known.meaning if known is not None else _unknown_name(name)
    return f"{show_setting(name, value)}{where}: {meaning}; it {NEED_MEANING[need_of(name)]}"


def _unknown_name(name: str) -> str:
    return "see its library's documentation" if name in KNOWN_TO_LIBRARIES else "unknown to unisono"


def check_suspicious(facts: Surroundings) -> list[Finding]:
    """Suspicious settings, by the table of agreement."""
    report = facts.report
    members = [(Member(report.node_rank, -1, report.host), report)]
    reasons = {} if facts.loaded is None else facts.loaded.config.reasons
    return [
        _with_reason(finding, reasons)
        for finding in agreement_findings(judge_settings(members), report, {"settings": SUSPICIOUS})
    ]


def _with_reason(finding: Finding, reasons: Mapping[str, str]) -> Finding:
    """The finding, with the reasons that the config gives for its settings."""
    rows = [
        f"{name} is set on purpose: {why}"
        for name, why in reasons.items()
        if finding.status != "pass" and re.search(rf"\b{re.escape(name)}\b", finding.evidence[0])
    ]
    return replace(finding, evidence=(*finding.evidence, *rows)) if rows else finding


def check_misspelt(facts: Surroundings) -> list[Finding]:
    """Unknown names that resemble known variables; names with the prefixes of NCCL, torch and gloo are among the suspicious ones."""
    known = [variable.name for variable in VARIABLES]
    wrong = []
    for name in facts.environment.strangers:
        normalized = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        if normalized and name not in KNOWN_TO_LIBRARIES and name not in facts.report.variables:
            fix = [
                f'`export {normalized[0]}="${name}"; unset {name}`, if you mean that',
                f"`unisono explain {normalized[0]}`",
            ]
            wrong.append(
                found(MISSPELT, "warn", f"{name} is set but unknown: did you mean {normalized[0]}?", fix=fix)
            )
    return wrong or [found(MISSPELT, "pass", "no misspelled names")]


def check_left_over(facts: Surroundings) -> list[Finding]:
    """Variables of a launcher that is not running."""
    if facts.environment.live_launcher is not None:
        return [
            found(
                LEFT_OVER,
                "pass",
                f"{facts.environment.live_launcher} is running, and its variables belong to this job",
            )
        ]
    names = [
        name
        for name in (*facts.local_node.leftovers, *facts.environment.strangers)
        if name in LAUNCH or _JOB_VARIABLE.match(name)
    ]
    if not names:
        return [found(LEFT_OVER, "pass", "none")]
    named = sorted(set(names))
    text = f"{enumerate_words(named, at_most=12)}: set, but no launcher is running here"
    return [found(LEFT_OVER, "warn", text, fix=[f"`unset {' '.join(named)}`"])]


SETTINGS_CHECKS: tuple[CheckFunction, ...] = (check_values, check_suspicious, check_misspelt, check_left_over)

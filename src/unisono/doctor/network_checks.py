"""Checks of this machine's network. Nothing is sent to other machines."""

import errno
import socket
import time
from pathlib import Path

from unisono.agree.reports import settings_of
from unisono.doctor.check import CheckFunction, Finding, Surroundings, found
from unisono.doctor.network_rules import (
    PORT,
    judge_choice,
    judge_firewall,
    judge_infiniband,
    judge_interfaces,
    judge_names,
)
from unisono.facts.network import is_loopback
from unisono.facts.processes import holder_of
from unisono.facts.tcp import find_listener, read_firewall
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

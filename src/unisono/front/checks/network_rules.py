"""Rules of the network checks: which interface NCCL and gloo choose, names, InfiniBand, firewall.

Pure.

NCCL (socket.cc, ncclFindInterfaces): NCCL_SOCKET_IFNAME; else names that begin with ib; else all
but docker, lo and virbr; else docker; else lo. gloo (torch, ProcessGroupGloo): GLOO_SOCKET_IFNAME,
exact names; else the interface with an address of the host's own name; else loopback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.base.text import nearest, one_line
from unisono.front.checks.check import DoctorCheck, Finding, Status, found
from unisono.guard.agree.addresses import matching
from unisono.guard.agree.reports import Interface
from unisono.guard.facts.network import Firewall, InfinibandPort, is_loopback

INTERFACES = DoctorCheck(
    "network.interfaces",
    "network interfaces",
    "nodes meet over one interface each; if it is down, slow or missing they wait for each other until a"
    " timeout",
    "The kernel's list over netlink: kind, state, addresses, MTU, speed. FAIL: several nodes, and only"
    " loopback and bridges are up with an address. WARN: interfaces that are up differ in MTU.",
    ("address_unreachable", "mtu_blackhole"),
)
CHOICE = DoctorCheck(
    "network.choice",
    "the interface that NCCL and gloo choose",
    "a variable copied from a different machine, or a container bridge, gives ranks addresses that no peer"
    " can reach",
    "NCCL_SOCKET_IFNAME (prefixes, ^, =) and GLOO_SOCKET_IFNAME (exact names) compared with the interfaces of"
    " this machine; without them the default order of NCCL (ib…, others, docker…, lo) and gloo (the host"
    " name's address). FAIL: no interface matches, or the one chosen does not reach the other nodes.",
    ("nccl_socket_iface", "address_unreachable"),
)
NAMES = DoctorCheck(
    "network.names",
    "host names",
    "a host name that resolves to 127.0.1.1, as some installers write it, sends each peer to itself",
    "This machine's own name and the head's, through the system's resolver. FAIL: the head's name has no"
    " address, or resolves on other nodes to themselves. WARN: this machine's name resolves to loopback or"
    " not at all, or the resolver takes more than a second.",
    ("hostname_loopback", "dns_failure"),
)
INFINIBAND = DoctorCheck(
    "network.infiniband",
    "InfiniBand and RoCE ports",
    "with an inactive port, or one disabled by a variable, a job uses a network that is ten times slower",
    "States, rates and NUMA nodes from /sys/class/infiniband, and NCCL_IB_DISABLE and NCCL_IB_HCA. WARN: a"
    " port is down, rates differ, or active ports are unused.",
)
PORT = DoctorCheck(
    "network.port",
    "the head's port",
    "if a different program has the port, the other nodes connect to it and hang silently",
    "On node 0 the port of --head or MASTER_PORT (default 29500, torchrun's) is bound and released. FAIL: it"
    " is in use, and the job needs it. WARN: it is in use and only torchrun's default, or is in the ephemeral"
    " range.",
    ("port_in_use",),
)
FIREWALL = DoctorCheck(
    "network.firewall",
    "firewall of this machine",
    "ranks listen on ports that are chosen at run time, so with a firewall that opens only some ports a job"
    " starts and then hangs",
    "Rules for incoming packets, from iptables and nft; only root can list them. WARN: several nodes, and"
    " some packets are rejected. UNKNOWN: several nodes, but no root access, or both programs are missing."
    " Firewalls"
    " between nodes are found when nodes dial each other (--nodes).",
    ("address_unreachable",),
)

CATALOGUE = (INTERFACES, CHOICE, NAMES, INFINIBAND, PORT, FIREWALL)


_NCCL_ORDER = (
    ("ib", "names that begin with ib come first"),
    ("^docker,lo,virbr", "the first one except docker, lo and virbr"),
    ("docker", "no other interface"),
    ("lo", "no other interface"),
)
_LOCAL_PREFIXES = ("docker", "br-", "virbr", "cni", "veth", "podman", "lxcbr", "lxdbr", "flannel")


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The interface that a library chooses.

    Attributes:
        interface: None: it finds none, and fails.
        why: by which rule.
        variable: that decides; empty: none is set.
    """

    interface: Interface | None
    why: str
    variable: str = ""


def usable_interfaces(interfaces: Sequence[Interface]) -> list[Interface]:
    """Interfaces that libraries consider: up, with an address."""
    return [one for one in interfaces if one.up and one.addresses]


def leads_out(interface: Interface) -> bool:
    """Whether the interface reaches other machines, judged by kind and name."""
    return (
        not interface.loopback
        and interface.kind != "virtual"
        and not interface.name.startswith(_LOCAL_PREFIXES)
    )


def nccl_choice(interfaces: Sequence[Interface], settings: Mapping[str, str]) -> InterfaceChoice:
    """The interface that NCCL uses for its bootstrap, and for data without InfiniBand."""
    usable = usable_interfaces(interfaces)
    value = settings.get("NCCL_SOCKET_IFNAME", "").strip()
    if len(value) > 1:  # as NCCL does: one letter counts as nothing
        matches = matching(value, usable)
        why = f"NCCL_SOCKET_IFNAME={value}"
        return InterfaceChoice(matches[0] if matches else None, why, "NCCL_SOCKET_IFNAME")
    for pattern, why in _NCCL_ORDER:
        matches = matching(pattern, usable)
        if matches:
            return InterfaceChoice(matches[0], why)
    return InterfaceChoice(None, "no interface is up with an address")


def gloo_choice(
    interfaces: Sequence[Interface], settings: Mapping[str, str], own_addresses: Sequence[str]
) -> InterfaceChoice:
    """The interface that gloo uses."""
    usable = {one.name: one for one in usable_interfaces(interfaces)}
    value = settings.get("GLOO_SOCKET_IFNAME", "").strip()
    if value:
        names = [name.strip() for name in value.split(",") if name.strip()]
        why = f"GLOO_SOCKET_IFNAME={value}"
        missing = [name for name in names if name not in usable]
        first = None if missing or not names else usable[names[0]]
        return InterfaceChoice(first, why, "GLOO_SOCKET_IFNAME")
    for address in own_addresses:
        owner = next(
            (
                one
                for one in usable.values()
                if address in one.addresses or (one.loopback and address.startswith("127."))
            ),
            None,
        )
        if owner is not None:
            return InterfaceChoice(owner, f"the host name resolves to {address}")
    loopback = next((one for one in usable.values() if one.loopback), None)
    return InterfaceChoice(loopback, "the host name resolves to no address of this machine")


_SLOW_RESOLVER_S = 1.0


def judge_interfaces(interfaces: Sequence[Interface], *, several: bool) -> Finding:
    """The finding on interfaces. `several`: the job has several nodes on several machines."""
    rows = _interface_rows(interfaces)
    if not interfaces:
        return found(INTERFACES, "unknown", "interfaces could not be listed")
    out = [one for one in usable_interfaces(interfaces) if leads_out(one)]
    if several and not out:
        fix = [
            "`ip -br addr` lists them; bring up the one of the common network: sudo ip link set dev NAME up"
        ]
        return found(
            INTERFACES,
            "fail",
            "no external interface is up with an address",
            *rows,
            fix=fix,
        )
    sizes = {one.mtu for one in out if one.mtu is not None and one.kind != "infiniband"}
    text = f"{len(out)} external: {', '.join(one_line(one.name) for one in out) or 'none'}"
    if several and len(sizes) > 1:
        fix = [
            "set the same MTU on interfaces and switches of the common network: sudo ip link set dev NAME mtu"
            " SIZE"
        ]
        return found(
            INTERFACES,
            "warn",
            f"{text}; different MTUs: {', '.join(map(str, sorted(sizes)))}",
            *rows,
            fix=fix,
        )
    return found(INTERFACES, "pass", text, *rows)


def _interface_rows(interfaces: Sequence[Interface]) -> list[str]:
    rows = [("interface", "state", "kind", "MTU", "speed", "addresses")] + [
        (
            one_line(one.name, limit=24),
            "up" if one.up else "down",
            one.kind,
            str(one.mtu or "?"),
            f"{one.speed_mbit / 1000:g} Gbit/s" if one.speed_mbit else "",
            ", ".join(map(one_line, one.addresses[:4])),
        )
        for one in interfaces
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def judge_choice(
    interfaces: Sequence[Interface],
    settings: Mapping[str, str],
    *,
    own_addresses: Sequence[str],
    several: bool,
    cuda: bool,
    address: str = "",
) -> list[Finding]:
    """Findings on the libraries' choice of interface.

    Args:
        several: the job has several nodes on several machines.
        cuda: ranks use NCCL; otherwise its variables have no effect.
        address: of this node, on which the others reach it; empty: unknown.
    """
    if not interfaces:
        return []
    choices = {"gloo": gloo_choice(interfaces, settings, own_addresses)}
    if cuda:
        choices["NCCL"] = nccl_choice(interfaces, settings)
    lines = [f"{name} uses {_chosen_name(choice)}: {choice.why}" for name, choice in choices.items()]
    bad = [
        finding
        for name, choice in choices.items()
        for finding in _bad_choice(name, choice, interfaces, several=several, address=address)
    ]
    if bad:
        return bad
    taken = {choice.interface.name for choice in choices.values() if choice.interface}
    if several and len(taken) > 1:
        return [
            found(
                CHOICE,
                "warn",
                "NCCL and gloo use different networks",
                *lines,
                fix=["set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the same interface"],
            )
        ]
    return [found(CHOICE, "pass", *lines)]


def _chosen_name(choice: InterfaceChoice) -> str:
    return "nothing" if choice.interface is None else one_line(choice.interface.name)


def _bad_choice(
    name: str, choice: InterfaceChoice, interfaces: Sequence[Interface], *, several: bool, address: str
) -> list[Finding]:
    out = next((one for one in usable_interfaces(interfaces) if address and address in one.addresses), None)
    out = out or next((one for one in usable_interfaces(interfaces) if leads_out(one)), None)
    variable = choice.variable or f"{name.upper()}_SOCKET_IFNAME"
    fix = [f"export {variable}={one_line(out.name)}"] if out else []
    fix += [f"unset {choice.variable}"] if choice.variable else []
    if choice.interface is None:
        requested = choice.why.partition("=")[2]
        down = [
            one.name
            for one in interfaces
            if one.name in requested.split(",") and not (one.up and one.addresses)
        ]
        close = (
            nearest(requested.lstrip("^=").split(",")[0], [one.name for one in usable_interfaces(interfaces)])
            if requested
            else None
        )
        hint = (
            f"; {down[0]} is down or has no address" if down else f"; did you mean {close}?" if close else ""
        )
        return [found(CHOICE, "fail", f"{name} finds no interface: {choice.why}{one_line(hint)}", fix=fix)]
    if not several:
        return []
    taken = choice.interface
    if not leads_out(taken) and not (address and address in taken.addresses):
        status: Status = "fail" if choice.variable else "warn"
        kind = "this machine's loopback" if taken.loopback else "a bridge of this machine's containers"
        note = (
            ""
            if choice.variable
            else "; unisono sets the right one for its own ranks, other programs need the variable"
        )
        return [
            found(CHOICE, status, f"{name} uses {one_line(taken.name)}, {kind}: {choice.why}{note}", fix=fix)
        ]
    if address and address not in taken.addresses and choice.variable:
        text = (
            f"{name} uses {one_line(taken.name)} ({choice.why}), but the nodes reach each other on {address}"
        )
        return [found(CHOICE, "warn", text, fix=fix)]
    return []


def judge_names(
    host: str,
    addresses: Sequence[str],
    took_s: float,
    *,
    head: str = "",
    head_addresses: Sequence[str] = (),
    several: bool,
    is_head: bool = True,
) -> Finding:
    """The finding on host names.

    Args:
        took_s: time of the look-up.
        head: the head's name; empty: none.
        is_head: this is node 0.
    """
    hosts_fix = (
        "fix the line of {name} in /etc/hosts; `getent hosts {name}` must give the address that others use"
    )
    lines = [f"{host} resolves to {', '.join(addresses) or 'nothing'} ({took_s * 1000:.0f} ms)"]
    if head and several:
        lines.append(f"the head's name {head} resolves to {', '.join(head_addresses) or 'nothing'}")
        literal = list(head_addresses) == [head]
        if not head_addresses:
            return found(
                NAMES,
                "fail",
                lines[1],
                lines[0],
                fix=["pass an IP address on every node: --head IP:PORT", hosts_fix.replace("{name}", head)],
            )
        if not literal and not is_head and all(map(is_loopback, head_addresses)):
            return found(
                NAMES,
                "fail",
                f"{lines[1]}: this machine itself",
                lines[0],
                fix=[hosts_fix.replace("{name}", head), "or --head IP:PORT on every node"],
            )
    if several and (not addresses or all(map(is_loopback, addresses))):
        text = f"{lines[0]}: ranks of other programs would give this address to their peers"
        return found(NAMES, "warn", text, *lines[1:], fix=[hosts_fix.replace("{name}", host)])
    if took_s > _SLOW_RESOLVER_S:
        return found(
            NAMES,
            "warn",
            f"{lines[0]}: every look-up takes that long",
            *lines[1:],
            fix=[
                "check /etc/resolv.conf for an unresponsive name server",
                f"or add {host} to /etc/hosts",
            ],
        )
    return found(NAMES, "pass", *lines)


def judge_infiniband(ports: Sequence[InfinibandPort], settings: Mapping[str, str]) -> list[Finding]:
    """Findings on InfiniBand and RoCE ports; none for machines without them."""
    if not ports:
        return []
    rows = [str(port) for port in ports]
    active = [port for port in ports if port.is_active]
    if active and settings.get("NCCL_IB_DISABLE", "0").strip() == "1":
        text = (
            f"NCCL_IB_DISABLE=1, but {len(active)} ports are active: NCCL uses sockets, at least ten times"
            " slower"
        )
        return [found(INFINIBAND, "warn", text, *rows, fix=["unset NCCL_IB_DISABLE"])]
    requested = settings.get("NCCL_IB_HCA", "").strip()
    if requested and active and not _selects(requested, active):
        fix = [
            f"export NCCL_IB_HCA='={','.join(dict.fromkeys(port.device for port in active))}'",
            "unset NCCL_IB_HCA",
        ]
        return [
            found(
                INFINIBAND,
                "warn",
                f"NCCL_IB_HCA={one_line(requested)} matches no active port",
                *rows,
                fix=fix,
            )
        ]
    idle = [port for port in ports if not port.is_active]
    if idle:
        why = (
            "not configured by a subnet manager: start opensm"
            if idle[0].state == "INIT"
            else "check cable and switch: `ibstat`"
        )
        text = (
            f"{len(idle)} of {len(ports)} ports are not active, {idle[0].device}:{idle[0].port} is"
            f" {idle[0].state} ({idle[0].physical})"
        )
        return [found(INFINIBAND, "warn", text, *rows, fix=[why])]
    taken = [port for port in active if not requested or _selects(requested, [port])]
    rates = {port.gbit for port in taken if port.gbit}
    if len(rates) > 1:
        fix = [
            "use ports of one rate: export"
            f" NCCL_IB_HCA='={','.join(port.device for port in taken if port.gbit == max(rates))}'"
        ]
        return [
            found(
                INFINIBAND,
                "warn",
                f"rates differ: {', '.join(f'{rate:g}' for rate in sorted(rates))} Gbit/s",
                *rows,
                fix=fix,
            )
        ]
    return [found(INFINIBAND, "pass", f"{len(active)} ports are active", *rows)]


def _selects(value: str, ports: Sequence[InfinibandPort]) -> bool:
    """Whether NCCL_IB_HCA selects one of the ports: prefixes, `=` for exact names, `^` to exclude;
    a port may follow: mlx5_0:1.
    """
    excluding, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]

    def named(port: InfinibandPort) -> bool:
        for word in words:
            device, _, number = word.partition(":")
            fits = port.device == device if exact else port.device.startswith(device)
            if fits and (not number or number == str(port.port)):
                return True
        return False

    return any(named(port) != excluding for port in ports)


def judge_firewall(firewall: Firewall | None, *, several: bool) -> list[Finding]:
    """Findings on the firewall; none for a single node, whose ranks meet on loopback."""
    if not several:
        return []
    if firewall is None:
        return [
            found(
                FIREWALL,
                "unknown",
                "rules cannot be listed: this needs root, and iptables or nft",
                fix=["sudo iptables -S INPUT; sudo nft list ruleset"],
            )
        ]
    if not firewall.drops_rest and not firewall.refusals:
        return [found(FIREWALL, "pass", "no incoming packets are rejected")]
    text = (
        "incoming packets are dropped by default"
        if firewall.drops_rest
        else f"{len(firewall.refusals)} rules reject incoming packets"
    )
    fix = [
        "open all ports above 1023 between the nodes: sudo iptables -I INPUT -p tcp -s PEER -j ACCEPT, on"
        " each node for each other one"
    ]
    return [
        found(FIREWALL, "warn", text, *(one_line(rule, limit=160) for rule in firewall.refusals[:8]), fix=fix)
    ]

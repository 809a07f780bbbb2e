"""Rules of the network checks: which interface NCCL and gloo choose, names, InfiniBand, firewall. Pure.

NCCL (socket.cc, ncclFindInterfaces): NCCL_SOCKET_IFNAME; else names that begin with ib; else all but docker, lo and virbr; else docker; else lo.
gloo (torch, ProcessGroupGloo): GLOO_SOCKET_IFNAME, exact names; else the interface with an address of the host's own name; else loopback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.agree.addresses import matching
from unisono.agree.reports import Interface
from unisono.doctor.check import Check, Finding, Status, found
from unisono.facts.network import InfinibandPort, is_loopback
from unisono.facts.tcp import Firewall
from unisono.text import nearest, one_line

INTERFACES = Check(
    "network.interfaces",
    "Network interfaces",
    "nodes communicate over one interface each; if it is down, slow or missing, they wait for each other until a timeout",
    "The kernel's list over netlink: kind, state, addresses, MTU, speed. FAIL: several nodes, and no interface but loopback and bridges is up with"
    " an address. WARN: those that are up differ in MTU.",
    ("address_unreachable", "mtu_blackhole"),
)
CHOICE = Check(
    "network.choice",
    "The interface that NCCL and gloo take",
    "a variable that was copied from another machine, or a bridge of containers, leads ranks to addresses that no peer reaches",
    "NCCL_SOCKET_IFNAME (prefixes, ^, =) and GLOO_SOCKET_IFNAME (exact names) against the interfaces that are here; without them the orders of NCCL"
    " (ib…, others, docker…, lo) and gloo (the host name's address). FAIL: nothing fits, or several nodes and it leads to none.",
    ("nccl_socket_iface", "address_unreachable"),
)
NAMES = Check(
    "network.names",
    "Host names",
    "a host name that leads to 127.0.1.1, as some installers write it, sends each peer to itself",
    "This machine's own name and the head's, through the system's resolver. FAIL: the head's name has no address, or leads another node to"
    " itself. WARN: the own name leads to loopback or nowhere, or the resolver takes more than a second.",
    ("hostname_loopback", "dns_failure"),
)
INFINIBAND = Check(
    "network.infiniband",
    "InfiniBand and RoCE ports",
    "a port that is not active, or switched off by a variable, leaves a job on a network that is ten times slower",
    "States, rates and NUMA nodes from /sys/class/infiniband, and NCCL_IB_DISABLE and NCCL_IB_HCA. WARN: a port is down, rates differ, or"
    " active ports are not used.",
)
PORT = Check(
    "network.port",
    "The port on which the head listens",
    "if a different program holds the port, the other nodes connect to that program and hang silently",
    "On node 0 the port of --head or MASTER_PORT (else 29500, where torchrun's ranks meet) is bound and let go. FAIL: it is taken, and the job needs it. WARN: it is"
    " taken and only torchrun's default, or lies where the system gives out ports by chance.",
    ("port_in_use",),
)
FIREWALL = Check(
    "network.firewall",
    "Firewall of this machine",
    "ranks listen on ports that are chosen at run time, so a firewall that opens only some lets a job begin and hang",
    "Rules for packets that come in, from iptables and nft; only root can list them. WARN: several nodes, and some are refused. UNKNOWN: several nodes, and no root or neither program."
    " Firewalls elsewhere are found by the nodes' dialling of each other (--nodes).",
    ("address_unreachable",),
)

CATALOGUE = (INTERFACES, CHOICE, NAMES, INFINIBAND, PORT, FIREWALL)


_NCCL_ORDER = (
    ("ib", "names that begin with ib come first"),
    ("^docker,lo,virbr", "the first that is no docker, lo or virbr"),
    ("docker", "nothing else is here"),
    ("lo", "nothing else is here"),
)
_LOCAL_PREFIXES = ("docker", "br-", "virbr", "cni", "veth", "podman", "lxcbr", "lxdbr", "flannel")


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """What a library takes.

    Attributes:
        interface: None: it finds none, and stops.
        why: by which rule.
        variable: that made it so; empty: none is set.
    """

    interface: Interface | None
    why: str
    variable: str = ""


def usable_interfaces(interfaces: Sequence[Interface]) -> list[Interface]:
    """Those that libraries look at: up, with an address."""
    return [one for one in interfaces if one.up and one.addresses]


def leads_out(interface: Interface) -> bool:
    """Whether other machines can be reached over it, as far as its kind and name tell."""
    return (
        not interface.loopback
        and interface.kind != "virtual"
        and not interface.name.startswith(_LOCAL_PREFIXES)
    )


def nccl_choice(interfaces: Sequence[Interface], settings: Mapping[str, str]) -> InterfaceChoice:
    """What NCCL takes for its first connections, and for data where there is no InfiniBand."""
    here = usable_interfaces(interfaces)
    value = settings.get("NCCL_SOCKET_IFNAME", "").strip()
    if len(value) > 1:  # as NCCL does: one letter counts as nothing
        found = matching(value, here)
        why = f"NCCL_SOCKET_IFNAME={value}"
        return InterfaceChoice(found[0] if found else None, why, "NCCL_SOCKET_IFNAME")
    for pattern, why in _NCCL_ORDER:
        found = matching(pattern, here)
        if found:
            return InterfaceChoice(found[0], why)
    return InterfaceChoice(None, "no interface is up with an address")


def gloo_choice(
    interfaces: Sequence[Interface], settings: Mapping[str, str], own_addresses: Sequence[str]
) -> InterfaceChoice:
    """What gloo takes.

    Args:
        interfaces: of this machine.
        settings: variables that are set.
        own_addresses: what this machine's host name leads to.
    """
    here = {one.name: one for one in usable_interfaces(interfaces)}
    value = settings.get("GLOO_SOCKET_IFNAME", "").strip()
    if value:
        names = [name.strip() for name in value.split(",") if name.strip()]
        why = f"GLOO_SOCKET_IFNAME={value}"
        missing = [name for name in names if name not in here]
        first = None if missing or not names else here[names[0]]
        return InterfaceChoice(first, why, "GLOO_SOCKET_IFNAME")
    for address in own_addresses:
        owner = next(
            (
                one
                for one in here.values()
                if address in one.addresses or (one.loopback and address.startswith("127."))
            ),
            None,
        )
        if owner is not None:
            return InterfaceChoice(owner, f"the host's own name leads to {address}")
    loopback = next((one for one in here.values() if one.loopback), None)
    return InterfaceChoice(loopback, "the host's own name leads to no address of this machine")


_SLOW_RESOLVER_S = 1.0


def judge_interfaces(interfaces: Sequence[Interface], *, several: bool) -> Finding:
    """Which there are. `several`: the job has several nodes on several machines."""
    rows = _interface_rows(interfaces)
    if not interfaces:
        return found(INTERFACES, "unknown", "the interfaces could not be listed")
    out = [one for one in usable_interfaces(interfaces) if leads_out(one)]
    if several and not out:
        fix = ["`ip -br addr` shows them; bring the common network's up: sudo ip link set dev NAME up"]
        return found(
            INTERFACES,
            "fail",
            "no interface that leads to other machines is up with an address",
            *rows,
            fix=fix,
        )
    sizes = {one.mtu for one in out if one.mtu is not None and one.kind != "infiniband"}
    text = f"{len(out)} that lead out: {', '.join(one_line(one.name) for one in out) or 'none'}"
    if several and len(sizes) > 1:
        fix = [
            "give those of the common network one MTU, also on its switches: sudo ip link set dev NAME mtu SIZE"
        ]
        return found(
            INTERFACES,
            "warn",
            f"{text}; their MTU differs: {', '.join(map(str, sorted(sizes)))}",
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
    """What the libraries take, and whether that can work.

    Args:
        interfaces: of this machine.
        settings: variables that are set.
        own_addresses: what the host name leads to.
        several: the job has several nodes on several machines.
        cuda: ranks use NCCL; without it NCCL's variables have no effect.
        address: on which the nodes reach each other; empty: not known.
    """
    if not interfaces:
        return []
    choices = {"gloo": gloo_choice(interfaces, settings, own_addresses)}
    if cuda:
        choices["NCCL"] = nccl_choice(interfaces, settings)
    lines = [f"{name} takes {_chosen_name(choice)}: {choice.why}" for name, choice in choices.items()]
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
                "NCCL and gloo take different networks",
                *lines,
                fix=["export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with one name"],
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
        asked = choice.why.partition("=")[2]
        down = [
            one.name for one in interfaces if one.name in asked.split(",") and not (one.up and one.addresses)
        ]
        close = (
            nearest(asked.lstrip("^=").split(",")[0], [one.name for one in usable_interfaces(interfaces)])
            if asked
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
        kind = (
            "this machine's own loopback" if taken.loopback else "a bridge of this machine's own containers"
        )
        note = (
            ""
            if choice.variable
            else "; unisono tells its own ranks the right one, other programs need the variable"
        )
        return [
            found(CHOICE, status, f"{name} takes {one_line(taken.name)}, {kind}: {choice.why}{note}", fix=fix)
        ]
    if address and address not in taken.addresses and choice.variable:
        text = (
            f"{name} takes {one_line(taken.name)} ({choice.why}), and the nodes reach each other on {address}"
        )
        return [found(CHOICE, "warn", text, fix=fix)]
    return []


def judge_names(
    host: str,
    own: Sequence[str],
    took_s: float,
    *,
    head: str = "",
    head_addresses: Sequence[str] = (),
    several: bool,
    is_head: bool = True,
) -> Finding:
    """Whether names lead where they should.

    Args:
        host: this machine's name.
        own: its addresses, by the resolver.
        took_s: how long that took.
        head: the head's name; empty: there is none.
        head_addresses: of it.
        several: the job has several nodes.
        is_head: this is node 0.
    """
    mend = (
        "mend the line of {name} in /etc/hosts; `getent hosts {name}` must give the address that others use"
    )
    lines = [f"{host} leads to {', '.join(own) or 'nothing'} ({took_s * 1000:.0f} ms)"]
    if head and several:
        lines.append(f"the head's name {head} leads to {', '.join(head_addresses) or 'nothing'}")
        literal = list(head_addresses) == [head]
        if not head_addresses:
            return found(
                NAMES,
                "fail",
                lines[1],
                lines[0],
                fix=["give an IP address on every node: --head IP:PORT", mend.replace("{name}", head)],
            )
        if not literal and not is_head and all(map(is_loopback, head_addresses)):
            return found(
                NAMES,
                "fail",
                f"{lines[1]}: back to this machine",
                lines[0],
                fix=[mend.replace("{name}", head), "or --head IP:PORT on every node"],
            )
    if several and (not own or all(map(is_loopback, own))):
        text = f"{lines[0]}: other programs' ranks would tell peers that address"
        return found(NAMES, "warn", text, *lines[1:], fix=[mend.replace("{name}", host)])
    if took_s > _SLOW_RESOLVER_S:
        return found(
            NAMES,
            "warn",
            f"{lines[0]}: each look-up waits so long",
            *lines[1:],
            fix=[
                "look at /etc/resolv.conf: a name server that does not answer",
                f"or write {host} into /etc/hosts",
            ],
        )
    return found(NAMES, "pass", *lines)


def judge_infiniband(ports: Sequence[InfinibandPort], settings: Mapping[str, str]) -> list[Finding]:
    """Nothing is said of machines without such ports."""
    if not ports:
        return []
    rows = [str(port) for port in ports]
    active = [port for port in ports if port.is_active]
    if active and settings.get("NCCL_IB_DISABLE", "0").strip() == "1":
        text = f"NCCL_IB_DISABLE=1, and {len(active)} ports are active: NCCL goes over sockets, ten times slower or more"
        return [found(INFINIBAND, "warn", text, *rows, fix=["unset NCCL_IB_DISABLE"])]
    asked = settings.get("NCCL_IB_HCA", "").strip()
    if asked and active and not _selects(asked, active):
        fix = [
            f"export NCCL_IB_HCA='={','.join(dict.fromkeys(port.device for port in active))}'",
            "unset NCCL_IB_HCA",
        ]
        return [
            found(INFINIBAND, "warn", f"NCCL_IB_HCA={one_line(asked)} fits no active port", *rows, fix=fix)
        ]
    idle = [port for port in ports if not port.is_active]
    if idle:
        why = (
            "no subnet manager has set it up: start opensm"
            if idle[0].state == "INIT"
            else "look at cable and switch: `ibstat`"
        )
        text = f"{len(idle)} of {len(ports)} ports are not active, {idle[0].device}:{idle[0].port} is {idle[0].state} ({idle[0].physical})"
        return [found(INFINIBAND, "warn", text, *rows, fix=[why])]
    taken = [port for port in active if not asked or _selects(asked, [port])]
    rates = {port.gbit for port in taken if port.gbit}
    if len(rates) > 1:
        fix = [
            f"use those of one rate: export NCCL_IB_HCA='={','.join(port.device for port in taken if port.gbit == max(rates))}'"
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
    """Whether NCCL_IB_HCA leaves a port: prefixes, `=` for exact names, `^` for all but these; a port may follow: mlx5_0:1."""
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
    """Of one node nothing is said: its ranks meet on loopback."""
    if not several:
        return []
    if firewall is None:
        return [
            found(
                FIREWALL,
                "unknown",
                "rules cannot be listed here: that takes root, and iptables or nft",
                fix=["sudo iptables -S INPUT; sudo nft list ruleset"],
            )
        ]
    if not firewall.drops_rest and not firewall.refusals:
        return [found(FIREWALL, "pass", "nothing that comes in is refused")]
    text = (
        "what no rule lets in is dropped"
        if firewall.drops_rest
        else f"{len(firewall.refusals)} rules refuse packets that come in"
    )
    fix = [
        "between the nodes open all ports above 1023: sudo iptables -I INPUT -p tcp -s PEER -j ACCEPT, on each for each other"
    ]
    return [
        found(FIREWALL, "warn", text, *(one_line(rule, limit=160) for rule in firewall.refusals[:8]), fix=fix)
    ]

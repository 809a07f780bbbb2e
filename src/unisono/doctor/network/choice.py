"""Which network interface NCCL and gloo take, by their own rules. Pure.

NCCL (socket.cc, ncclFindInterfaces): NCCL_SOCKET_IFNAME; else names that begin with ib; else all but docker, lo and virbr; else docker; else lo.
gloo (torch, ProcessGroupGloo): GLOO_SOCKET_IFNAME, exact names; else the interface that has an address of the host's own name; else loopback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.agree.addresses import matching
from unisono.agree.reports import Interface

_ORDER = (
    ("ib", "names that begin with ib come first"),
    ("^docker,lo,virbr", "the first that is no docker, lo or virbr"),
    ("docker", "nothing else is here"),
    ("lo", "nothing else is here"),
)
_LOCAL = ("docker", "br-", "virbr", "cni", "veth", "podman", "lxcbr", "lxdbr", "flannel")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a library takes.

    Attributes:
        interface: None: it finds none, and stops.
        why: by which rule.
        variable: that made it so; empty: none is set.
    """

    interface: Interface | None
    why: str
    variable: str = ""


def usable(interfaces: Sequence[Interface]) -> list[Interface]:
    """Those that libraries look at: up, with an address."""
    return [one for one in interfaces if one.up and one.addresses]


def leads_out(interface: Interface) -> bool:
    """Whether other machines can be reached over it, as far as its kind and name tell."""
    return not interface.loopback and interface.kind != "virtual" and not interface.name.startswith(_LOCAL)


def nccl_choice(interfaces: Sequence[Interface], settings: Mapping[str, str]) -> Choice:
    """What NCCL takes for its first connections, and for data where there is no InfiniBand."""
    here = usable(interfaces)
    value = settings.get("NCCL_SOCKET_IFNAME", "").strip()
    if len(value) > 1:  # as NCCL does: one letter counts as nothing
        found = matching(value, here)
        why = f"NCCL_SOCKET_IFNAME={value}"
        return Choice(found[0] if found else None, why, "NCCL_SOCKET_IFNAME")
    for pattern, why in _ORDER:
        found = matching(pattern, here)
        if found:
            return Choice(found[0], why)
    return Choice(None, "no interface is up with an address")


def gloo_choice(
    interfaces: Sequence[Interface], settings: Mapping[str, str], own_addresses: Sequence[str]
) -> Choice:
    """What gloo takes.

    Args:
        interfaces: of this machine.
        settings: variables that are set.
        own_addresses: what this machine's host name leads to.
    """
    here = {one.name: one for one in usable(interfaces)}
    value = settings.get("GLOO_SOCKET_IFNAME", "").strip()
    if value:
        names = [name.strip() for name in value.split(",") if name.strip()]
        why = f"GLOO_SOCKET_IFNAME={value}"
        missing = [name for name in names if name not in here]
        first = None if missing or not names else here[names[0]]
        return Choice(first, why, "GLOO_SOCKET_IFNAME")
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
            return Choice(owner, f"the host's own name leads to {address}")
    loopback = next((one for one in here.values() if one.loopback), None)
    return Choice(loopback, "the host's own name leads to no address of this machine")

"""The steps of the ladder: which settings are laid over those that are there, one after the other. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Settings = Mapping[str, str | None]
"""Variables for the children alone; None takes one away."""

OWN = "{interface}"
"""In a value: the interface on which a node is reached by the others; each node puts in its own."""
SETTABLE = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
)  # fmt: skip
"""What a step may set."""
_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TP_SOCKET_")
_NEEDED = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step.

    Attributes:
        layer: steps of one layer take each other's place; those of others stay below.
        name: for people.
        settings: what it lays over the rest.
        cost: what one pays for it.
    """

    layer: str
    name: str
    settings: Settings
    cost: str = ""


def rungs(backend: str, *, interfaces: Sequence[str], set_by_hand: Sequence[str]) -> list[Rung]:
    """All steps after the settings as they are, in the order in which they are tried.

    Args:
        backend: `nccl` or `gloo`.
        interfaces: to pin to, the likeliest first; OWN for each node's own.
        set_by_hand: variables about communication that are set now.
    """
    found = []
    stripped = [name for name in set_by_hand if name.startswith(_FAMILIES) and name not in _NEEDED]
    if stripped:
        name = f"without what is set now ({', '.join(stripped[:4])}{' …' if len(stripped) > 4 else ''})"
        found.append(Rung("own", name, dict.fromkeys(stripped), "nothing, if it was left over"))
    found += [_pinned(backend, interface) for interface in interfaces]
    if backend == "nccl":
        return [*found, *_NCCL]
    return [*found, *_GLOO]


def _pinned(backend: str, interface: str) -> Rung:
    where = "each node's own interface" if interface == OWN else interface
    settings = {"GLOO_SOCKET_IFNAME": interface}
    if backend == "nccl":
        settings["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return Rung("interface", f"interface pinned to {where}", settings, "nothing, if it is the right network")


_NCCL = (
    Rung(
        "infiniband",
        "InfiniBand off",
        {"NCCL_IB_DISABLE": "1"},
        "nodes talk over sockets: ten times slower or more",
    ),
    Rung(
        "p2p",
        "peer access off",
        {"NCCL_P2P_DISABLE": "1"},
        "devices of a node talk through its memory: 2 to 20 times slower",
    ),
    Rung(
        "shm",
        "shared memory off",
        {"NCCL_SHM_DISABLE": "1"},
        "devices of a node talk over its network: slower again",
    ),
)
_GLOO = (
    Rung(
        "transport",
        "transport tcp",
        {"GLOO_DEVICE_TRANSPORT": "TCP"},
        "nothing: it is gloo's own choice on Linux",
    ),
    Rung(
        "transport",
        "transport uv",
        {"GLOO_DEVICE_TRANSPORT": "UV"},
        "some speed; most builds for Linux have none",
    ),
)


def laid(layers: Mapping[str, Rung]) -> dict[str, str | None]:
    """The settings of all layers together; later ones win."""
    found: dict[str, str | None] = {}
    for rung in layers.values():
        found |= rung.settings
    return found


def export_lines(settings: Settings) -> list[str]:
    """What a person types to have these settings."""
    unset = [name for name, value in settings.items() if value is None]
    lines = [f"unset {' '.join(unset)}"] if unset else []
    return lines + [f"export {name}={value}" for name, value in settings.items() if value is not None]

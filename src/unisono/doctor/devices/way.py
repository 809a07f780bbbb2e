"""What joins two devices, and which transport NCCL is expected to take between them. Pure.

The rule is NCCL's own (ncclTopoCheckP2p in graph/paths.cc, 2.2x): peer access as far as NCCL_P2P_LEVEL reaches, else shared memory, else
the network. It is an expectation: what NCCL took stands in its log, see `nccl_log`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from unisono.facts.accelerators import DevicesDetails, Level

Kind = Literal["nvlink", "p2p", "shm", "net", "broken"]

KINDS: dict[Kind, str] = {
    "nvlink": "NVLink",
    "p2p": "PCIe, device to device",
    "shm": "shared memory of the host",
    "net": "the network, though both are in this machine",
    "broken": "none: NCCL stops with an error",
}
"""The best first."""

_WORDS: dict[Level, str] = {
    "internal": "PIX", "single": "PIX", "multiple": "PXB", "hostbridge": "PHB", "node": "NODE", "system": "SYS", "unknown": "?",
}  # fmt: skip
LEGEND = (
    "NVn: n NVLinks; PIX: one PCIe switch; PXB: several switches; PHB: the processor's host bridge; NODE: one NUMA node, two bridges;"
    " SYS: across sockets"
)
_REACH = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 4, "SYS": 5}
_OLD_REACH = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_DEFAULT_REACH = {"intel": "PXB", "arm": "PXB"}


@dataclass(frozen=True, slots=True)
class Way:
    """What NCCL is expected to take between two devices, and why."""

    kind: Kind
    why: str

    @property
    def rank(self) -> int:
        """0 is best."""
        return list(KINDS).index(self.kind)


def nvlinks_between(details: DevicesDetails, one: int, other: int) -> int:
    """How many NVLinks join two devices, directly or over NVSwitches."""
    a, b = details.device(one), details.device(other)
    if a is None or b is None:
        return 0
    direct = sum(link.peer == "gpu" and link.bus_id == b.bus_id for link in a.nvlinks)
    switched = min(sum(link.peer == "switch" for link in device.nvlinks) for device in (a, b))
    return direct or switched


def link_word(details: DevicesDetails, one: int, other: int) -> str:
    """As nvidia-smi writes it: NV18, PIX, PXB, PHB, NODE, SYS."""
    links = nvlinks_between(details, one, other)
    return f"NV{links}" if links else _WORDS[details.pair(one, other).level]


def expected_way(
    details: DevicesDetails, one: int, other: int, *, vendor: str = "", settings: Mapping[str, str] | None = None
) -> Way:  # fmt: skip
    """The transport that NCCL is expected to take.

    Args:
        details: of the machine.
        one: an index.
        other: another.
        vendor: of the processor: `intel`, `amd`, `arm` or empty.
        settings: variables of NCCL that are set.
    """
    settings = settings or {}
    word = link_word(details, one, other)
    pair = details.pair(one, other)
    no_shared_memory = settings.get("NCCL_SHM_DISABLE", "0").strip() == "1"
    level, why_level = _reach(settings, vendor)
    distance = 1 if word.startswith("NV") else _REACH.get(word, 6)
    if distance > level:
        why = f"{word} is beyond {why_level}" if word != "?" else "the driver does not tell what joins them"
        return _without_peers(why, no_shared_memory)
    if pair.peer_access and pair.peer_access != "not told":
        if distance == 1:
            return Way(
                "broken",
                f"{word}, and yet no peer access ({pair.peer_access}): a fault of the hardware or the driver",
            )
        return _without_peers(f"{word}, no peer access: {pair.peer_access}", no_shared_memory)
    return Way("nvlink" if distance == 1 else "p2p", word)


def _reach(settings: Mapping[str, str], vendor: str) -> tuple[int, str]:
    """How far peer access is used, as a distance, and what says so."""
    if settings.get("NCCL_P2P_DISABLE", "0").strip() == "1":
        return 0, "NCCL_P2P_DISABLE=1"
    asked = settings.get("NCCL_P2P_LEVEL", "").strip().upper()
    word = asked if asked in _REACH else ""
    if asked.isdecimal():
        word = _OLD_REACH[min(int(asked), len(_OLD_REACH) - 1)]
    if word:
        return _REACH[word], f"NCCL_P2P_LEVEL={asked}"
    word = _DEFAULT_REACH.get(vendor, "SYS")
    return _REACH[word], f"what NCCL uses with this processor ({vendor or 'unknown'}: up to {word})"


def _without_peers(why: str, no_shared_memory: bool) -> Way:  # noqa: FBT001 - called here, by position
    if no_shared_memory:
        return Way("net", f"{why}; and NCCL_SHM_DISABLE=1")
    return Way("shm", why)

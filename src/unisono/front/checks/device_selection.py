"""How devices are joined, which transport NCCL is expected to use, and which devices are the best
choice.

Pure.

The transport follows NCCL's own rule (ncclTopoCheckP2p in graph/paths.cc, 2.2x): peer access up to
NCCL_P2P_LEVEL, else shared memory, else the network. It is an expectation: NCCL's log shows what it
used, see `ladder`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from unisono.base.text import one_line, show_bytes
from unisono.guard.facts.machine import DeviceDetails, DeviceHolder, DevicesDetails, Level

TransportKind = Literal["nvlink", "p2p", "shm", "net", "broken"]

TRANSPORTS: dict[TransportKind, str] = {
    "nvlink": "NVLink",
    "p2p": "PCIe, device to device",
    "shm": "shared memory of the host",
    "net": "the network, although both are in this machine",
    "broken": "none: NCCL fails with an error",
}
"""The best first."""

_LEVEL_WORDS: dict[Level, str] = {
    "internal": "PIX",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
    "unknown": "?",
}
LEGEND = (
    "NVn: n NVLinks; PIX: one PCIe switch; PXB: several switches; PHB: the processor's host bridge; NODE: one"
    " NUMA node, two bridges; SYS: across sockets"
)
_REACH = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 4, "SYS": 5}
_OLD_REACH = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_DEFAULT_REACH = {"intel": "PXB", "arm": "PXB"}


@dataclass(frozen=True, slots=True)
class Transport:
    """The transport that NCCL is expected to use between two devices, and why."""

    kind: TransportKind
    why: str

    @property
    def rank(self) -> int:
        """0 is best."""
        return list(TRANSPORTS).index(self.kind)


def nvlinks_between(details: DevicesDetails, one: int, other: int) -> int:
    """Number of NVLinks between two devices, directly or over NVSwitches."""
    a, b = details.device(one), details.device(other)
    if a is None or b is None:
        return 0
    direct = sum(link.peer == "gpu" and link.bus_id == b.bus_id for link in a.nvlinks)
    switched = min(sum(link.peer == "switch" for link in device.nvlinks) for device in (a, b))
    return direct or switched


def link_word(details: DevicesDetails, one: int, other: int) -> str:
    """The link between two devices in the words of nvidia-smi: NV18, PIX, PXB, PHB, NODE, SYS."""
    links = nvlinks_between(details, one, other)
    return f"NV{links}" if links else _LEVEL_WORDS[details.pair(one, other).level]


def expected_transport(
    details: DevicesDetails,
    one: int,
    other: int,
    *,
    vendor: str = "",
    settings: Mapping[str, str] | None = None,
) -> Transport:
    """The transport that NCCL is expected to use.

    Args:
        other: a second one.
        vendor: of the processor: `intel`, `amd`, `arm` or empty.
    """
    settings = settings or {}
    word = link_word(details, one, other)
    pair = details.pair(one, other)
    no_shared_memory = settings.get("NCCL_SHM_DISABLE", "0").strip() == "1"
    level, why_level = _reach(settings, vendor)
    distance = 1 if word.startswith("NV") else _REACH.get(word, 6)
    if distance > level:
        why = f"{word} is beyond {why_level}" if word != "?" else "the driver does not report their link"
        return _without_peers(why, no_shared_memory)
    if pair.peer_access and pair.peer_access != "not reported":
        if distance == 1:
            return Transport(
                "broken",
                f"{word}, but no peer access ({pair.peer_access}): a fault of the hardware or the driver",
            )
        return _without_peers(f"{word}, no peer access: {pair.peer_access}", no_shared_memory)
    return Transport("nvlink" if distance == 1 else "p2p", word)


def _reach(settings: Mapping[str, str], vendor: str) -> tuple[int, str]:
    """Maximum distance of peer access, and its source."""
    if settings.get("NCCL_P2P_DISABLE", "0").strip() == "1":
        return 0, "NCCL_P2P_DISABLE=1"
    requested = settings.get("NCCL_P2P_LEVEL", "").strip().upper()
    word = requested if requested in _REACH else ""
    if requested.isdecimal():
        word = _OLD_REACH[min(int(requested), len(_OLD_REACH) - 1)]
    if word:
        return _REACH[word], f"NCCL_P2P_LEVEL={requested}"
    word = _DEFAULT_REACH.get(vendor, "SYS")
    return _REACH[word], f"NCCL's default for this processor ({vendor or 'unknown'}: up to {word})"


def _without_peers(why: str, no_shared_memory: bool) -> Transport:  # noqa: FBT001 - called here, by position
    if no_shared_memory:
        return Transport("net", f"{why}; and NCCL_SHM_DISABLE=1")
    return Transport("shm", why)


_UUID_LETTERS = 12  # `GPU-5a3c1f0e`: enough to tell devices of a machine apart, and CUDA takes a prefix


def device_rows(details: DevicesDetails, visible: Sequence[int]) -> list[str]:
    """A line for each device: name for ranks, index, UUID, bus address, memory, type.

    Args:
        visible: physical indices, in the order of CUDA.
    """
    head = ("seen as", "index", "UUID", "bus", "NUMA", "memory used", "of", "type")
    return _aligned([head, *(_row(device, visible) for device in details.devices)])


def _row(device: DeviceDetails, visible: Sequence[int]) -> tuple[str, ...]:
    seen = f"cuda:{list(visible).index(device.index)}" if device.index in visible else "hidden"
    if device.trouble:
        return (
            seen,
            str(device.index),
            device.uuid[:_UUID_LETTERS] or "?",
            device.bus_id or "?",
            "",
            "",
            "",
            one_line(device.trouble),
        )
    sliced = f" ({len(device.mig)} MIG slices)" if device.mig is not None else ""
    return (
        seen,
        str(device.index),
        device.uuid[:_UUID_LETTERS],
        device.bus_id,
        "" if device.numa_node is None else str(device.numa_node),
        show_bytes(device.memory_used_bytes),
        show_bytes(device.memory_bytes),
        one_line(device.name, limit=40) + sliced,
    )


def link_rows(details: DevicesDetails) -> list[str]:
    """Matrix of links, with a legend."""
    indices = [device.index for device in details.devices if not device.trouble]
    if len(indices) < 2:
        return []
    head = ("", *map(str, indices))
    rows = [(str(a), *("–" if a == b else link_word(details, a, b) for b in indices)) for a in indices]
    return [*_aligned([head, *rows]), LEGEND]


def transport_rows(details: DevicesDetails, *, vendor: str, settings: Mapping[str, str]) -> list[str]:
    """The transport that NCCL is expected to use, by pairs of one kind."""
    indices = [device.index for device in details.devices if not device.trouble]
    kinds: dict[tuple[TransportKind, str], list[tuple[int, int]]] = {}
    for a, b in combinations(indices, 2):
        way: Transport = expected_transport(details, a, b, vendor=vendor, settings=settings)
        kinds.setdefault((way.kind, way.why), []).append((a, b))
    order = list(TRANSPORTS)
    return [
        f"expected between {_pairs(pairs, len(indices))}: {TRANSPORTS[kind]} ({why})"
        for (kind, why), pairs in sorted(kinds.items(), key=lambda item: order.index(item[0][0]))
    ]


def _pairs(pairs: Sequence[tuple[int, int]], devices: int) -> str:
    if len(pairs) == devices * (devices - 1) // 2:
        return "all pairs" if len(pairs) > 1 else f"{pairs[0][0]} and {pairs[0][1]}"
    shown = ", ".join(f"{a}–{b}" for a, b in pairs[:8])
    return shown + (f" and {len(pairs) - 8} more pairs" if len(pairs) > 8 else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


_HELD_SHARE = 0.1  # of a device's memory: more than a driver and a desktop take
_MAX_CANDIDATES = 16  # devices: 12,870 ways to choose 8 of them


@dataclass(frozen=True, slots=True)
class SelectionCost:
    """Cost of a selection of devices; fields in order of weight, less is better.

    Attributes:
        faulty: devices that do not respond, or had serious errors.
        held: devices whose memory other processes hold.
        types: number of device types beyond one.
        worst: the worst transport of a pair, as position in `TRANSPORTS`.
        numa_nodes: number of NUMA nodes.
        ways: sum of the positions of all transports.
        gaps: indices that are missing between the first and the last.
    """

    faulty: int
    held: int
    sliced: int
    types: int
    worst: int
    numa_nodes: int
    ways: int
    gaps: int

    @property
    def weight(self) -> tuple[int, ...]:
        """For comparison."""
        return (*self.heavy, self.ways, self.gaps)

    @property
    def heavy(self) -> tuple[int, ...]:
        """The part with an effect on a run: a ring is as fast as its worst pair."""
        return (self.faulty, self.held, self.sliced, self.types, self.worst, self.numa_nodes)


@dataclass(frozen=True)
class SelectionReport:
    """Report on a selection.

    Attributes:
        troubles: its problems, the most serious first, one line each.
        better: physical indices of a better selection; empty: none.
        matters: whether a run would notice the difference.
    """

    troubles: tuple[str, ...]
    better: tuple[int, ...] = ()
    why: str = ""
    matters: bool = False


_MIN_MEMORY_SHARE = 0.9


def judge_selection(
    details: DevicesDetails,
    chosen: Sequence[int],
    *,
    vendor: str = "",
    settings: Mapping[str, str] | None = None,
    faulty: Sequence[int] = (),
    within: Sequence[int] | None = None,
) -> SelectionReport:
    """Problems of these devices, and a better selection.

    Args:
        chosen: physical indices, by local rank.
        faulty: devices that must not be used.
        within: devices that may be proposed, if others belong to different jobs; None: all.
    """
    scales = _Weigher(details, vendor, settings or {}, frozenset(faulty))
    now = scales.weigh(chosen)
    best = scales.best(chosen, within=within)
    weighed = scales.weigh(best) if best else now
    troubles = tuple(_troubles(details, chosen, now, scales))
    if best and weighed.weight < now.weight:
        return SelectionReport(troubles, best, _why(now, weighed), matters=weighed.heavy < now.heavy)
    return SelectionReport(troubles)


def visible_line(devices: Sequence[DeviceDetails], *, mixed: bool) -> str:
    """The shell line that makes these devices visible, in this order.

    With different types CUDA orders by speed and nvidia-smi by bus, so the same index means
    different devices.
    """
    indices = ",".join(str(device.index) for device in devices)
    order = "export CUDA_DEVICE_ORDER=PCI_BUS_ID " if mixed else "export "
    return f"{order}CUDA_VISIBLE_DEVICES={indices}"


def holders_of(device: DeviceDetails) -> str:
    """Processes that hold a device's memory, as text; empty: none, or too little to matter."""
    holders = device.holders or ()
    alone = device.compute_mode == "exclusive" and bool(holders)
    if not alone and device.memory_used_bytes < _HELD_SHARE * device.memory_bytes:
        return ""
    used = show_bytes(device.memory_used_bytes)
    who = (
        "; ".join(map(_holder, holders[:4]))
        or "a process not visible here (in a different container, or of a different user)"
    )
    return f"{used} of {show_bytes(device.memory_bytes)} are in use: {who}"


def _holder(holder: DeviceHolder) -> str:
    who = f"pid {holder.pid}" + (f" of {one_line(holder.user)}" if holder.user else "")
    what = f" ({one_line(holder.command, limit=60)})" if holder.command else ""
    size = f" {show_bytes(holder.memory_bytes)}" if holder.memory_bytes else ""
    return f"{who}{what}{size}"


class _Weigher:
    """Weighs selections of devices; transports of pairs are computed once."""

    def __init__(
        self, details: DevicesDetails, vendor: str, settings: Mapping[str, str], faulty: frozenset[int]
    ) -> None:
        self._devices = {device.index: device for device in details.devices}
        self._held = {device.index for device in details.devices if holders_of(device)}
        self._faulty = faulty | {device.index for device in details.devices if device.trouble}
        self.ways: dict[tuple[int, int], Transport] = {
            (a, b): expected_transport(details, a, b, vendor=vendor, settings=settings)
            for a, b in combinations(sorted(self._devices), 2)
        }

    def weigh(self, chosen: Sequence[int]) -> SelectionCost:
        devices = [self._devices[index] for index in chosen if index in self._devices]
        ranks = [self.ways[pair].rank for pair in combinations(sorted(device.index for device in devices), 2)]
        indices = [device.index for device in devices]
        return SelectionCost(
            faulty=sum(index in self._faulty for index in indices) + len(chosen) - len(devices),
            held=sum(index in self._held for index in indices),
            sliced=sum(device.mig is not None for device in devices),
            types=len({device.name for device in devices}) - 1,
            worst=max(ranks, default=0),
            ways=sum(ranks),
            numa_nodes=len({device.numa_node for device in devices}),
            gaps=max(indices, default=0) - min(indices, default=0) + 1 - len(indices),
        )

    def best(self, chosen: Sequence[int], *, within: Sequence[int] | None) -> tuple[int, ...]:
        """The best selection of as many devices, each as large and as new; of equal ones the one
        with the fewest changes.
        """
        current = set(chosen)
        own_devices = [self._devices[index] for index in current if index in self._devices]
        memory = _MIN_MEMORY_SHARE * min((one.memory_bytes for one in own_devices), default=0)
        capability = min((one.capability for one in own_devices), default=(0, 0))
        fit = [
            index
            for index, one in self._devices.items()
            if index in current
            or (
                (within is None or index in within)
                and one.memory_bytes >= memory
                and one.capability >= capability
            )
        ]
        whole = sorted(fit, key=lambda index: (index in self._faulty, index in self._held, index))
        tried = combinations(sorted(whole[:_MAX_CANDIDATES]), len(chosen))
        return min(
            tried,
            key=lambda indices: (self.weigh(indices).weight, len(current.difference(indices)), indices),
            default=(),
        )


def _troubles(
    details: DevicesDetails, chosen: Sequence[int], now: SelectionCost, scales: _Weigher
) -> list[str]:
    devices = [device for index in chosen if (device := details.device(index)) is not None]
    troubles = [f"device {device.index}: {words}" for device in devices if (words := holders_of(device))]
    troubles += [
        f"device {device.index} has MIG slices: select a slice by its UUID, or a different device"
        for device in devices
        if device.mig is not None
    ]
    if now.types > 0:
        troubles.append(
            f"types differ: {_grouped_by(devices, lambda device: device.name)}; the slowest limits the speed,"
            " the smallest the batch"
        )
    if now.worst > 1:
        bad = sorted(
            pair
            for pair in combinations(sorted(chosen), 2)
            if pair in scales.ways and scales.ways[pair].rank == now.worst
        )
        way = scales.ways[bad[0]]
        shown = ", ".join(f"{a}–{b}" for a, b in bad[:6]) + (" …" if len(bad) > 6 else "")
        troubles.append(f"between {shown}: {TRANSPORTS[way.kind]} ({way.why})")
    if now.numa_nodes > 1:
        troubles.append(
            f"across NUMA nodes: {_grouped_by(devices, lambda device: f'node {device.numa_node}')}"
        )
    if now.gaps > 0:
        troubles.append(f"the indices are not contiguous: {', '.join(map(str, chosen))}")
    return troubles


def _grouped_by(devices: Sequence[DeviceDetails], key: Callable[[DeviceDetails], str]) -> str:
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(str(device.index))
    return "; ".join(f"{one_line(name)}: {', '.join(indices)}" for name, indices in groups.items())


def _why(now: SelectionCost, better: SelectionCost) -> str:
    """All improvements of the better selection."""
    kinds = list(TRANSPORTS.values())
    gains = [
        (better.faulty < now.faulty, "all devices are healthy"),
        (better.held < now.held, "no other process uses them"),
        (better.sliced < now.sliced, "none is sliced"),
        (better.types < now.types, "of one type"),
        (better.worst < now.worst, f"no pair needs more than {kinds[better.worst]}"),
        (better.ways < now.ways and better.worst == now.worst, "more pairs have a good link"),
        (
            better.numa_nodes < now.numa_nodes,
            "on one NUMA node" if better.numa_nodes == 1 else f"on {better.numa_nodes} NUMA nodes",
        ),
        (better.gaps < now.gaps, "contiguous"),
    ]
    return ", ".join(words for gained, words in gains if gained)

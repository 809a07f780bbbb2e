"""Judges which devices a run would use, and finds better ones. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from unisono.doctor.devices.way import KINDS, Way, expected_way
from unisono.facts.accelerators import DeviceDetails, DevicesDetails, Holder
from unisono.text import one_line
from unisono.units import show_bytes

_HELD_SHARE = 0.1  # of a device's memory: more than a driver and a desktop take
_MOST_TRIED = 16  # devices: 12,870 ways to choose 8 of them


@dataclass(frozen=True, slots=True)
class Selection:
    """What a choice of devices costs; the order of the fields is that of their weight, less is better.

    Attributes:
        ill: devices that do not answer, or that have had grave errors.
        held: devices whose memory somebody else holds.
        sliced: devices that are cut into slices.
        types: of devices, more than one.
        worst: the worst transport between two, as the place in `way.KINDS`.
        numa_nodes: how many.
        ways: the sum of all transports' places.
        gaps: indices left out between the first and the last.
    """

    ill: int
    held: int
    sliced: int
    types: int
    worst: int
    numa_nodes: int
    ways: int
    gaps: int

    @property
    def weight(self) -> tuple[int, ...]:
        """To be compared."""
        return (*self.heavy, self.ways, self.gaps)

    @property
    def heavy(self) -> tuple[int, ...]:
        """The part of it that a run feels: a ring is as quick as its worst pair, whatever the others are."""
        return (self.ill, self.held, self.sliced, self.types, self.worst, self.numa_nodes)


@dataclass(frozen=True)
class Judged:
    """What is to be said of a selection.

    Attributes:
        troubles: what is wrong with it, the gravest first, a line each.
        better: physical indices that would be better; empty: there are none.
        why: these are better.
        matters: whether a run would feel the difference.
    """

    troubles: tuple[str, ...]
    better: tuple[int, ...] = ()
    why: str = ""
    matters: bool = False


_AS_LARGE = 0.9


def judge_selection(
    details: DevicesDetails, chosen: Sequence[int], *, vendor: str = "", settings: Mapping[str, str] | None = None, ill: Sequence[int] = (),
    within: Sequence[int] | None = None,
) -> Judged:  # fmt: skip
    """What is wrong with these devices, and which others would be better.

    Args:
        details: of the machine.
        chosen: physical indices, by local rank.
        vendor: of the processor.
        settings: variables of NCCL that are set.
        ill: devices that are not to be used.
        within: those that may be proposed, where others belong to somebody else's job; None: all.
    """
    scales = _Scales(details, vendor, settings or {}, frozenset(ill))
    now = scales.weigh(chosen)
    best = scales.best(chosen, within=within)
    weighed = scales.weigh(best) if best else now
    troubles = tuple(_troubles(details, chosen, now, scales))
    if best and weighed.weight < now.weight:
        return Judged(troubles, best, _why(now, weighed), matters=weighed.heavy < now.heavy)
    return Judged(troubles)


def visible_line(devices: Sequence[DeviceDetails], *, mixed: bool) -> str:
    """The line that makes a program see these devices, in this order.

    Where types differ CUDA counts the fastest first, and nvidia-smi the bus; then an index means another device to each.
    """
    indices = ",".join(str(device.index) for device in devices)
    order = "export CUDA_DEVICE_ORDER=PCI_BUS_ID " if mixed else "export "
    return f"{order}CUDA_VISIBLE_DEVICES={indices}"


def holders_of(device: DeviceDetails) -> str:
    """Who holds a device's memory, in words; empty: nobody, or too little to matter."""
    holders = device.holders or ()
    alone = device.compute_mode == "exclusive" and bool(holders)
    if not alone and device.memory_used_bytes < _HELD_SHARE * device.memory_bytes:
        return ""
    used = show_bytes(device.memory_used_bytes)
    who = (
        "; ".join(map(_holder, holders[:4]))
        or "a process that is not seen here (another container, or another user's)"
    )
    return f"{used} of {show_bytes(device.memory_bytes)} are in use: {who}"


def _holder(holder: Holder) -> str:
    who = f"pid {holder.pid}" + (f" of {one_line(holder.user)}" if holder.user else "")
    what = f" ({one_line(holder.command, limit=60)})" if holder.command else ""
    size = f" {show_bytes(holder.memory_bytes)}" if holder.memory_bytes else ""
    return f"{who}{what}{size}"


class _Scales:
    """Weighs choices of devices; ways between two are looked up once."""

    def __init__(
        self, details: DevicesDetails, vendor: str, settings: Mapping[str, str], ill: frozenset[int]
    ) -> None:
        self._devices = {device.index: device for device in details.devices}
        self._held = {device.index for device in details.devices if holders_of(device)}
        self._ill = ill | {device.index for device in details.devices if device.trouble}
        self.ways: dict[tuple[int, int], Way] = {
            (a, b): expected_way(details, a, b, vendor=vendor, settings=settings)
            for a, b in combinations(sorted(self._devices), 2)
        }

    def weigh(self, chosen: Sequence[int]) -> Selection:
        devices = [self._devices[index] for index in chosen if index in self._devices]
        ranks = [self.ways[pair].rank for pair in combinations(sorted(device.index for device in devices), 2)]
        indices = [device.index for device in devices]
        return Selection(
            ill=sum(index in self._ill for index in indices) + len(chosen) - len(devices),
            held=sum(index in self._held for index in indices),
            sliced=sum(device.mig is not None for device in devices),
            types=len({device.name for device in devices}) - 1,
            worst=max(ranks, default=0),
            ways=sum(ranks),
            numa_nodes=len({device.numa_node for device in devices}),
            gaps=max(indices, default=0) - min(indices, default=0) + 1 - len(indices),
        )

    def best(self, chosen: Sequence[int], *, within: Sequence[int] | None) -> tuple[int, ...]:
        """The best choice of so many, of devices that are as large and as new as those; of equal ones that which changes least."""
        own = set(chosen)
        mine = [self._devices[index] for index in own if index in self._devices]
        memory = _AS_LARGE * min((one.memory_bytes for one in mine), default=0)
        capability = min((one.capability for one in mine), default=(0, 0))
        fit = [
            index
            for index, one in self._devices.items()
            if index in own
            or (
                (within is None or index in within)
                and one.memory_bytes >= memory
                and one.capability >= capability
            )
        ]
        whole = sorted(fit, key=lambda index: (index in self._ill, index in self._held, index))
        tried = combinations(sorted(whole[:_MOST_TRIED]), len(chosen))
        return min(
            tried,
            key=lambda indices: (self.weigh(indices).weight, len(own.difference(indices)), indices),
            default=(),
        )


def _troubles(details: DevicesDetails, chosen: Sequence[int], now: Selection, scales: _Scales) -> list[str]:
    devices = [device for index in chosen if (device := details.device(index)) is not None]
    found = [f"device {device.index}: {words}" for device in devices if (words := holders_of(device))]
    found += [
        f"device {device.index} is cut into MIG slices: name a slice by its UUID, or another device"
        for device in devices
        if device.mig is not None
    ]
    if now.types > 0:
        found.append(
            f"types differ: {_by(devices, lambda device: device.name)}; the slowest sets the pace, and the smallest the batch"
        )
    if now.worst > 1:
        bad = sorted(
            pair
            for pair in combinations(sorted(chosen), 2)
            if pair in scales.ways and scales.ways[pair].rank == now.worst
        )
        way = scales.ways[bad[0]]
        shown = ", ".join(f"{a}–{b}" for a, b in bad[:6]) + (" …" if len(bad) > 6 else "")
        found.append(f"between {shown}: {KINDS[way.kind]} ({way.why})")
    if now.numa_nodes > 1:
        found.append(f"across NUMA nodes: {_by(devices, lambda device: f'node {device.numa_node}')}")
    if now.gaps > 0:
        found.append(f"the indices are not contiguous: {', '.join(map(str, chosen))}")
    return found


def _by(devices: Sequence[DeviceDetails], key: Callable[[DeviceDetails], str]) -> str:
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(str(device.index))
    return "; ".join(f"{one_line(name)}: {', '.join(indices)}" for name, indices in groups.items())


def _why(now: Selection, better: Selection) -> str:
    """The first thing that is better, and what else of weight."""
    kinds = list(KINDS.values())
    gains = [
        (better.ill < now.ill, "all of them answer and are well"),
        (better.held < now.held, "nobody else holds them"),
        (better.sliced < now.sliced, "none is cut into slices"),
        (better.types < now.types, "of one type"),
        (better.worst < now.worst, f"no pair needs more than {kinds[better.worst]}"),
        (better.ways < now.ways and better.worst == now.worst, "more pairs have a good way"),
        (better.numa_nodes < now.numa_nodes, "on one NUMA node" if better.numa_nodes == 1 else f"on {better.numa_nodes} NUMA nodes"),
        (better.gaps < now.gaps, "contiguous"),
    ]  # fmt: skip
    return ", ".join(words for gained, words in gains if gained)

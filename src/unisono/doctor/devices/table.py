"""The table that people paste into issues: each device, and what joins each two. Pure."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from unisono.doctor.devices.way import KINDS, LEGEND, Kind, Way, expected_way, link_word
from unisono.facts.accelerators import DeviceDetails, DevicesDetails
from unisono.text import one_line
from unisono.units import show_bytes

_UUID_LETTERS = 12  # `GPU-5a3c1f0e`: enough to tell devices of a machine apart, and CUDA takes a prefix


def device_rows(details: DevicesDetails, visible: Sequence[int]) -> list[str]:
    """A line for each device: what ranks call it, index, UUID, place, memory, type.

    Args:
        details: of the machine.
        visible: physical indices, in the order in which programs see them.
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
        seen, str(device.index), device.uuid[:_UUID_LETTERS], device.bus_id, "" if device.numa_node is None else str(device.numa_node),
        show_bytes(device.memory_used_bytes), show_bytes(device.memory_bytes), one_line(device.name, limit=40) + sliced,
    )  # fmt: skip


def link_rows(details: DevicesDetails) -> list[str]:
    """The matrix of links, and its legend."""
    indices = [device.index for device in details.devices if not device.trouble]
    if len(indices) < 2:
        return []
    head = ("", *map(str, indices))
    rows = [(str(a), *("–" if a == b else link_word(details, a, b) for b in indices)) for a in indices]
    return [*_aligned([head, *rows]), LEGEND]


def way_rows(details: DevicesDetails, *, vendor: str, settings: Mapping[str, str]) -> list[str]:
    """Which transport NCCL is expected to take, pairs of one kind together."""
    indices = [device.index for device in details.devices if not device.trouble]
    kinds: dict[tuple[Kind, str], list[tuple[int, int]]] = {}
    for a, b in combinations(indices, 2):
        way: Way = expected_way(details, a, b, vendor=vendor, settings=settings)
        kinds.setdefault((way.kind, way.why), []).append((a, b))
    order = list(KINDS)
    return [
        f"expected between {_pairs(pairs, len(indices))}: {KINDS[kind]} ({why})"
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

"""This machine's processors: sockets, NUMA nodes, and what they can multiply."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from unisono.facts.limits import usable_cores


@dataclass(frozen=True, slots=True)
class Processors:
    """What computes where there is no accelerator, and what sits between accelerators where there are.

    Attributes:
        name: of the model.
        vendor: `intel`, `amd`, `arm` or empty: NCCL decides by it whether devices may talk through the processor.
        sockets: how many.
        threads: hardware threads of the machine.
        cores: of the machine, two threads of one core counted once.
        usable: of this process: affinity, and the cgroup's share of time.
        numa_nodes: hardware threads of each memory node, by number.
        usable_nodes: the memory nodes on which this process may run.
        bfloat16: how bfloat16 is multiplied: `amx`, `avx512`, `neon`, or empty: by emulation, slower than float32.
    """

    name: str
    vendor: str
    sockets: int
    threads: int
    cores: int
    usable: int
    numa_nodes: dict[int, int]
    usable_nodes: tuple[int, ...]
    bfloat16: str


def read_processors(
    *, info: Path = Path("/proc/cpuinfo"), nodes: Path = Path("/sys/devices/system/node"), allowed: frozenset[int] | None = None
) -> Processors:  # fmt: skip
    """Looks once.

    Args:
        info: cpuinfo of /proc.
        nodes: the folder of memory nodes.
        allowed: the hardware threads that this process may use; None: it is asked.
    """
    text = _content(info)
    own = _allowed() if allowed is None else allowed
    numa = _numa(nodes)
    places = set(
        zip(re.findall(r"^physical id\s*:\s*(\d+)", text, re.M), re.findall(r"^core id\s*:\s*(\d+)", text, re.M), strict=False)
    )  # fmt: skip
    threads = len(re.findall(r"^processor\s*:", text, re.M)) or os.cpu_count() or 1
    return Processors(
        name=_first(r"^model name\s*:\s*(.+)$", text),
        vendor=_vendor(text),
        sockets=len({socket for socket, _ in places}) or 1,
        threads=threads,
        cores=len(places) or threads,
        usable=usable_cores(),
        numa_nodes={node: len(threads_of) for node, threads_of in numa.items()},
        usable_nodes=tuple(node for node, threads_of in numa.items() if threads_of & own),
        bfloat16=_bfloat16(_first(r"^(?:flags|Features)\s*:\s*(.+)$", text).split()),
    )


def _vendor(text: str) -> str:
    word = _first(r"^vendor_id\s*:\s*(\S+)", text)
    known = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(word, "")
    return known or ("arm" if "CPU implementer" in text else "")


def _bfloat16(flags: list[str]) -> str:
    for flag, name in (("amx_bf16", "amx"), ("avx512_bf16", "avx512"), ("bf16", "neon")):
        if flag in flags:
            return name
    return ""


def _numa(folder: Path) -> dict[int, frozenset[int]]:
    found = {}
    for path in folder.glob("node[0-9]*"):
        threads = _parse_list(_content(path / "cpulist"))
        if threads:  # some nodes are memory alone
            found[int(path.name[4:])] = threads
    return dict(sorted(found.items()))


def _parse_list(text: str) -> frozenset[int]:
    """`0-3,8` is 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _allowed() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.M)
    return found[1].strip() if found else ""


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

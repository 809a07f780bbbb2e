"""Processors: cores, memory nodes and bfloat16.

Run: pytest tests/front/checks/devices/test_processor.py
"""

from pathlib import Path

import pytest

from unisono.front.checks.device_health import judge_bfloat16, judge_threads, processor_text
from unisono.guard.facts.machine import Processors, read_processors


def machine(
    tmp_path: Path, *, vendor: str = "GenuineIntel", flags: str = "avx2", sockets: int = 2, cores: int = 4
) -> Processors:
    """/proc/cpuinfo and /sys/devices/system/node of a machine with two threads a core."""
    blocks = []
    for thread in range(sockets * cores * 2):
        core = thread % (sockets * cores)
        blocks.append(
            f"processor\t: {thread}\nvendor_id\t: {vendor}\nmodel name\t: A processor\nphysical id\t: {core // cores}\n"
            f"core id\t\t: {core % cores}\nflags\t\t: fpu {flags}\n"
        )
    (tmp_path / "cpuinfo").write_text("\n".join(blocks))
    for node in range(sockets):
        (tmp_path / f"node{node}").mkdir()
        first = node * cores
        (tmp_path / f"node{node}" / "cpulist").write_text(
            f"{first}-{first + cores - 1},{first + sockets * cores}-{first + sockets * cores + cores - 1}\n"
        )
    return read_processors(
        info=tmp_path / "cpuinfo", nodes=tmp_path, allowed=frozenset(range(sockets * cores * 2))
    )


def test_sockets_cores_threads_and_nodes_are_counted(tmp_path: Path) -> None:
    found = machine(tmp_path, flags="avx512_bf16 amx_bf16")
    assert (found.sockets, found.cores, found.threads, found.numa_nodes, found.usable_nodes) == (
        2,
        8,
        16,
        {0: 8, 1: 8},
        (0, 1),
    )
    assert (found.vendor, found.bfloat16) == ("intel", "amx")
    assert processor_text(found).startswith("A processor; 2 sockets, 8 cores, 16 threads, 2 NUMA nodes")


def test_this_machine_can_be_read() -> None:
    found = read_processors()
    assert found.threads >= found.usable >= 1
    assert found.usable_nodes or not found.numa_nodes


def processors(usable: int, nodes: tuple[int, ...] = (0,)) -> Processors:
    return Processors(
        "A processor", "intel", len(nodes), usable, usable, usable, dict.fromkeys(nodes, usable), nodes, ""
    )


@pytest.mark.parametrize(
    ("usable", "ranks", "threads", "status", "fix"),
    [
        (8, 2, 4, "pass", []),
        (8, 2, 1, "warn", ["export OMP_NUM_THREADS=4"]),
    ],
)
@pytest.mark.makes("devices.processor", "pass")
@pytest.mark.makes("devices.processor", "warn")
def test_cores_that_would_stay_idle_are_named(
    usable: int, ranks: int, threads: int, status: str, fix: list[str]
) -> None:
    found = judge_threads(processors(usable), ranks=ranks, threads=threads, origin="computed")
    assert (found[0], found[2]) == (status, fix)


def test_a_rank_across_two_memory_nodes_is_named() -> None:
    status, text, _ = judge_threads(processors(12, (0, 1)), ranks=3, threads=4, origin="computed")
    assert (status, "3 ranks do not divide evenly over 2 NUMA nodes" in text) == ("warn", True)
    assert judge_threads(processors(12, (0, 1)), ranks=2, threads=6, origin="computed")[0] == "pass"


@pytest.mark.makes("devices.bfloat16", "pass")
@pytest.mark.makes("devices.bfloat16", "warn")
def test_bfloat16_is_slow_only_where_it_is_requested_and_emulated() -> None:
    plain = processors(2)
    assert judge_bfloat16(plain, dtype="bfloat16")[0] == "warn"
    assert judge_bfloat16(plain, dtype="float32")[0] == "pass"

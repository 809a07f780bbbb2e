"""What ranks on the CPU get: cores, memory nodes, bfloat16, and threads against cores. Pure."""

from unisono.doctor.check import Status
from unisono.facts.machine import Processors
from unisono.text import one_line

_BFLOAT16 = {"amx": "AMX", "avx512": "AVX-512", "neon": "the processor's own instructions"}


def processor_text(found: Processors) -> str:
    """The machine, in one line."""
    nodes = len(found.numa_nodes) or 1
    parts = [
        one_line(found.name, limit=60) or "processor of unknown name",
        f"{_count(found.sockets, 'socket')}, {_count(found.cores, 'core')}, {_count(found.threads, 'thread')}, {_count(nodes, 'NUMA node')}",
        f"{found.usable} usable here",
    ]
    return "; ".join(parts)


def judge_threads(
    found: Processors, *, ranks: int, threads: int, origin: str
) -> tuple[Status, str, list[str]]:
    """Whether the threads of all ranks use the cores, and no rank is cut in two by memory nodes; too many are `system.cores`'.

    Args:
        found: of this machine.
        ranks: of this node, on the CPU.
        threads: of each.
        origin: where that number comes from.
    """
    text = f"{_count(ranks, 'rank')} × {_count(threads, 'thread')} ({origin}) on {found.usable} usable"
    if 2 * ranks * threads <= found.usable:
        idle = found.usable - ranks * threads
        return "warn", f"{text}: {idle} stay idle", [f"export OMP_NUM_THREADS={found.usable // ranks}"]
    nodes = len(found.usable_nodes)
    if nodes > 1 and ranks % nodes:
        return (
            "warn",
            f"{text}: {ranks} ranks do not divide over {nodes} NUMA nodes, and a rank across two reads memory slowly",
            [f"--nproc {nodes}"],
        )
    return "pass", text, []


def judge_bfloat16(found: Processors, *, dtype: str) -> tuple[Status, str, list[str]]:
    """Whether bfloat16 is quick on this processor.

    Args:
        found: of this machine.
        dtype: that the config asks for: `bfloat16`, `float32`, `auto` …
    """
    how = _BFLOAT16.get(found.bfloat16)
    if how:
        return "pass", f"bfloat16 is multiplied by {how}", []
    text = "bfloat16 is emulated on this processor, and slower than float32"
    if dtype in ("bfloat16", "bf16"):
        return "warn", f"{text}; model.dtype is {dtype}", ["model.dtype=float32"]
    return "pass", f"{text}; it is not asked for", []


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")

"""How processes ended, as their launchers tell: torchrun's tables, srun, mpirun, DeepSpeed, torch.multiprocessing, Ray."""

import re
import signal
from collections.abc import Iterable

from unisono.diagnose.event import Event
from unisono.diagnose.facts import Exit

_BLOCK_LINES = 8
"""Lines of one process in torchrun's table."""
_WORDS = {"Segmentation fault": -11, "Killed": -9, "Aborted": -6, "Bus error": -7, "Illegal instruction": -4, "Floating point exception": -8, "Terminated": -15, "Out Of Memory": -9}  # fmt: skip


def find_exits(events: Iterable[Event]) -> list[Exit]:
    """All that is told, in the order of the logs. What one process ended with may be told twice."""
    found: list[Exit] = []
    block: dict[str, Event] = {}
    first = False
    for event in events:
        if event.signature == "table_first":
            first, block = True, {}
        elif event.signature == "table_failures":
            first, block = False, {}
        elif event.signature in ("table_time", "table_host", "table_rank"):
            block[event.signature] = event
        elif event.signature == "table_exit":
            found.append(_row(event, block, first))
            block = {}
        elif event.signature in _READERS:
            found += _READERS[event.signature](event)
    return found


def _row(event: Event, block: dict[str, Event], first: bool) -> Exit:  # noqa: FBT001
    near = {name: one for name, one in block.items() if 0 <= event.line - one.line <= _BLOCK_LINES}
    rank, host, time = near.get("table_rank"), near.get("table_host"), near.get("table_time")
    return Exit(
        event=event,
        code=event.number("code") or 0,
        rank=rank.number("rank") if rank else None,
        local_rank=rank.number("local_rank") if rank else None,
        host=host.fields.get("host") if host else None,
        pid=event.number("pid"),
        first=first,
        time=time.time if time else None,
    )


def _line(event: Event) -> list[Exit]:
    return [
        Exit(
            event,
            event.number("code") or 0,
            local_rank=event.number("local_rank"),
            pid=event.number("pid"),
            host=event.who.host,
            time=event.time,
        )
    ]


def _srun(event: Event) -> list[Exit]:
    how = event.fields.get("how", "")
    code = event.number("code")
    if code is None:
        code = next((number for words, number in _WORDS.items() if words in how), 1)
    else:
        code = _of_shell(code)
    ranks = _numbers(event.fields.get("rank", ""))
    return [Exit(event, code, rank=rank, host=event.fields.get("host"), time=event.time) for rank in ranks]


def _rank(event: Event) -> list[Exit]:
    code = event.number("code") or 0
    code = -code if event.fields.get("how") == "signal" else _of_shell(code)
    return [Exit(event, code, rank=event.number("rank"), pid=event.number("pid"), host=event.who.host, time=event.time)]  # fmt: skip


def _mpirun(event: Event) -> list[Exit]:
    return [
        Exit(
            event,
            -(event.number("signal") or 0),
            rank=event.number("rank"),
            pid=event.number("pid"),
            host=event.fields.get("host"),
        )
    ]


def _spawned(event: Event) -> list[Exit]:
    name = event.fields.get("signal")
    if name:
        number = getattr(signal, name, None)
        code = -int(number) if number else 1
    else:
        code = event.number("code") or 1
    return [Exit(event, code, local_rank=event.number("local_rank"), first=True)]


def _container(event: Event) -> list[Exit]:
    """What a shell, a container or make says of a process that a signal ended: 128 and the signal's number."""
    code = event.number("code") or event.number("make") or 0
    return [Exit(event, 128 - code, host=event.fields.get("host") or event.who.host, time=event.time)]


def _deepspeed(event: Event) -> list[Exit]:
    return [
        Exit(event, event.number("code") or 0, time=event.time)
    ]  # whose it is, the line does not know: it names the last local rank


def _of_shell(code: int) -> int:
    """Minus the signal, where a shell's code tells of one: 128 and its number. 255 is what programs leave with that give -1."""
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def _numbers(text: str) -> list[int]:
    """`1,3-5` as numbers; few, since somebody else wrote them."""
    found: list[int] = []
    for part in re.findall(r"\d{1,6}(?:-\d{1,6})?", text):
        low, _, high = part.partition("-")
        found += range(int(low), min(int(high or low), int(low) + 4096) + 1)
    return found[:4096]


_READERS = {"exit_line": _line, "srun_exit": _srun, "mpirun_exit": _mpirun, "rank_exit": _rank, "spmd_error": _spawned, "died_with": _spawned, "deepspeed_return": _deepspeed, "container_exit": _container}  # fmt: skip

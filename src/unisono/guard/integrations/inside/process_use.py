"""What this process and its children use: CPU time, files, connections.

A rank of a foreign program that uses almost nothing is still.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

# Of the training thread in a second: a loop that polls four times uses less.
_LITTLE_S = 0.004
_BACKGROUND_S = 0.05  # of all threads: loggers, and that of gloo, which takes 3.5 ms on a slow processor
_BACKGROUND_TICKS = 2  # of all child processes: idle loaders wake up every few seconds
_MUCH_BYTES = 1 << 16
_MUCH_TRAFFIC = (
    1 << 11
)  # of a connection, in a second: heartbeats of a store have less, and the slowest downloads more
_MOST_CONNECTIONS = 256
# Of struct tcp_info in linux/tcp.h, from Linux 4.1 on: tcpi_bytes_acked and tcpi_bytes_received,
# and where they end.
_BYTES, _BYTES_AT, _TCP_INFO_BYTES = struct.Struct("=QQ"), 120, 136


class Use:
    """CPU and I/O use of the process and its children since their last activity."""

    def __init__(self) -> None:
        self._last: _Totals | None = None
        self._since = time.monotonic_ns()

    def still_ns(self, thread: int | None, *, is_examined: bool) -> int:
        """Nanoseconds in which they have used almost nothing.

        Args:
            thread: that trains, by Python's number.
            is_examined: whether the front has requested stacks or a dump since the last call, which
                take CPU time and write.
        """
        now = time.monotonic_ns()
        last, self._last = self._last, _Totals.now(thread)
        if last is None or (self._last.is_more_than(last) and not is_examined):
            self._since = now
        return now - self._since


class _Totals(NamedTuple):
    """What this process has used since its start.

    Attributes:
        cpu_s: CPU seconds of its threads, without those of the guard.
        child_ticks: CPU time of its children, in kernel ticks.
        io_bytes: read and written.
        traffic: bytes of each TCP connection, which io_bytes need not contain.
        thread_s: CPU seconds of the training thread; None if unknown.
    """

    cpu_s: float
    child_ticks: int
    io_bytes: int
    traffic: Mapping[str, int]
    thread_s: float | None

    @classmethod
    def now(cls, thread: int | None) -> Self:
        return cls(
            time.process_time() - _own_cpu_s(),
            _ticks_below(os.getpid()),
            _io_bytes(),
            _traffic(),
            _thread_s(thread),
        )

    def is_more_than(self, last: "_Totals") -> bool:
        """Whether the process has worked since `last`, about a second before."""
        is_known = self.thread_s is not None and last.thread_s is not None
        return (
            self.cpu_s - last.cpu_s > (_BACKGROUND_S if is_known else _LITTLE_S)
            or (self.thread_s or 0.0) - (last.thread_s or 0.0) > _LITTLE_S
            or self.child_ticks - last.child_ticks > _BACKGROUND_TICKS
            or self.io_bytes - last.io_bytes > _MUCH_BYTES
            or any(size - last.traffic.get(name, 0) > _MUCH_TRAFFIC for name, size in self.traffic.items())
        )


def _own_cpu_s() -> float:
    """CPU seconds of the guard's own threads.

    The pulse, which never ends, as reading the clock of an ended thread can crash, and this one.
    """
    pulse = next((one.ident for one in threading.enumerate() if one.name == "pulse"), None)
    pulse_s = time.clock_gettime(time.pthread_getcpuclockid(pulse)) if pulse is not None else 0.0
    return pulse_s + time.thread_time()


def _thread_s(thread: int | None) -> float | None:
    """CPU seconds of a thread.

    From the kernel's files: reading the clock of an ended thread can crash.
    """
    number = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) / 1e9
    return None


def _ticks_below(pid: int) -> int:
    """CPU time of all child processes, including exited ones, in kernel ticks."""
    total, todo, seen = 0, [pid], 0
    while todo and seen < _MOST_BELOW:
        for child in _children(todo.pop()):
            seen += 1
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15]))
                todo.append(child)
    return total


_MOST_BELOW = 256


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - of names alone
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def _io_bytes() -> int:
    """Bytes that this process has read and written."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.partition(": ")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _traffic() -> dict[str, int]:
    """Bytes that each TCP connection of this process has sent and received, by the kernel's name of
    its socket.

    Read by getsockopt(2) itself: a socket object of Python would make a connection of the program
    non-blocking, if the program has set a default timeout.
    """
    import ctypes  # imported only when needed

    getsockopt = ctypes.CDLL(None, use_errno=False).getsockopt
    info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
    totals: dict[str, int] = {}
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of names alone
            with suppress(OSError):  # closed meanwhile
                name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - its text is not a path
                if not name.startswith("socket:") or len(totals) >= _MOST_CONNECTIONS:
                    continue
                size = ctypes.c_uint32(_TCP_INFO_BYTES)
                failed = getsockopt(int(fd), socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
                if not failed and size.value == _TCP_INFO_BYTES:
                    totals[name] = sum(_BYTES.unpack_from(info, _BYTES_AT))
    return totals

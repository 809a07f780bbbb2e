"""Limits on the cost of a chat template, a third-party program that runs at least once for every row.

Jinja's sandbox keeps a template from files and from Python's internals, but not from infinite loops or from strings that fill the
memory. So rendering one conversation has a limit of CPU time, of memory and of characters. CPU time, because a busy or suspended
machine is not the template's fault.
"""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

CPU_S = 5.0  # conversations of megabytes take tenths of a second
_KILLED_AFTER_S = 6.0  # CPU seconds; some C code (comparing nested lists) never checks for signals
_TICK_S = (
    0.5  # CPU seconds; after the limit every tick raises again, in case a library swallows the exception
)
_MEASURED_EVERY = 32  # renderings; the text of each may stay in memory, in general at most CHARACTERS
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24  # or CHARACTERS_EACH for every character of the conversation, if that is more
CHARACTERS_EACH = 4


class RenderingTimeout(Exception):  # noqa: N818 - named for what happened
    """The template has exceeded its CPU time."""


@dataclass
class _Meter:
    """State of the renderings in this process; only the main thread uses it."""

    is_armed: bool = False
    is_rendering: bool = False
    renderings: int = 0
    ticks: int = 0  # of the timer, since the start of the present rendering


_meter = _Meter()


@contextlib.contextmanager
def timers_armed() -> Iterator[None]:
    """A context with armed timers, in which renderings are bounded; around many renderings it saves arming them for each.

    Templates are rendered in the main thread of a task; Python delivers no signals to other threads, so nothing is bounded there.
    """
    if _meter.is_armed or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _tick)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    _meter.is_armed, _meter.renderings = True, 0
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _KILLED_AFTER_S)  # sends TEMPLATE_HAS_NO_END
        signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGPROF, before)
        _meter.is_armed = False


@contextlib.contextmanager
def bounded_rendering() -> Iterator[None]:
    """A context to render one conversation in at most CPU_S seconds of CPU time and MEMORY_BYTES of additional memory.

    Raises:
        TookTooLong: when the time is over; if C code is busy and does not return, the kernel ends the process later.
        MemoryError: by whatever asks for more.
    """
    with timers_armed():
        if _meter.is_armed and _meter.renderings % _MEASURED_EVERY == 0:
            _limit_memory()
        _meter.renderings += 1
        _meter.ticks = 0
        _meter.is_rendering = True
        try:
            yield
        finally:
            _meter.is_rendering = False


def _tick(_number: int, _frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, _KILLED_AFTER_S)  # Python code is running: it can be interrupted
    _meter.ticks += 1
    if _meter.is_rendering and _meter.ticks * _TICK_S >= CPU_S:
        raise RenderingTimeout


def _limit_memory() -> None:
    """Lowers the limit of the address space to its present size plus MEMORY_BYTES, unless it is lower already."""
    used = _address_space()
    if used is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _address_space() -> int | None:
    """Bytes mapped by this process; None on systems without /proc."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return int(os.read(fd, 32).split()[0]) * resource.getpagesize()
    finally:
        os.close(fd)


def line_in_template(error: BaseException) -> int | None:
    """The line of the template at which an exception was raised, from Jinja's entries in the traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found

"""Bounds what a chat template may cost: it is a program by somebody else, which runs once or more for every row.

Jinja's sandbox keeps a template from files and from Python's insides, but not from loops without end or from strings that
fill the memory. So rendering one conversation has a limit of CPU time, of memory and of characters. CPU time, because a busy
or suspended machine is not the template's fault.
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
_KILLED_AFTER_S = 6.0  # CPU seconds; some operations of C (comparing nested lists) never look for signals
_TICK_S = 0.5  # of CPU time; each tick after the last raises again, should a library swallow one
_MEASURED_EVERY = 32  # renderings; of each the text may stay in memory, CHARACTERS at the most as a rule
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24  # or CHARACTERS_EACH for every character of the conversation, if that is more
CHARACTERS_EACH = 4


class RenderingTimeout(Exception):  # noqa: N818 - named for what happened
    """The template has used up its CPU time."""


@dataclass
class _Meter:
    """What is known of the renderings of this process; only its main thread looks at it."""

    is_armed: bool = False
    is_rendering: bool = False
    renderings: int = 0
    ticks: int = 0  # of the timer, since the present rendering began


_meter = _Meter()


@contextlib.contextmanager
def timers_armed() -> Iterator[None]:
    """Within it renderings are bounded; around many of them it saves what arming costs each.

    Templates are rendered in the main thread of a task; elsewhere Python does not deliver signals, and nothing is bounded.
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
    """Within it one conversation is rendered, in CPU_S seconds of CPU time and with MEMORY_BYTES more memory.

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
    """Lowers the limit of address space to what is in use and MEMORY_BYTES more, unless it is lower already."""
    used = _address_space()
    if used is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _address_space() -> int | None:
    """Bytes that this process has mapped; None on a system that does not say."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return int(os.read(fd, 32).split()[0]) * resource.getpagesize()
    finally:
        os.close(fd)


def line_in_template(error: BaseException) -> int | None:
    """The line of the template at which an exception was raised, as Jinja writes it into the traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found

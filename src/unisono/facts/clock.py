"""The clock, as a protocol: a test hands in one that is 60 seconds off."""

import ctypes
import sys
import time
from typing import Protocol

_TIMEX_BYTES = (
    256  # of struct timex, which is 208 bytes on 64 bits; it begins with modes, and 0 changes nothing
)
_NOT_SYNCHRONISED = 5  # TIME_ERROR


class Clock(Protocol):
    """Tells the time."""

    def wall(self) -> float:
        """Seconds since 1970, as the system believes; for people and for comparing machines, never for waiting."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever grow; for waiting."""
        ...


class SystemClock:
    """The real one."""

    def wall(self) -> float:
        """The system's time of day."""
        return time.time()

    def monotonic(self) -> float:
        """The system's monotonic clock."""
        return time.monotonic()


def is_synchronised() -> bool | None:
    """Whether the kernel's clock is kept right by a time service, as that service has told it; None where nobody can be asked."""
    if not sys.platform.startswith("linux"):
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _NOT_SYNCHRONISED

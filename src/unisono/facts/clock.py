"""The clock, as a protocol: a test hands in one that is 60 seconds off."""

import time
from typing import Protocol


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

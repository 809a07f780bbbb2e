"""What is shown while logs are read: a bar with rate and time left on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable

from unisono.cli.live_line import LiveLine
from unisono.cli.output import output

QUIET_S = 2.0
"""What takes less needs no bar."""
SAY_EVERY_S = 10.0
_REDRAW_S = 0.2


class ReadingLine:
    """The progress of reading.

    Args:
        total_bytes: of all logs, as they lie on the disk; 0: unknown, as of stdin.
        clock: seconds that only grow.
    """

    def __init__(self, total_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_bytes
        self._clock = clock
        self._live = LiveLine() if sys.stderr.isatty() and not output().quiet else None
        self._began = self._said = clock()

    def show(self, read_bytes: int) -> None:
        """Says how far it is, not too often."""
        now = self._clock()
        every = _REDRAW_S if self._live else SAY_EVERY_S
        if now - self._began < QUIET_S or now - self._said < every:
            return
        self._said = now
        text = self._text(read_bytes, now - self._began)
        if self._live:
            self._live.show(text, share=min(read_bytes / self._total, 1.0) if self._total else None)
        else:
            output().say(text)

    def close(self) -> None:
        """Takes the bar away."""
        if self._live:
            self._live.close()

    def _text(self, read_bytes: int, seconds: float) -> str:
        rate = read_bytes / seconds
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        left = f", {max(self._total - read_bytes, 0) / rate:.0f} s left" if self._total and rate else ""
        return f"reading {read_bytes / 1e6:,.0f}{of} MB, {rate / 1e6:,.0f} MB/s{left}"

"""The redrawn line of a run on a terminal."""

import contextlib
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.facts import read_environment

_BAR_WIDTH = 24
_REDRAWN_EVERY_S = 0.1


class LiveLine:
    """One line with a bar at the bottom of the terminal; what stays is printed above it.

    It is drawn when there is news, by nobody but the caller: no thread takes time from the rank. A terminal that is
    gone is written to no more.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, no_color=not read_environment().colour, highlight=False)
        self._live: Live | None = None
        self._drawn = 0.0

    def show(self, text: str, *, share: float | None) -> None:
        """Redraws the line, with a bar if the share is known; too fast a sequence of shares is thinned."""
        now = time.monotonic()
        if share is not None and share < 1 and now - self._drawn < _REDRAWN_EVERY_S:
            return
        self._drawn = now
        row = Table.grid(padding=(0, 1))
        if share is not None:
            row.add_column(width=_BAR_WIDTH)
        row.add_column(no_wrap=True, overflow="ellipsis")
        line = Text(text, no_wrap=True, overflow="ellipsis")  # Text, not str: foreign text is no markup
        row.add_row(
            *([ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH)] if share is not None else []), line
        )
        with contextlib.suppress(OSError):
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(row, refresh=True)

    def above(self, text: str) -> None:
        """Prints a line that stays."""
        style = "yellow" if text.startswith("warning:") else ""
        with contextlib.suppress(OSError):
            self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """Takes the line away and gives the cursor back."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

"""The redrawn line of a run on a terminal."""

import sys

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.facts import read_environment

_BAR_WIDTH = 24


class LiveLine:
    """One line with a bar at the bottom of the terminal; what stays is printed above it."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, no_color=not read_environment().colour, highlight=False)
        self._live: Live | None = None

    def show(self, text: str, *, share: float | None) -> None:
        """Redraws the line; without a share the bar only shows that something moves."""
        row = Table.grid(padding=(0, 1))
        row.add_column(width=_BAR_WIDTH)
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=1.0 if share is not None else None, completed=share or 0.0, width=_BAR_WIDTH)
        row.add_row(bar, Text(text))  # Text, not str: foreign text is no markup
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(row)

    def above(self, text: str) -> None:
        """Prints a line that stays."""
        style = "yellow" if text.startswith("warning:") else ""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """Takes the line away and gives the cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

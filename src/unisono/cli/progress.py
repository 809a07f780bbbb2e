"""A line on a terminal that shows the progress of a command, redrawn in place."""

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.cli.output import Output, output, terminal_width
from unisono.facts import read_environment
from unisono.text import fitting, one_line, wrapped

_LONGEST_BAR = 24
_USUAL_WIDTH = 80
_REDRAWN_EVERY_S = 0.1


class LiveLine:
    """One line with a bar at the bottom of the terminal; permanent lines are printed above it.

    It is drawn when there is news, by nobody but the caller: no thread takes time from the rank. A terminal that is
    gone is written to no more.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, no_color=not read_environment().colour, highlight=False)
        self._live: Live | None = None
        self._drawn = 0.0

    def show(self, text: str, *, share: float | None) -> None:
        """Redraws the line, with a bar if the share is known; at a limited rate."""
        now = time.monotonic()
        if share is not None and share < 1 and now - self._drawn < _REDRAWN_EVERY_S:
            return
        self._drawn = now
        self._console.width = terminal_width(sys.stderr) or _USUAL_WIDTH
        row = self._row(text, share, self._console.width)
        with contextlib.suppress(OSError):
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(row, refresh=True)

    def _row(self, text: str, share: float | None, width: int) -> Table:
        """The bar, a fifth of the line, and as many parts of the text as fit."""
        bar = min(_LONGEST_BAR, width // 5) if share is not None else 0
        row = Table.grid(padding=(0, 1))
        if share is not None:
            row.add_column(width=bar)
        row.add_column(no_wrap=True)
        # Text, not str: foreign text must not be parsed as markup
        line = Text(fitting(text, width - bar - 1 if bar else width), no_wrap=True)
        row.add_row(
            *([ProgressBar(total=1.0, completed=share, width=bar)] if share is not None else []), line
        )
        return row

    def above(self, text: str) -> None:
        """Prints a permanent line, wrapped at words."""
        style = "yellow" if text.startswith("warning:") else ""
        lines = wrapped(text, terminal_width(sys.stderr))
        with contextlib.suppress(OSError):
            self._console.print(Text(lines, style=style), soft_wrap=True)

    def close(self) -> None:
        """Removes the line and restores the cursor."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None


class Progress:
    """Shows the messages of a task on stderr. A context manager; the line is removed at its end."""

    def __init__(self, printer: Output) -> None:
        self._printer = printer
        self._line: Any = None
        self._said = ""

    def __enter__(self) -> Self:
        if not self._printer.quiet and sys.stderr.isatty():
            self._line = LiveLine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, message: dict[str, Any]) -> None:
        """Shows a phase or a warning; ignores other messages."""
        if message["kind"] == "phase":
            self._phase(message)
        elif message["kind"] == "warning":
            fix = f"; {message['fix']}" if message.get("fix") else ""
            self._above(f"warning: {one_line(message['text'] + fix)}")

    def close(self) -> None:
        """Removes the line; further output follows the permanent lines."""
        if self._line is not None:
            self._line.close()

    def _phase(self, message: dict[str, Any]) -> None:
        text, done, total = one_line(message["text"]), message.get("done"), message.get("total")
        counted = f"{text} {done} of {total}" if total else text
        if self._line is not None:
            self._line.show(counted, share=done / total if total and done is not None else None)
        elif text != self._said:
            self._printer.notify(text)
        self._said = text

    def _above(self, text: str) -> None:
        if self._line is not None:
            self._line.above(text)
        else:
            self._printer.warn(text)


QUIET_S = 2.0
"""Shorter work shows no bar."""
NOTIFY_EVERY_S = 10.0
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
        """Shows the progress, at a limited rate."""
        now = self._clock()
        every = _REDRAW_S if self._live else NOTIFY_EVERY_S
        if now - self._began < QUIET_S or now - self._said < every:
            return
        self._said = now
        text = self._text(read_bytes, now - self._began)
        if self._live:
            self._live.show(text, share=min(read_bytes / self._total, 1.0) if self._total else None)
        else:
            output().notify(text)

    def close(self) -> None:
        """Removes the bar."""
        if self._live:
            self._live.close()

    def _text(self, read_bytes: int, seconds: float) -> str:
        rate = read_bytes / seconds
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        left = f" · {max(self._total - read_bytes, 0) / rate:.0f} s left" if self._total and rate else ""
        return f"reading {read_bytes / 1e6:,.0f}{of} MB · {rate / 1e6:,.0f} MB/s{left}"

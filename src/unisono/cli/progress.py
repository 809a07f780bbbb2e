"""What a person sees while a task works: a line that moves on a terminal, plain lines elsewhere; warnings stay."""

import sys
from types import TracebackType
from typing import Any, Self

from unisono.cli.output import Output
from unisono.text import one_line


class Progress:
    """Shows the messages of a task on stderr. A context; at its end the line is gone."""

    def __init__(self, speak: Output) -> None:
        self._speak = speak
        self._line: Any = None
        self._said = ""

    def __enter__(self) -> Self:
        if not self._speak.quiet and sys.stderr.isatty():
            from unisono.cli.live_line import LiveLine

            self._line = LiveLine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, message: dict[str, Any]) -> None:
        """Shows a phase or a warning; other messages are for others."""
        if message["kind"] == "phase":
            self._phase(message)
        elif message["kind"] == "warning":
            fix = f"; {message['fix']}" if message.get("fix") else ""
            self._above(f"warning: {one_line(message['text'] + fix)}")

    def close(self) -> None:
        """Takes the line away; what comes now is printed below what stays."""
        if self._line is not None:
            self._line.close()

    def _phase(self, message: dict[str, Any]) -> None:
        text, done, total = one_line(message["text"]), message.get("done"), message.get("total")
        counted = f"{text} {done} of {total}" if total else text
        if self._line is not None:
            self._line.show(counted, share=done / total if total and done is not None else None)
        elif text != self._said:
            self._speak.say(text)
        self._said = text

    def _above(self, text: str) -> None:
        if self._line is not None:
            self._line.above(text)
        else:
            self._speak.warn(text)

"""What `unisono run` says of a program: on stderr, for stdout is the program's; with --json the verdict and the result on stdout."""

from unisono.causes import Verdict
from unisono.cli.output import Output
from unisono.events import Message
from unisono.text import one_line
from unisono.units import show_seconds

_FOR_PROGRAMS = ("verdict", "result")


class Told:
    """Shows messages as lines that begin with `unisono:`, so that they differ from what the program prints."""

    def __init__(self, speak: Output) -> None:
        self._speak = speak
        self._verdict: Verdict | None = None

    def show(self, message: Message) -> None:
        """Shows one message."""
        if self._speak.json and message["kind"] in _FOR_PROGRAMS:
            self._speak.emit(message)
        match message["kind"]:
            case "note":
                self._speak.say(f"unisono: {one_line(str(message.get('text', '')))}")
            case "warning":
                fix = f" ({one_line(str(message['fix']))})" if message.get("fix") else ""
                self._speak.warn(f"unisono: warning: {one_line(str(message.get('text', '')))}{fix}")
            case "verdict":
                self._on_verdict(message)
            case "result":
                self._on_result(message)
            case _:
                pass

    def _on_verdict(self, message: Message) -> None:
        """Says at once what it is; the block with evidence and remedy is the last that is read."""
        body = {name: value for name, value in message.items() if name not in ("kind", "time")}
        self._verdict = Verdict.from_json(body)
        self._speak.warn(f"unisono: {self._verdict.summary}  [{self._verdict.cause}]")

    def _on_result(self, message: Message) -> None:
        verdict = Verdict.from_json(message["verdict"]) if message.get("verdict") else None
        for line in verdict.lines() if verdict is not None else ():
            self._speak.warn(line)
        took = show_seconds(float(message.get("wall_time_s") or 0.0))
        outcome = message.get("outcome")
        where = f" · {message['output_dir']}" if message.get("output_dir") else ""
        if outcome == "disagreed":
            self._speak.warn(
                "unisono: disagreed: the program was started on no node"
                if not where
                else f"unisono: disagreed · {took}{where}"
            )
            return
        self._speak.say(f"unisono: {outcome}: exit code {message.get('exit_code')} · {took}{where}")

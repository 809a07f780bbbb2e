"""`unisono logs`: what all ranks printed and told, merged in time."""

import time
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.output import output


def logs(
    run: Annotated[Path, typer.Argument(help="a run's directory", show_default=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.", show_default=False)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines until the run has ended.")
    ] = False,
) -> None:
    """Shows the output and events of all ranks and the verdicts, labelled, merged by the head's clock."""
    from unisono.rundir.merged_logs import followed_logs, merged_logs
    from unisono.text import plain

    speak = output()
    for line in (followed_logs if follow else merged_logs)(run, on_skip=lambda text: speak.warn(plain(text))):
        if rank is not None and line.rank != rank:
            continue
        if speak.json:
            speak.emit({
                "time": line.time, "host": line.host, "rank": line.rank if line.rank >= 0 else None, "source": line.source, "text": line.text,
                "signatures": line.signatures,
            })  # fmt: skip
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"
        speak.result(f"{clock} [{plain(line.label)}] {plain(line.text)}")

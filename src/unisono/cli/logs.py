"""`unisono logs`: what all ranks printed and told, merged in time."""

import time
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.output import output


def logs(
    run: Annotated[Path, typer.Argument(help="a run's directory", show_default=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.", show_default=False)] = None,
) -> None:
    """Shows what all ranks printed and told, labelled, in time."""
    from unisono.launch.logs import merged_logs
    from unisono.text import plain

    speak = output()
    for line in merged_logs(run):
        if rank is not None and line.rank != rank:
            continue
        if speak.json:
            speak.emit({
                "time": line.time, "host": line.host, "rank": line.rank, "source": line.source, "text": line.text,
            })  # fmt: skip
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"
        speak.result(f"{clock} [{plain(line.label)}] {plain(line.text)}")

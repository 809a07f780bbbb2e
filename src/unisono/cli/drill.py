"""`unisono drill`: fault injection on this machine."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output, terminal_width

if TYPE_CHECKING:
    from unisono.drill.drills import Drill
    from unisono.drill.results import DrillResult


def drill(
    faults: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FAULT", help="Faults to inject, e.g. sigkill; default: all.", show_default=False
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the faults; start nothing.")] = False,
) -> None:
    """Inject each fault into a tiny run on this machine, and show the detected cause, the time, and what is left behind. The exit code is 6 if a result is wrong."""
    from unisono.drill.drills import choose
    from unisono.drill.results import drills_table, results_table

    printer = output()
    chosen = choose(tuple(faults or ()))
    if list_:
        if printer.json:
            printer.emit({"schema": 1, "faults": [_known(drill) for drill in chosen]})
        else:
            for line in drills_table(chosen, width=terminal_width(sys.stdout)):
                printer.result(line)
        return
    with _ended_tidily():
        rows = _carry_out(chosen)
    if printer.json:
        printer.emit({"schema": 1, "faults": [row.to_json() for row in rows]})
    for line in results_table(rows, width=terminal_width(sys.stdout)):
        printer.result(line)
    raise typer.Exit(0 if all(row.is_good for row in rows) else 6)


def _carry_out(chosen: "tuple[Drill, ...]") -> "list[DrillResult]":
    from unisono.cli.progress import Progress
    from unisono.drill.execution import run_drills
    from unisono.drill.results import result_line

    rows: list[DrillResult] = []
    with Progress(output()) as progress:

        def on_progress(drill: "Drill", text: str) -> None:
            what = f"{len(rows) + 1} of {len(chosen)}, {drill.fault} ({drill.text}): {text}"
            progress.show({"kind": "phase", "text": what})

        for drill, row in zip(chosen, run_drills(chosen, on_progress), strict=True):
            rows.append(row)
            progress.show(
                {"kind": "phase", "text": f"{len(rows)} of {len(chosen)}, {drill.fault}: {result_line(row)}"}
            )
    return rows


def _known(drill: "Drill") -> dict[str, object]:
    return {"fault": drill.fault, "text": drill.text, "want": list(drill.want), "limit_s": drill.limit_s}


@contextlib.contextmanager
def _ended_tidily() -> Iterator[None]:
    """Cleans up after a signal as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

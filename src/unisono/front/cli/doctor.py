"""The commands `unisono doctor`: checks of machines and nodes before a run; and `unisono drill`:
fault injection on this machine.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.front.cli.app import Overrides, refuse_unwritable
from unisono.front.cli.job_options import JobOptionGroup, LauncherOptions, with_groups
from unisono.front.cli.output import output, shown, terminal_width

if TYPE_CHECKING:
    from unisono.front.checks.examination import Examination
    from unisono.front.drill.drills import Drill, DrillResult


@with_groups
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also check the needs of this run.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    *,
    job: JobOptionGroup,
    launcher_options: LauncherOptions,
    ladder: Annotated[
        bool,
        typer.Option("--ladder", help="Try a real collective; if it fails, find a setting that works."),
    ] = False,
    debug_comm: Annotated[
        bool, typer.Option("--debug-comm", help="With --ladder: keep the output of NCCL, gloo and torch.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 6 also if a check warns or is unknown.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Also write the report as an HTML page.", show_default=False),
    ] = None,
    end_orphans: Annotated[
        bool, typer.Option("--end-orphans", help="End your ranks left over from earlier runs.")
    ] = False,
) -> None:
    """Check this machine before a run, or with --nodes, --hosts or --launcher all nodes of a job.

    The exit code is 6 if a check fails.
    """
    from unisono.front.checks.check import DoctorRequest
    from unisono.front.checks.cluster_doctor import examine_with_launcher
    from unisono.front.checks.examination import report_lines
    from unisono.front.cli.screen import Screen
    from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of

    if report is not None:
        refuse_unwritable(report, f"--report {report}", replaces=True)
    printer = output()
    screen = Screen(printer)
    request = DoctorRequest(
        config or Path(),
        tuple(overrides or ()),
        has_config=config is not None,
        **job.request_fields(),
        launcher_options=launcher_options.given,
        ladder=ladder,
        debug_comm=debug_comm,
        end_orphans=end_orphans,
        show=screen.show,
    )
    try:
        with Interrupts():
            examination = examine_with_launcher(request)
    except Stopped as stopped:
        raise typer.Exit(exit_code_of(stopped.number)) from None
    finally:
        screen.close()
    if printer.json:
        printer.emit(examination.to_json())
    else:
        for line in report_lines(examination):
            printer.result(line)
    if report is not None:
        _write(report, examination)
        printer.notify(f"the same as one page: {report}")
    raise typer.Exit(examination.exit_code(strict=strict))


def _write(path: Path, examination: "Examination") -> None:
    """Writes the page atomically."""
    from unisono.base.files import write_text
    from unisono.front.checks.examination import html_page

    write_text(path, html_page(examination, made=time.strftime("%Y-%m-%d %H:%M:%S %Z")))


def drill(
    faults: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FAULT", help="Faults to inject, e.g. sigkill; default: all.", show_default=False
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the faults; start nothing.")] = False,
) -> None:
    """Inject each fault into a tiny run on this machine, and show the detected cause, the time, and
    what is left behind.

    The exit code is 6 if a result is wrong.
    """
    from unisono.front.drill.drills import choose, drills_table, results_table

    printer = output()
    chosen = choose(tuple(faults or ()))
    if list_:
        if printer.json:
            printer.emit({"schema": 1, "faults": [_known(drill) for drill in chosen]})
        else:
            _show_table(drills_table(chosen, width=terminal_width(sys.stdout), shown=shown))
        return
    with _ended_tidily():
        rows = _carry_out(chosen)
    if printer.json:
        printer.emit({"schema": 1, "faults": [row.to_json() for row in rows]})
    _show_table(results_table(rows, width=terminal_width(sys.stdout), shown=shown))
    raise typer.Exit(0 if all(row.is_good for row in rows) else 6)


def _show_table(lines: list[str]) -> None:
    """Shows a table, whose lines begin with a blank, and what follows it."""
    for line in lines:
        (output().verbatim if line.startswith(" ") else output().result)(line)


def _carry_out(chosen: "tuple[Drill, ...]") -> "list[DrillResult]":
    from unisono.front.cli.terminal import TaskProgress
    from unisono.front.drill.drills import result_line
    from unisono.front.drill.execution import run_drills

    rows: list[DrillResult] = []
    with TaskProgress(output()) as progress:

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

"""`unisono doctor`: checks of machines and nodes before a run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.app import (
    Devices,
    Head,
    Hosts,
    JoinTimeout,
    Launcher,
    NodeRank,
    NodesOrLeast,
    Nproc,
    Overrides,
    Partition,
    RayAddress,
    TimeLimit,
    TokenFile,
    refuse_unwritable,
)
from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.doctor.examination import Examination


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also check the needs of this run.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    nproc: Nproc = None,
    devices: Devices = None,
    nodes: NodesOrLeast = None,
    node_rank: NodeRank = None,
    head: Head = None,
    hosts: Hosts = None,
    token_file: TokenFile = None,
    join_timeout: JoinTimeout = 300.0,
    launcher: Launcher = None,
    ray_address: RayAddress = None,
    partition: Partition = None,
    time_limit: TimeLimit = None,
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
    """Check this machine before a run, or with --nodes, --hosts or --launcher all nodes of a job. The exit code is 6 if a check fails."""
    from unisono.cli.screen import Screen
    from unisono.doctor.check import DoctorRequest
    from unisono.doctor.cluster_doctor import examine_with_launcher
    from unisono.doctor.examination import report_lines
    from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of

    if report is not None:
        refuse_unwritable(report, f"--report {report}", replaces=True)
    printer = output()
    screen = Screen(printer)
    request = DoctorRequest(
        config,
        tuple(overrides or ()),
        nproc=nproc,
        devices=devices,
        nodes=nodes,
        node_rank=node_rank,
        head=head,
        hosts=hosts,
        token_file=token_file,
        join_timeout_s=join_timeout,
        ladder=ladder,
        debug_comm=debug_comm,
        end_orphans=end_orphans,
        launcher=launcher,
        ray_address=ray_address,
        partition=partition,
        time=time_limit,
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
        printer.emit({"schema": 1, "checks": [finding.to_json() for finding in examination.findings]})
    else:
        for line in report_lines(examination):
            printer.result(line)
    if report is not None:
        _write(report, examination)
        printer.notify(f"the same as one page: {report}")
    raise typer.Exit(examination.exit_code(strict=strict))


def _write(path: Path, examination: "Examination") -> None:
    """Writes the page atomically.

    Raises:
        UsageError: if it cannot be written there.
    """
    from unisono.doctor.examination import html_page
    from unisono.errors import UsageError
    from unisono.files import write_text

    try:
        write_text(path, html_page(examination, made=time.strftime("%Y-%m-%d %H:%M:%S %Z")))
    except OSError as error:
        raise UsageError.of(
            f"the report cannot be written: {error.strerror or error}",
            where=f"--report {path}",
            fix="name a file in a folder that can be written",
        ) from error

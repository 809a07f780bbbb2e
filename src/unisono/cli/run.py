"""`unisono run`: an existing program, supervised like a run of `unisono train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.app import DebugComm, Head, Hosts, JoinTimeout, NodeRank, TokenFile
from unisono.cli.output import output, until_unread

if TYPE_CHECKING:
    from unisono.causes import Verdict


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments, as you would type them.",
            show_default=False,
        ),
    ],
    nproc: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Ranks on this node.", show_default=False)
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Devices that the program may use, e.g. 0,1.", show_default=False),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of nodes; run the same command on each.", show_default=False),
    ] = None,
    node_rank: NodeRank = None,
    head: Head = None,
    hosts: Hosts = None,
    token_file: TokenFile = None,
    join_timeout: JoinTimeout = 300.0,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local or nodes; ray and slurm only show the command to type.",
            show_default=False,
        ),
    ] = None,
    output_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory for log, events, verdict and result; default: runs/run-<UTC time>-<pid>.",
            show_default=False,
        ),
    ] = "",
    uneven: Annotated[
        bool, typer.Option("--uneven", help="Allow different numbers of ranks per node.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Time for the program to exit after a signal, before it is killed."
        ),
    ] = 40.0,
    debug_comm: DebugComm = False,
) -> None:
    """Run an existing, unchanged training script: compare the nodes before it starts, watch its ranks, and report the cause of a failure."""
    from unisono.cli.screen import RunOutput
    from unisono.guard.head_program import GuardedRun
    from unisono.guard.program_request import RunRequest

    printer = output()
    request = RunRequest(
        tuple(command),
        nproc=nproc,
        nodes=nodes,
        node_rank=node_rank,
        head=head,
        token_file=token_file,
        join_timeout_s=join_timeout,
        output_dir=output_dir,
        uneven=uneven,
        debug_comm=debug_comm,
        json=printer.json,
        devices=devices,
        hosts=hosts,
        grace_s=grace,
        launcher=launcher,
    )
    show = until_unread(RunOutput(printer).show)
    raise typer.Exit(int(GuardedRun(request, show, _diagnosis).run()["exit_code"]))


def _diagnosis(log: Path) -> "Verdict | None":
    """The verdict of `unisono diagnose` on the program's output; None if it finds no cause."""
    from unisono.diagnose.reading import diagnose_logs, find_sources, read_all

    try:
        read = read_all(find_sources([str(log)]))
    except FileNotFoundError:
        return None
    if not read.scanned:
        return None
    verdict = diagnose_logs(read.scanned, read.recordings).verdict
    return None if verdict.severity == "none" or verdict.cause == "undetermined" else verdict

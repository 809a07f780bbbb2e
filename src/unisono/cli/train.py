"""`unisono train`: fine-tune a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output, silence

if TYPE_CHECKING:
    from unisono.events import Message
    from unisono.launch.asked import TrainRequest


def train(
    config: Annotated[Path, typer.Argument(help="a YAML file; `unisono init` makes one", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="as optim.lr=1e-4", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; also starts a new run, and extends a finished one.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Rename what is in output_dir to OUT.old-N, and begin.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Go on though this has changed, as optim.lr or data.", show_default=False
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Go on from a checkpoint that is not signed with your key.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="N", help="Ranks on this node; else one per device.", show_default=False
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="As 0,1 or UUIDs: one a rank.", show_default=False)
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="How many nodes; run the same on each.", show_default=False),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Which node this is, from 0.", show_default=False)
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Where node 0 is.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Start these nodes over ssh.", show_default=False)
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The job's secret; else UNISONO_TOKEN.", show_default=False),
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long nodes wait for each other.")
    ] = 300.0,
    debug_comm: Annotated[
        bool, typer.Option("--debug-comm", help="Ranks say more about their communication.")
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, max=100, help="How often a run that died goes on by itself.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; start nothing.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Try the whole path with 64 rows and three steps, elsewhere.")
    ] = False,
    no_rehearse: Annotated[
        bool,
        typer.Option("--no-rehearse", help="Several ranks: do not save and read back after the first step."),
    ] = False,
) -> None:
    """Fine-tunes a model: on one device, on several (--nproc), or on several nodes (--nodes, --hosts)."""
    from unisono.launch.asked import TrainRequest

    request = TrainRequest(
        config, tuple(overrides or ()), resume=resume, fresh=fresh, allow=tuple(allow or ()), trust=trust,
        devices=devices, restarts=restarts, nproc=nproc,
        nodes=nodes, node_rank=node_rank, head=head, hosts=hosts, token_file=token_file, join_timeout_s=join_timeout,
        debug_comm=debug_comm, rehearse=not no_rehearse,
    )  # fmt: skip
    if dry_run:
        _show_plan(request)
    elif rehearse:
        raise typer.Exit(_rehearse(request))
    else:
        raise typer.Exit(_train(request))


def _train(request: "TrainRequest") -> int:
    from unisono.cli.screen import JsonLines, Screen
    from unisono.launch.session import train as train_session

    speak = output()
    screen = JsonLines(speak) if speak.json else Screen(speak)

    def show(message: "Message") -> None:
        try:
            screen.show(message)
        except OSError:  # where it is written to is full or gone: not worth a run, whose directory has it all
            silence(sys.stdout)
            silence(sys.stderr)

    try:
        return int(train_session(request, show)["exit_code"])
    finally:
        screen.close()


def _show_plan(request: "TrainRequest") -> None:
    from unisono.cli.first_screen import first_screen
    from unisono.cli.screen import Screen
    from unisono.launch.outcome import dry_result
    from unisono.launch.session import plan_only

    speak = output()
    screen = Screen(speak)
    try:
        plan = plan_only(request, screen.show)
    finally:
        screen.close()
    if speak.json:
        speak.emit({"kind": "plan", **plan.to_json()})
        speak.emit({"kind": "result", **dry_result(plan)})
        return
    for text in first_screen(plan, {}):
        speak.result(text)
    speak.result("")
    for name, origin in sorted(plan.origins.items()):
        speak.result(f"{name:<28} {origin}")
    for text in [*plan.warnings, *plan.data.warnings]:
        speak.result(f"warning: {text}")


def _rehearse(request: "TrainRequest") -> int:
    from unisono.cli.screen import Screen
    from unisono.launch.rehearsal import rehearse, summary

    speak = output()
    screen = Screen(speak)
    try:
        done = rehearse(request, screen.show)
    finally:
        screen.close()
    if speak.json:
        speak.emit({"kind": "result", **done.to_json()})
    else:
        for text in summary(done):
            speak.result(text)
    return done.exit_code

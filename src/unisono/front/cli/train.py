"""The commands `unisono train`: fine-tune a model; and `unisono run`: an existing program,
supervised like a run of `unisono train`.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.front.cli.app import DebugComm, Overrides
from unisono.front.cli.job_options import (
    JobOptionGroup,
    LauncherOptions,
    OptionGroup,
    ProgramJobOptions,
    with_groups,
)
from unisono.front.cli.output import output, until_unread
from unisono.jobs.launchers.launchers import find_launcher

if TYPE_CHECKING:
    from unisono.base.causes import Verdict
    from unisono.jobs.runs.train_request import TrainRequest


@dataclass(frozen=True)
class StartOptions(OptionGroup):
    """What a start does with an earlier run, and whom it trusts: fields of a TrainRequest."""

    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the run in output_dir, extend a finished one, or start a new one."
        ),
    ] = False
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Rename an existing output_dir to OUT.old-N, and start from scratch."),
    ] = False
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Resume although this key has changed, e.g. optim.lr or data.",
            show_default=False,
        ),
    ] = None
    trust: Annotated[
        bool, typer.Option("--trust", help="Resume from a checkpoint that is not signed with your key.")
    ] = False
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            help="Execute your own `FILE.py:CLASS` of `objective` and `optim.kind` in each rank.",
        ),
    ] = False

    def request_fields(self) -> Mapping[str, Any]:
        """The fields of a TrainRequest."""
        return asdict(self) | {"allow": tuple(self.allow or ())}


@with_groups
def train(
    config: Annotated[
        Path, typer.Argument(help="A YAML file; `unisono init` writes one.", show_default=False)
    ],
    overrides: Overrides = None,
    *,
    start: StartOptions,
    job: JobOptionGroup,
    launcher_options: LauncherOptions,
    debug_comm: DebugComm = False,
    reason: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="Reason for an environment variable set by hand; recorded in the plan.",
            show_default=False,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0, max=100, help="Number of automatic restarts after a failure.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; start nothing.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Run the whole path with 64 rows and three steps, in a separate directory."
        ),
    ] = False,
    no_first_checkpoint: Annotated[
        bool,
        typer.Option(
            "--no-first-checkpoint",
            help="With several ranks: skip the checkpoint and its read-back after step 1.",
        ),
    ] = False,
    no_read_back: Annotated[
        bool,
        typer.Option(
            "--no-read-back",
            help="Do not read the result back to check it; same as checkpoint.read_back=false.",
        ),
    ] = False,
) -> None:
    """Fine-tune a model on one device, on several (--nproc), or on several nodes (--nodes,
    --hosts).
    """
    from unisono.base.requirements import missing_trainer_packages
    from unisono.guard.supervise.base_environment import early_environment
    from unisono.guard.supervise.fork_server import ForkServer

    with ExitStack() as stack:  # a refusal, too, ends the server
        fork_server = None
        places_nodes = find_launcher(job.launcher).places_nodes
        if not (dry_run or rehearse or places_nodes or missing_trainer_packages()):
            fork_server = stack.enter_context(closing(ForkServer(output().warn)))
            fork_server.begin(early_environment())  # before the imports below
        from unisono.guard.supervise.child_process import Programs
        from unisono.jobs.runs.train_request import TrainRequest

        request = TrainRequest(
            config,
            (
                *(overrides or ()),
                *map(_as_override, reason or ()),
                *(["checkpoint.read_back=false"] if no_read_back else []),
            ),
            **start.request_fields(),
            **job.request_fields(),
            launcher_options=launcher_options.given,
            restarts=restarts,
            debug_comm=debug_comm,
            rehearse=not no_first_checkpoint,
            programs=Programs(fork_server=fork_server),
        )
        if dry_run:
            _show_plan(request)
        elif rehearse:
            raise typer.Exit(_rehearse(request))
        else:
            raise typer.Exit(_train(request))


def _as_override(text: str) -> str:
    """`NAME=TEXT` as a config override, which reaches all nodes and launchers.

    Raises:
        UsageError: if it has no name or no text.
    """
    from unisono.base.errors import UsageError

    name, _, why = text.partition("=")
    if not (name.isidentifier() and why.strip()):
        raise UsageError.of(
            f"--reason {text!r} has no variable, or no reason",
            where="command line",
            fix="as in --reason NCCL_P2P_DISABLE='hangs on these boards, ticket 4711'",
        )
    return f"reasons.{name}={json.dumps(why.strip())}"


def _train(request: "TrainRequest") -> int:
    from unisono.front.cli.screen import JsonLines, Screen
    from unisono.jobs.launchers.launchers import run_launcher

    printer = output()
    screen = JsonLines(printer) if printer.json else Screen(printer)

    try:
        return run_launcher(request, until_unread(screen.show)).exit_code
    finally:
        screen.close()


def _show_plan(request: "TrainRequest") -> None:
    from unisono.front.cli.screen import Screen
    from unisono.front.cli.terminal import first_screen
    from unisono.jobs.launchers.launchers import plan_only
    from unisono.jobs.runs.run_records import dry_result

    printer = output()
    screen = Screen(printer)
    try:
        plan = plan_only(request, screen.show)
    finally:
        screen.close()
    if isinstance(plan, str):
        printer.emit({"kind": "script", "text": plan}) if printer.json else printer.verbatim(plan)
        return
    if printer.json:
        printer.emit({"kind": "plan", **plan.to_json()})
        printer.emit({"kind": "result", **dry_result(plan).to_json()})
        return
    for text in first_screen(plan, {}):
        printer.result(text)
    printer.result("")
    for name, origin in sorted(plan.origins.items()):
        printer.result(f"{name:<28} {origin}")
    for text in [*plan.warnings, *plan.data.warnings]:
        printer.result(f"warning: {text}")


def _rehearse(request: "TrainRequest") -> int:
    from unisono.front.cli.screen import Screen
    from unisono.jobs.launchers.launchers import rehearse
    from unisono.jobs.runs.session import summary

    printer = output()
    screen = Screen(printer)
    try:
        done = rehearse(request, screen.show)
    finally:
        screen.close()
    if printer.json:
        printer.emit({"kind": "result", **done.to_json()})
    else:
        for text in summary(done):
            printer.result(text)
    return done.exit_code


@with_groups
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments, as you would type them.",
            show_default=False,
        ),
    ],
    *,
    job: ProgramJobOptions,
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
    idle_limit: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="End the program when no rank has done anything for so long; 0: never.",
        ),
    ] = 1800.0,
    debug_comm: DebugComm = False,
) -> None:
    """Run an existing, unchanged training script: compare the nodes before it starts, watch its
    ranks, and report the cause of a failure.
    """
    from unisono.front.cli.screen import RunOutput
    from unisono.guard.programs.head_program import GuardedRun
    from unisono.guard.programs.program_request import RunRequest
    from unisono.jobs.launchers.launchers import find_launcher

    printer = output()
    launcher = find_launcher(job.launcher, otherwise="choose local or nodes, or omit it")
    request = RunRequest(
        tuple(command),
        **{**job.request_fields(), "launcher": launcher},
        output_dir=output_dir,
        uneven=uneven,
        debug_comm=debug_comm,
        json=printer.json,
        grace_s=grace,
        idle_limit_s=idle_limit,
    )
    show = until_unread(RunOutput(printer).show)
    raise typer.Exit(GuardedRun(request, show, _diagnosis).run().exit_code)


def _diagnosis(log: Path) -> "Verdict | None":
    """The verdict of `unisono diagnose` on the program's output; None if it finds no cause."""
    from unisono.guard.diagnosis.reading import diagnose_logs, find_sources, read_all

    try:
        read = read_all(find_sources([str(log)]))
    except FileNotFoundError:
        return None
    if not read.scanned:
        return None
    verdict = diagnose_logs(read.scanned, read.recordings).verdict
    return None if verdict.severity == "none" or verdict.cause == "undetermined" else verdict

"""What a launcher is: it starts the fronts of a job (`--launcher`).

The command line reads the options of all launchers, so the module of one imports little, not even
`unisono.base.errors`; its methods do.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from unisono.base.messages import Show
    from unisono.guard.rundir.records import RunResult
    from unisono.jobs.runs.train_request import TrainRequest
    from unisono.trainer.config import LoadedConfig
    from unisono.trainer.plan import RunPlan


def option(*, metavar: str, help: str) -> Any:  # noqa: A002 - Typer's name
    """A field with an option of a launcher: its text on the command line, or None."""
    return field(default=None, metadata={"metavar": metavar, "help": help})


@dataclass(frozen=True)
class NodesCommand:
    """A command of unisono that each node runs once: `unisono NAME [CONFIG [OVERRIDES]]
    OPTIONS`.

    Attributes:
        config_path: on this machine; None: the command gets no config, and `loaded` has the
            defaults.
        show: receives progress.
    """

    name: str
    options: tuple[str, ...]
    request: "TrainRequest"
    config_path: Path | None
    loaded: "LoadedConfig"
    show: "Show"


@dataclass(frozen=True)
class NodeOutput:
    """What a command printed on node 0.

    Attributes:
        lines: of stdout.
        host: names the nodes, for the title of a report.
        where: names the process, for an error.
        tail: the last lines of stderr.
        fix: what to try if the output has no result.
    """

    lines: Sequence[str]
    code: int
    host: str
    where: str
    tail: Sequence[str]
    fix: str


@dataclass(frozen=True)
class Launcher:
    """Starts the fronts of a job.

    This one is the front itself; others override what they do differently.

    The fields of a launcher are its options, each made by `option`.

    Attributes:
        name: for `--launcher`.
        places_nodes: whether it finds and starts the nodes itself, so that nobody else may place
            them.
        expects_nodes: whether a job on one node is refused, unless `--nodes 1` is given.
    """

    name: ClassVar[str] = ""
    places_nodes: ClassVar[bool] = False
    expects_nodes: ClassVar[bool] = False

    def option_names(self) -> tuple[str, ...]:
        """The names of its options, as fields."""
        return tuple(each.name for each in fields(self))

    def check(self, request: "TrainRequest") -> None:
        """Checks the options of a job.

        Raises:
            UsageError: if the launcher cannot follow them.
        """

    def train(self, request: "TrainRequest", show: "Show") -> "RunResult":
        """The result, after running a job to its end.

        Raises:
            UnisonoError: if the job is refused before anything starts.
        """
        from unisono.jobs.runs.session import train

        return train(request, show)

    def plan(self, request: "TrainRequest", show: "Show") -> "RunPlan | str":
        """The plan of a job that is not started, or the script that would be submitted.

        Raises:
            UnisonoError: for which the job itself would be refused before its ranks start.
        """
        from unisono.jobs.runs.session import plan_only

        return plan_only(request, show)

    def run_on_nodes(self, command: NodesCommand) -> NodeOutput:
        """Runs a command once on each node, if the launcher places the nodes.

        Raises:
            UnisonoError: if it is refused, or there are no such nodes.
        """
        from unisono.base.errors import UsageError

        raise UsageError.of(
            f"--launcher {self.name} does not run {command.name}",
            where="command line",
            fix=f"on each node: unisono {command.name} --nodes N --node-rank R --head HOST",
        )

    def check_program(self, program: str, *, several: bool) -> None:
        """Checks that `unisono run` can start an existing program with this launcher.

        Args:
            program: its command line.
            several: whether several nodes are requested.

        Raises:
            UsageError: if it cannot, with the command to type.
        """
        if self.places_nodes:
            from unisono.base.errors import UsageError

            raise UsageError.of(
                f"run does not submit to {self.name.capitalize()} by itself, unlike train",
                where="--launcher",
                why="an existing program is started on each node as it is",
                fix=self.program_command(program),
            )

    def program_command(self, program: str) -> str:
        """How to start an existing program on the nodes of this launcher."""
        return f"on each node: unisono run --nodes N --node-rank R --head HOST -- {program}"


def front_command(request: "TrainRequest", config: str) -> tuple[str, ...]:
    """The command of each node's front, whose output is lines of JSON: messages, the last one the
    result.

    It lacks `--fresh`: a job that starts again would rename its own run. It lacks the node's place
    in the job, too: the launcher adds `--nodes`, `--node-rank` and `--head`, unless a scheduler's
    variables have them.

    Args:
        config: its path on the node.
    """
    from unisono.guard.supervise.child_process import option_args

    options = {
        "--nproc": request.nproc,
        "--devices": request.devices,
        "--restarts": request.restarts,
        "--join-timeout": f"{request.join_timeout_s:g}",
    }
    allowed = [word for key in request.allow for word in ("--allow", key)]
    flags = {
        "--resume": request.resume,
        "--trust": request.trust,
        "--trust-code": request.trust_code,
        "--debug-comm": request.debug_comm,
        "--no-first-checkpoint": not request.rehearse,
        "--json": True,
    }
    given = option_args({name: is_given or None for name, is_given in flags.items()})
    front = (sys.executable, "-m", "unisono", "train", config, *request.overrides)
    return (*front, *option_args(options), *allowed, *given)

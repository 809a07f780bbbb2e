"""The table of launchers: this front alone (local), the user or SSH (nodes), Ray, Slurm; and those
of other packages.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.base import extensions
from unisono.jobs.launchers.launcher import Launcher
from unisono.jobs.launchers.local_launcher import LocalLauncher
from unisono.jobs.launchers.nodes_launcher import NodesLauncher
from unisono.jobs.launchers.ray_launcher import RayLauncher
from unisono.jobs.launchers.slurm_launcher import SlurmLauncher

if TYPE_CHECKING:
    from unisono.base.errors import UsageError
    from unisono.base.messages import Show
    from unisono.guard.rundir.records import RunResult
    from unisono.jobs.runs.session import Rehearsal
    from unisono.jobs.runs.train_request import TrainRequest
    from unisono.trainer.plan import RunPlan

Request = TypeVar("Request", bound="TrainRequest")

LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher for launcher in (LocalLauncher(), NodesLauncher(), RayLauncher(), SlurmLauncher())
}
_NODE_OPTIONS = ("node_rank", "head", "hosts", "token_file")
"""Options that describe this node's place; a launcher that starts the fronts itself sets them."""


def launcher_names() -> list[str]:
    """The launchers of this table and of installed packages, which are not imported."""
    return [
        *LAUNCHERS,
        *sorted(name for name in extensions.extensions(extensions.LAUNCHERS) if name not in LAUNCHERS),
    ]


def find_launcher(name: str | None, *, otherwise: str = "") -> Launcher:
    """The launcher with a name, without options; None: this front, and whoever has the same
    command.

    Args:
        otherwise: the fix for an unknown name that is like no other; empty: choose one of the
            names.

    Raises:
        UsageError: if there is none, or its package cannot be imported.
    """
    if name is None:
        return Launcher()
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    if entry := extensions.extensions(extensions.LAUNCHERS).get(name):
        launcher: Launcher = extensions.load_extension(entry)()
        return launcher
    from unisono.base.errors import UsageError
    from unisono.base.text import nearest

    near = nearest(name, names := launcher_names())
    raise UsageError.of(
        f"unknown launcher {name}",
        where="--launcher",
        fix=f"did you mean `{near}`?" if near else otherwise or f"choose one of {', '.join(names)}",
    )


def run_launcher(request: "TrainRequest", show: "Show") -> "RunResult":
    """The result, after running a job to its end with its launcher.

    Raises:
        UnisonoError: if the job is refused before anything starts, or the launcher, of another
            package, does not give its result.
    """
    from unisono.base.errors import UsageError
    from unisono.guard.rundir.records import RunResult
    from unisono.jobs.runs.train_request import with_overwriting

    launcher, request = _prepared_training(request)
    result: object = launcher.train(with_overwriting(request), show)
    if not isinstance(result, RunResult):
        raise UsageError.of(
            f"launcher {launcher.name} gave a {type(result).__name__} instead of a RunResult",
            where="--launcher",
            why="the job is over, and this command cannot tell how it ended",
            fix="see result.json in output_dir; the launcher's `train` returns RunResult.from_json(...) of it",
        )
    return result


def plan_only(request: "TrainRequest", show: "Show") -> "RunPlan | str":
    """The plan of a job that is not started, as node 0 would make it, or the script that would be
    submitted.

    Raises:
        UnisonoError: for which the job itself would be refused before its ranks start.
    """
    from unisono.jobs.runs.train_request import with_overwriting

    launcher, request = _prepared_training(request)
    return launcher.plan(with_overwriting(request), show)


def rehearse(request: "TrainRequest", show: "Show") -> "Rehearsal":
    """Rehearses a job on this machine, with any launcher; see `session.rehearse`.

    Raises:
        UnisonoError: if a stage is refused before anything was started.
    """
    from unisono.jobs.runs import session

    launcher = find_launcher(request.launcher)
    request = replace(request, expects_nodes=launcher.expects_nodes)
    return session.rehearse(request, show, ignored_launcher=launcher.name if launcher.places_nodes else None)


def prepare_launcher(request: Request) -> tuple[Launcher, Request]:
    """The launcher of a request, with its options; and the request as this launcher takes it.

    Raises:
        UsageError: if the launcher is unknown, or an option belongs to a different launcher.
    """
    launcher = find_launcher(request.launcher)
    for name in request.launcher_options:
        if name not in launcher.option_names():
            raise _foreign_option(name, launcher)
    _refuse_node_options(launcher, request)
    launcher.check(request)
    request = replace(request, expects_nodes=launcher.expects_nodes)
    return replace(launcher, **request.launcher_options), request


def _prepared_training(request: "TrainRequest") -> tuple[Launcher, "TrainRequest"]:
    """`prepare_launcher` for a training; other launchers than those that place the nodes refuse a
    missing trainer where the other nodes learn of it.
    """
    from unisono.base.requirements import refuse_without_trainer

    launcher, request = prepare_launcher(request)
    if launcher.places_nodes:
        refuse_without_trainer("unisono train")
    return launcher, request


def _foreign_option(name: str, launcher: Launcher) -> "UsageError":
    """The error for an option that the launcher does not have."""
    from unisono.base.errors import UsageError

    owner = next((each.name for each in LAUNCHERS.values() if name in each.option_names()), None)
    if owner is not None:
        return UsageError.of(
            f"--{name.replace('_', '-')} requires --launcher {owner}",
            where="command line",
            fix=f"add --launcher {owner}, or remove it",
        )
    names = ", ".join(launcher.option_names()) or "none"
    return UsageError.of(
        f"the launcher has no option {name}", where="--launcher-option", fix=f"its options: {names}"
    )


def _refuse_node_options(launcher: Launcher, request: "TrainRequest") -> None:
    """Refuses options about this node's place with a launcher that places the nodes."""
    from unisono.base.errors import UsageError

    given = [name for name in _NODE_OPTIONS if getattr(request, name) is not None]
    if launcher.places_nodes and given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError.of(
            f"--launcher {launcher.name} finds and starts the nodes itself, without {options}",
            where="command line",
            fix=f"remove {options}",
        )


def with_launcher_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, in which the options of launchers stand by their names."""
    names = {name for launcher in LAUNCHERS.values() for name in launcher.option_names()}
    options = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    return {**others, "launcher_options": {**options, **others.get("launcher_options", {})}}

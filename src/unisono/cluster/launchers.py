"""Who starts the fronts of a job: this one alone (local), a person or ssh (nodes), Ray, Slurm (`--launcher`)."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.events import Show
from unisono.launch.train_request import TrainRequest
from unisono.text import nearest

if TYPE_CHECKING:
    from unisono.plan import RunPlan


LAUNCHERS = ["local", "nodes", "ray", "slurm"]
_NODE_OPTIONS = ("node_rank", "head", "hosts", "token_file")
"""What says which node this is; a launcher that starts the fronts itself knows that."""


def run_launcher(request: TrainRequest, show: Show) -> dict[str, Any]:
    """Has the launcher that was asked for carry a start to its end; gives the object of result.json.

    Raises:
        UnisonoError: if it is refused before anything was started.
    """
    refuse_contradictions(request)
    if request.launcher == "ray":
        from unisono.cluster.ray.ray_job import train as train_on_ray

        return train_on_ray(request, show)
    if request.launcher == "slurm":
        from unisono.cluster.slurm.batch_job import train_on_slurm

        return train_on_slurm(request, show)
    from unisono.launch.session import train

    return train(request, show)


def plan_only(request: TrainRequest, show: Show) -> "RunPlan":
    """The plan of a start that is not made, as node 0 would make it: as `session.plan_only`.

    Raises:
        UnisonoError: whatever the start itself would be refused for before its ranks.
    """
    from unisono.launch import session

    refuse_contradictions(request)
    if request.launcher == "ray" and request.nodes not in (None, "1"):
        request = replace(request, node_rank=0, head="ray")
    return session.plan_only(request, show)


def refuse_contradictions(request: TrainRequest) -> None:
    """Checks `--launcher` and the options that belong to one launcher.

    Raises:
        UsageError: if there is no such launcher, or an option is another launcher's.
    """
    launcher = request.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        near = nearest(launcher, LAUNCHERS)
        raise UsageError.of(
            f"there is no launcher {launcher}",
            where="--launcher",
            fix=f"did you mean `{near}`?" if near else f"choose one of {', '.join(LAUNCHERS)}",
        )
    if request.ray_address is not None and launcher != "ray":
        raise UsageError.of(
            "--ray-address is for --launcher ray",
            where="command line",
            fix="add --launcher ray, or leave it out",
        )
    given = [name for name in ("partition", "time") if getattr(request, name) is not None]
    if given and launcher != "slurm":
        raise UsageError.of(
            f"--{given[0]} is for --launcher slurm",
            where="command line",
            fix="add --launcher slurm, or leave it out",
        )
    if launcher in ("ray", "slurm"):
        given = [name for name in _NODE_OPTIONS if getattr(request, name) is not None]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError.of(
                f"--launcher {launcher} finds and starts the nodes itself, without {options}",
                where="command line",
                fix=f"leave out {options}",
            )
    if launcher == "local" and (request.hosts is not None or request.nodes not in (None, "1")):
        raise UsageError.of(
            "--launcher local is for one node, and several are asked for",
            where="command line",
            fix="leave out --launcher, or take --launcher nodes, ray or slurm",
        )

"""The launchers of a job's fronts (`--launcher`): this front alone (local), the user or SSH
(nodes), Ray, Slurm.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.base.errors import UsageError
from unisono.base.events import Show
from unisono.base.text import nearest
from unisono.jobs.runs.train_request import TrainRequest, with_overwriting

if TYPE_CHECKING:
    from unisono.trainer.plan import RunPlan


LAUNCHERS = ["local", "nodes", "ray", "slurm"]
_NODE_OPTIONS = ("node_rank", "head", "hosts", "token_file")
"""Options that describe this node's place; a launcher that starts the fronts itself sets them."""


def run_launcher(request: TrainRequest, show: Show) -> dict[str, Any]:
    """The object of result.json, after running a job to its end with its launcher.

    Raises:
        UnisonoError: if the job is refused before anything starts.
    """
    refuse_contradictions(request)
    request = with_overwriting(request)
    if request.launcher == "ray":
        from unisono.jobs.launchers.ray_job import train as train_on_ray

        return train_on_ray(request, show)
    if request.launcher == "slurm":
        from unisono.jobs.launchers.slurm_batch_job import train_on_slurm

        return train_on_slurm(request, show)
    from unisono.jobs.runs.session import train

    return train(request, show)


def plan_only(request: TrainRequest, show: Show) -> "RunPlan":
    """The plan of a job that is not started, as node 0 would make it; see `session.plan_only`.

    Raises:
        UnisonoError: for which the job itself would be refused before its ranks start.
    """
    from unisono.jobs.runs import session

    refuse_contradictions(request)
    if request.launcher == "ray" and request.nodes not in (None, "1"):
        request = replace(request, node_rank=0, head="ray")
    return session.plan_only(with_overwriting(request), show)


def refuse_contradictions(request: TrainRequest) -> None:
    """Checks `--launcher` and the options that belong to one launcher.

    Raises:
        UsageError: if the launcher is unknown, or an option belongs to a different launcher.
    """
    launcher = request.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        near = nearest(launcher, LAUNCHERS)
        raise UsageError.of(
            f"unknown launcher {launcher}",
            where="--launcher",
            fix=f"did you mean `{near}`?" if near else f"choose one of {', '.join(LAUNCHERS)}",
        )
    if request.ray_address is not None and launcher != "ray":
        raise UsageError.of(
            "--ray-address requires --launcher ray",
            where="command line",
            fix="add --launcher ray, or remove it",
        )
    given = [name for name in ("partition", "time") if getattr(request, name) is not None]
    if given and launcher != "slurm":
        raise UsageError.of(
            f"--{given[0]} requires --launcher slurm",
            where="command line",
            fix="add --launcher slurm, or remove it",
        )
    if launcher in ("ray", "slurm"):
        given = [name for name in _NODE_OPTIONS if getattr(request, name) is not None]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError.of(
                f"--launcher {launcher} finds and starts the nodes itself, without {options}",
                where="command line",
                fix=f"remove {options}",
            )
    if launcher == "local" and (request.hosts is not None or request.nodes not in (None, "1")):
        raise UsageError.of(
            "--launcher local runs on one node, but several are requested",
            where="command line",
            fix="remove --launcher, or use --launcher nodes, ray or slurm",
        )

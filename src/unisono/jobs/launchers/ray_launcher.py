"""`--launcher ray`: Ray starts the fronts on the nodes of its cluster."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unisono.jobs.launchers.launcher import Launcher, NodeOutput, NodesCommand, option

if TYPE_CHECKING:
    from unisono.base.messages import Show
    from unisono.guard.rundir.records import RunResult
    from unisono.jobs.runs.train_request import TrainRequest
    from unisono.trainer.plan import RunPlan


@dataclass(frozen=True)
class RayLauncher(Launcher):
    """Runs a job in a Ray cluster.

    Attributes:
        ray_address: of the cluster; None: the one that RAY_ADDRESS names, or that runs on this
            machine.
    """

    name = "ray"
    places_nodes = True

    ray_address: str | None = option(
        metavar="A", help="Ray cluster; default: RAY_ADDRESS, or the local cluster."
    )

    def train(self, request: "TrainRequest", show: "Show") -> "RunResult":
        """Runs the job in the cluster."""
        from unisono.jobs.launchers.ray_job import train

        return train(request, show, ray_address=self.ray_address)

    def plan(self, request: "TrainRequest", show: "Show") -> "RunPlan | str":
        """The plan of node 0; other nodes are taken to be like this machine."""
        if request.nodes not in (None, "1"):
            request = replace(request, node_rank=0, head="ray")
        return super().plan(request, show)

    def run_on_nodes(self, command: NodesCommand) -> NodeOutput:
        """Runs the command by an actor on each node."""
        from unisono.jobs.launchers.ray_job import run_by_actors

        return run_by_actors(command, ray_address=self.ray_address)

    def program_command(self, program: str) -> str:
        """The program over SSH, or alone if it uses Ray by itself."""
        return (
            "--hosts a,b for its nodes; a program that starts its ranks by Ray itself needs neither: unisono"
            f" run -- {program}"
        )

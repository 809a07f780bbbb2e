"""`--launcher slurm`: a batch job is written, submitted and followed; doctor runs as a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.jobs.launchers.launcher import Launcher, NodeOutput, NodesCommand, option

if TYPE_CHECKING:
    from unisono.base.messages import Show
    from unisono.guard.rundir.records import RunResult
    from unisono.jobs.runs.train_request import TrainRequest


@dataclass(frozen=True)
class SlurmLauncher(Launcher):
    """Submits a job to Slurm.

    Attributes:
        partition: as typed; None: the cluster's default.
        time: the time limit, as Slurm writes it; None: the partition's.
    """

    name = "slurm"
    places_nodes = True

    partition: str | None = option(metavar="P", help="Slurm partition.")
    time: str | None = option(metavar="T", help="Time limit of a Slurm job, e.g. 8:00:00.")

    def train(self, request: "TrainRequest", show: "Show") -> "RunResult":
        """Submits the job, and follows it; also one that an earlier command has submitted."""
        from unisono.jobs.launchers.slurm_batch_job import train_on_slurm

        return train_on_slurm(request, show, partition=self.partition, time_limit=self.time)

    def plan(self, request: "TrainRequest", show: "Show") -> str:
        """The batch script that would be submitted."""
        from unisono.jobs.launchers.slurm_batch_job import script_for

        return script_for(request, partition=self.partition, time_limit=self.time)

    def run_on_nodes(self, command: NodesCommand) -> NodeOutput:
        """Runs the command as a step, in this allocation or in one that srun requests."""
        from unisono.jobs.launchers.slurm_step import run_as_step

        return run_as_step(command, partition=self.partition, time_limit=self.time)

    def program_command(self, program: str) -> str:
        """A step with one front on each node."""
        return f"in a batch script or after salloc: srun --ntasks-per-node=1 unisono run -- {program}"

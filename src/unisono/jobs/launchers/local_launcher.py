"""`--launcher local`: one node, this one."""

from typing import TYPE_CHECKING

from unisono.jobs.launchers.launcher import Launcher

if TYPE_CHECKING:
    from unisono.base.errors import UsageError
    from unisono.jobs.runs.train_request import TrainRequest


class LocalLauncher(Launcher):
    """Runs a job on this node alone."""

    name = "local"

    def check(self, request: "TrainRequest") -> None:
        """Refuses several nodes."""
        if request.hosts is not None or request.nodes not in (None, "1"):
            raise _several_nodes("remove --launcher, or use --launcher nodes, ray or slurm")

    def check_program(self, program: str, *, several: bool) -> None:
        """Refuses several nodes."""
        if several:
            raise _several_nodes("omit --launcher")


def _several_nodes(fix: str) -> "UsageError":
    from unisono.base.errors import UsageError

    return UsageError.of(
        "--launcher local runs on one node, but several are requested", where="command line", fix=fix
    )

"""A job on a cluster of a test's own: what a person types on the first node."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.slurm.slurm_cluster import Cluster


class SlurmJob(Job):
    """A job of two nodes, all of whose commands are given on the first one."""

    def __init__(self, slurm: Cluster, folder: Path, **named: Any) -> None:
        super().__init__(slurm.networks, folder, nodes=slurm.nodes, **named)
        self.slurm = slurm

    def type(
        self, *words: str, before: Sequence[str] = (), env: dict[str, str] | None = None, json: bool = True, rehearse: bool = False
    ) -> Front:  # fmt: skip
        """Types `unisono train c.yaml …` on the first node, without a token.

        Args:
            words: after the config.
            before: in front of it, as `srun -N2`.
            env: variables; an empty value takes one away.
            json: whether it speaks JSON.
            rehearse: whether the first checkpoint is read back.
        """
        rest = [*(["--json"] if json else []), *([] if rehearse else ["--no-first-checkpoint"])]
        return self.typed(
            *before, sys.executable, "-m", "unisono", "train", "c.yaml", *words, *rest, env=env, json=json
        )

    def typed(self, *command: str, env: dict[str, str] | None = None, json: bool = False) -> Front:
        """Types any command on the first node, without a token; `env` and `json` as above."""
        environment = self._environment(0, {"UNISONO_TOKEN": "", **self.slurm.environment, **(env or {})})
        front = Front(
            self.slurm.networks.command(0, [*command], self.slurm.sees(0)), node=0, host=self.slurm.names[0], cwd=self.home(0),
            environment=environment, json=json,
        )  # fmt: skip
        self.fronts.append(front)
        return front

    def srun(self, *words: str, tasks: Sequence[str] = ("-N2", "--ntasks-per-node=1"), **named: Any) -> Front:
        """Types it behind `srun`."""
        return self.type(*words, before=["srun", *tasks], **named)

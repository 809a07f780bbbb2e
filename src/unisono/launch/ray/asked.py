"""What the front that was typed asks the driver for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config import RunConfig


@dataclass
class RayAsked:
    """What the front asks for.

    Attributes:
        job: a name that no other has, for folders on the nodes.
        address: of the cluster.
        config: the resolved config.
        options: for the TrainRequest of each node.
        nodes: at the most.
        least: as few will do.
        nproc: ranks on each.
        join_timeout_s: how long to wait for room, and nodes for each other.
        variables: of the environment, for all nodes.
    """

    job: str
    address: str
    config: RunConfig
    options: dict[str, Any]
    nodes: int
    least: int
    nproc: int
    join_timeout_s: float
    variables: dict[str, str]

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "RayAsked":
        """Reads what the front wrote."""
        return cls(**{**body, "config": RunConfig.model_validate(body["config"])})

    @property
    def output_dir(self) -> Path:
        """The run's directory here."""
        return Path(self.config.output_dir)

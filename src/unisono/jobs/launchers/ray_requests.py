"""What a front requests of the process that is connected to a Ray cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypedDict

from unisono.base.messages import ResultMessage, StartRefusedMessage
from unisono.guard.supervise.task_requests import TaskRequest
from unisono.trainer.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class _RayRequest:
    """What both requests have.

    Attributes:
        job: a unique name, for folders on the nodes.
        nodes: the largest number of nodes.
        least: the smallest sufficient number of nodes.
        nproc: ranks on each node.
        join_timeout_s: how long to wait for resources, and nodes for each other.
        variables: of the environment, for all nodes.
    """

    job: str
    address: str
    nodes: int
    least: int
    nproc: int
    join_timeout_s: float
    variables: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RayJobRequest(_RayRequest):
    """A job; `options` are for the TrainRequest of each node."""

    config: RunConfig
    options: dict[str, object]

    @property
    def output_dir(self) -> Path:
        """The run's directory on the machine of the command."""
        return Path(self.config.output_dir)


class JobOutcome(TypedDict):
    """The driver's result.

    Attributes:
        last: the final message of the head's front; None if there is none.
        lost: the verdict on the head's node, if that was lost.
        restarts: dumps of `Restart`.
        step: the last reported step.
    """

    last: ResultMessage | StartRefusedMessage | None
    lost: Mapping[str, object] | None
    restarts: list[dict[str, object]]
    step: int


class Inspection(TypedDict):
    """What `unisono doctor` printed on node 0, its exit code, the end of its stderr; all hosts."""

    lines: list[str]
    code: int
    said: list[str]
    hosts: list[str]


@dataclass(frozen=True, kw_only=True)
class InspectionRequest(_RayRequest, TaskRequest[Inspection]):
    """`unisono doctor` on the nodes.

    Attributes:
        config: its text; None: no config.
        words: arguments of `unisono`, without those about nodes; null stands for the config.
    """

    task: ClassVar = "look"
    config: str | None
    device: str
    words: list[str | None]

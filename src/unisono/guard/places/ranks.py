"""The nodes and ranks of a job, and the device of each rank: plain values of a plan."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class PlanPart(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DeviceChoice(PlanPart):
    """The device of one rank."""

    kind: Literal["cpu", "cuda"]
    index: int | None = None
    uuid: str | None = None
    name: str
    memory_bytes: int
    """Free when the plan was made."""
    bfloat16: bool
    compiles: bool = False
    """Whether Triton can be expected to compile for it."""


class NodePlace(PlanPart):
    """One node of the job."""

    node_rank: int
    host: str
    address: str
    """Its address for other nodes."""
    nproc: int
    """Ranks on this node (nproc_per_node)."""
    nproc_origin: str
    """The origin of that number."""
    shares_output: bool = True
    """Whether its output_dir is the head's."""


class RankPlace(PlanPart):
    """The place of one rank."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    device: DeviceChoice

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"rank {self.rank}, node {self.node_rank} ({self.host})"

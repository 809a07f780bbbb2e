"""The decisions of a run, made once before the start.

Pure: values in, values out; no torch, no clock, no disk.
"""

from unisono.trainer.plan.memory import estimate_memory, mean_state_bytes
from unisono.trainer.plan.mesh import Mesh
from unisono.trainer.plan.resolve import STORAGE_PACKAGES, PlanInputs, needed_packages, resolve_plan
from unisono.trainer.plan.run_plan import (
    DataSummary,
    MemoryEstimate,
    ModelFacts,
    ResumePoint,
    RunPlan,
    SequenceStream,
    SplitSummary,
    VisionFacts,
    deal,
    order_by_group,
    permutation,
    steps_for_tokens,
)

__all__ = [
    "STORAGE_PACKAGES",
    "DataSummary",
    "MemoryEstimate",
    "Mesh",
    "ModelFacts",
    "PlanInputs",
    "ResumePoint",
    "RunPlan",
    "SequenceStream",
    "SplitSummary",
    "VisionFacts",
    "deal",
    "estimate_memory",
    "mean_state_bytes",
    "needed_packages",
    "order_by_group",
    "permutation",
    "resolve_plan",
    "steps_for_tokens",
]

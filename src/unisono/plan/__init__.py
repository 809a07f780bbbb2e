"""What was decided, once, before anything starts. Pure: values in, values out; no torch, no clock, no disk."""

from unisono.plan.deal import deal
from unisono.plan.memory import estimate_memory
from unisono.plan.model import (
    DataSummary,
    DeviceChoice,
    MemoryEstimate,
    ModelFacts,
    NodePlace,
    RankPlace,
    ResumePoint,
    RunPlan,
    SplitSummary,
    Strategy,
)
from unisono.plan.order import Stream, permutation, steps_for_tokens
from unisono.plan.resolve import PlanInputs, resolve_plan

__all__ = [
    "DataSummary",
    "DeviceChoice",
    "MemoryEstimate",
    "ModelFacts",
    "NodePlace",
    "PlanInputs",
    "RankPlace",
    "ResumePoint",
    "RunPlan",
    "SplitSummary",
    "Strategy",
    "Stream",
    "deal",
    "estimate_memory",
    "permutation",
    "resolve_plan",
    "steps_for_tokens",
]

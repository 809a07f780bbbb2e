"""From what was asked and what was found to what will be done. Pure; every number a user might wonder at has its origin."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.config.digest import config_digest
from unisono.config.schema import RunConfig, Section
from unisono.errors import ConfigError
from unisono.plan.memory import estimate_memory
from unisono.plan.model import DataSummary, DeviceChoice, MemoryEstimate, ModelFacts, ResumePoint, RunPlan
from unisono.units import Duration, Warmup, show_bytes

Dtype = Literal["float32", "bfloat16", "float16"]

# Above this a forward gains nothing more, and its memory is better left to others.
_ENOUGH_TOKENS = {"cpu": 8_192, "cuda": 65_536}
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class PlanInputs:
    """All that a plan is made from."""

    config: RunConfig
    run_id: str
    output_dir: str
    host: str
    device: DeviceChoice
    threads: int
    threads_origin: str
    model: ModelFacts
    data: DataSummary
    resume: ResumePoint | None
    resume_reason: str
    ignored_variables: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)


def resolve_plan(given: PlanInputs) -> RunPlan:
    """Makes the plan of a run on one device.

    Raises:
        ConfigError: if what was asked cannot be done on this machine with these data.
    """
    config, data = given.config, given.data
    origins = dict(given.origins) | {"threads": given.threads_origin}
    dtype = _dtype(config, given.device, origins)
    micro, checkpointing, memory = _micro_batch(given, dtype, origins)
    per_epoch = data.train.sequences / config.batch.global_
    total_steps, total_sequences = _extent(config, data)
    return RunPlan(
        run_id=given.run_id,
        config=config,
        config_digest=config_digest(config),
        output_dir=given.output_dir,
        world_size=1,
        device=given.device,
        host=given.host,
        threads=given.threads,
        dtype=dtype,
        model=given.model,
        data=data,
        global_batch=config.batch.global_,
        micro_batch=micro,
        gradient_checkpointing=checkpointing,
        total_steps=total_steps,
        total_sequences=total_sequences,
        steps_per_epoch=per_epoch,
        warmup_steps=Warmup.parse(config.optim.warmup).steps(total_steps),
        eval_every=_period(config.eval.every, config, data) if data.eval else None,
        checkpoint_every=_period(config.checkpoint.every, config, data) or total_steps,
        memory=memory,
        resume=given.resume,
        resume_reason=given.resume_reason,
        ignored_variables=given.ignored_variables,
        origins=origins,
        warnings=_without_effect(config, data),
        faults=given.faults,
    )


def _extent(config: RunConfig, data: DataSummary) -> tuple[int, int]:
    """Steps and sequences of the whole run. `N epochs` ends with one short batch."""
    duration = Duration.parse(config.duration)
    if duration.unit == "epochs":
        # Rounded first: 0.7 × 10 is 7.000000000000001, which is no eighth sequence.
        sequences = math.ceil(round(duration.amount * data.train.sequences, 6))
        return -(-sequences // config.batch.global_), sequences
    steps = int(duration.amount) if duration.unit == "steps" else data.total_steps
    return steps, steps * config.batch.global_


def _period(text: str | None, config: RunConfig, data: DataSummary) -> int | None:
    """A period in steps; epochs and tokens become the nearest number of steps, at least one."""
    if text is None:
        return None
    period = Duration.parse(text)
    if period.unit == "steps":
        return int(period.amount)
    per_step = config.batch.global_
    if period.unit == "epochs":
        return max(1, round(period.amount * data.train.sequences / per_step))
    return max(1, round(period.amount / (data.train.tokens / data.train.sequences * per_step)))


def _dtype(config: RunConfig, device: DeviceChoice, origins: dict[str, str]) -> Dtype:
    asked = config.model.dtype
    if asked != "auto":
        if asked == "float16" and device.kind == "cpu":
            raise ConfigError.of(
                "float16 does not train on a CPU", where="model.dtype", why="its sums overflow and there is no loss scaling",
                fix="set model.dtype to bfloat16, float32 or auto",
            )  # fmt: skip
        return asked
    origins["dtype"] = f"auto: {device.name} {'has' if device.bfloat16 else 'has no'} bfloat16 arithmetic"
    return "bfloat16" if device.bfloat16 else "float32"


def _micro_batch(given: PlanInputs, dtype: str, origins: dict[str, str]) -> tuple[int, bool, MemoryEstimate]:
    """The micro batch, whether activations are computed again, and the memory of both."""
    config = given.config
    divisors = [n for n in range(config.batch.global_, 0, -1) if config.batch.global_ % n == 0]
    choices = divisors if config.batch.micro == "auto" else [config.batch.micro]
    wish = config.memory.gradient_checkpointing
    room = int(given.device.memory_bytes * _SHARE_OF_MEMORY)

    def need(micro: int, *, checkpointing: bool) -> MemoryEstimate:
        return estimate_memory(
            given.model, dtype=dtype, adapter_rank=config.adapter.rank if config.adapter else None,
            micro_tokens=micro * given.data.train.longest_sequence, longest_row=given.data.train.longest_row,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip

    for checkpointing in (False, True) if wish == "auto" else (bool(wish),):
        for micro in choices:
            estimate = need(micro, checkpointing=checkpointing)
            tokens = micro * given.data.train.longest_sequence
            enough = tokens > _ENOUGH_TOKENS[given.device.kind] and micro > 1 and len(choices) > 1
            if estimate.total <= room and not enough:
                if config.batch.micro == "auto":
                    origins["micro_batch"] = f"auto: {micro} × {given.data.train.longest_sequence} tokens fit"
                if wish == "auto":
                    origins["gradient_checkpointing"] = "auto: " + (
                        "needed to fit" if checkpointing else "not needed"
                    )
                return micro, checkpointing, estimate
    estimate = need(choices[-1], checkpointing=wish is not False)
    origins["memory"] = (
        f"the estimate of {show_bytes(estimate.total)} is more than {_SHARE_OF_MEMORY:.0%} of the "
        f"{show_bytes(given.device.memory_bytes)} that are free; the rehearsal of the longest batch will tell"
    )
    return choices[-1], wish is not False, estimate


def _without_effect(config: RunConfig, data: DataSummary) -> list[str]:
    """Settings that were written and do nothing in this run."""
    found = []
    if data.eval is None:
        found += [
            f"eval.{key} has no effect: there are no evaluation rows; set data.eval"
            for key in _changed(config.eval)
        ]
    if config.deterministic and config.device == "cpu":
        found.append("deterministic has no effect: runs on CPU are bit-equal anyway")
    if config.optim.kind != "muon" and "muon_lr" in _changed(config.optim):
        found.append("optim.muon_lr has no effect: optim.kind is adamw")
    return found


def _changed(section: Section) -> list[str]:
    """The keys that differ from their defaults; what was merely written out, as in config.yaml, does not count."""
    return sorted(
        name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default
    )

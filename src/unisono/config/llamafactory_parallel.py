"""The files of DeepSpeed and the keys of FSDP that a LLaMA-Factory file names, as our `parallel.strategy`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.config.llamafactory_keys import Values
from unisono.errors import Problem

_STAGES = {0: "ddp", 1: "fsdp", 2: "fsdp", 3: "fsdp"}
_SAYS = {
    0: "as with stage 0, each rank has the whole model",
    1: "stage 1 shards the optimizer's state; fsdp shards weights and gradients, too",
    2: "stage 2 shards gradients and the optimizer's state; fsdp shards weights, too",
    3: "as with stage 3, each rank has a part of every tensor; bucket sizes and prefetching are our own",
}
_OFFLOAD = "weights and optimizer state stay on the device; use more ranks, a LoRA adapter or `memory.gradient_checkpointing`"
_NO_JSON = "it is not a mapping"


class _Refused(ValueError):  # noqa: N818 - named for what happened
    """A setting that is not available: why, and what to use instead."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.why, self.fix = why, fix


def read_strategy(
    values: Values,
) -> tuple[str | None, tuple[str, ...], list[str], list[Problem]]:
    """Our strategy (None: ours decides), the keys that ask for it, lines on what differs, and problems.

    Args:
        values: of the file, by key.
    """
    for key, read in (("deepspeed", _read_deepspeed), ("fsdp", _read_fsdp)):
        if not values[key]:
            continue
        try:
            strategy, line = read(values)
        except _Refused as refused:
            return None, (key,), [], [Problem(str(refused), values.place(key), refused.why, refused.fix)]
        return strategy, (key,), [f"{key}: {line}; with one rank the strategy is `single`"], []
    return None, (), [], []


def _read_deepspeed(values: Values) -> tuple[str, str]:
    config = _mapping(values["deepspeed"], "deepspeed")
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if not isinstance(stage, int) or stage not in _STAGES:
        raise _Refused(f"deepspeed: stage {stage!r} is unknown", "", "use stage 0, 2 or 3")
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none") if isinstance(zero.get(part), dict) else "none"
        if device != "none":
            raise _Refused(f"deepspeed: `{part}` to {device} is not available", _OFFLOAD, "remove it")
    for part in ("optimizer", "scheduler"):
        if part in config:
            raise _Refused(
                f"deepspeed: its own `{part}` is not read",
                "",
                f"remove it; the keys of the file set the {part}",
            )
    _refuse_disagreement(config, values)
    return _STAGES[stage], f"parallel.strategy is {_STAGES[stage]}: {_SAYS[stage]}"


def _refuse_disagreement(config: Mapping[str, Any], values: Values) -> None:
    """Numbers in a DeepSpeed file must be those of the YAML file, as transformers demands it, too."""
    pairs = (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    )
    for name, key in pairs:
        number = config.get(name, "auto")
        if number != "auto" and number != values[key]:
            raise _Refused(
                f"deepspeed: `{name}` is {number}, and {key} is {values[key]:g}", "", f"set `{name}` to auto"
            )


def _read_fsdp(values: Values) -> tuple[str, str]:
    asked = values["fsdp"]
    words = (
        asked.replace(",", " ").split()
        if isinstance(asked, str)
        else asked
        if isinstance(asked, list)
        else []
    )
    config = _mapping(values["fsdp_config"], "fsdp_config") if values["fsdp_config"] else {}
    if "offload" in words:
        raise _Refused("fsdp: offloading is not available", _OFFLOAD, "remove it")
    if any(config.get(key) for key in ("offload_params", "fsdp_offload_params", "cpu_offload")):
        raise _Refused("fsdp_config: offloading is not available", _OFFLOAD, "remove it")
    if "no_shard" in words:
        return "ddp", "parallel.strategy is ddp: as with no_shard, each rank has the whole model"
    partly = next(
        (word for word in words if word in ("shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")), None
    )
    if partly:
        return "fsdp", f"parallel.strategy is fsdp: it shards every tensor over all ranks, {partly} less"
    return (
        "fsdp",
        "parallel.strategy is fsdp: each rank has a part of every tensor; layers are wrapped by our own rule",
    )


def _mapping(value: Any, key: str) -> dict[str, Any]:
    """The mapping itself, or that in the JSON file of this name."""
    if isinstance(value, str):
        try:
            value = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            why = error.strerror or "it cannot be read"
            raise _Refused(
                f"{key}: {value} cannot be read", why, "paths are relative to the working directory"
            ) from None
        except ValueError as error:
            raise _Refused(f"{key}: {value} is not JSON", str(error), "fix the file") from None
    if not isinstance(value, dict):
        raise _Refused(f"{key}: {_NO_JSON}", "", "give a JSON file or a mapping")
    return value

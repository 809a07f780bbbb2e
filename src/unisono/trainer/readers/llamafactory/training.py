"""Objective, optimizer, duration, evaluation, checkpoints and machine of a LLaMA-Factory file, in
our config.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from unisono.base.errors import Problem
from unisono.base.files import SETTINGS_BYTES, expand, parse_json, read_given
from unisono.trainer.config.optimizers import OPTIMIZERS, optimizer_of_transformers
from unisono.trainer.config.schedules import SCHEDULES, from_transformers
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import keys_of
from unisono.trainer.readers.key_table import Draft, Values
from unisono.trainer.readers.llamafactory.keys import KEYS, PREFERENCE_STAGES


def fill_training(draft: Draft) -> None:
    """All sections but those of the model and the data."""
    _objective(draft)
    fill_trainer(draft)


def fill_trainer(draft: Draft) -> None:
    """What Hugging Face's TrainingArguments say, of any tool that has them."""
    _optim(draft)
    _extent(draft)
    _evaluation(draft)
    _checkpoint(draft)
    _machine(draft)


def _objective(draft: Draft) -> None:
    """The objective of the stage, and those of the keys `pref_*`, `dpo_*`, `kto_*`, `simpo_*` and
    `ref_*` that it uses.
    """
    values = draft.values
    stage, loss = values["stage"], values["pref_loss"]
    if stage == "ppo":
        draft.refuse("stage", "PPO is not supported", "use sft, dpo or kto, or rm for a reward model")
    if stage == "dpo" and loss == "kto_pair":
        draft.refuse(
            "pref_loss",
            "LLaMA-Factory 0.9.5 has no such loss either",
            "use sigmoid, or stage: kto for ratings",
        )
    is_loss = stage == "dpo" and loss in ("sigmoid", "hinge", "ipo", "kto_pair")
    objective = "dpo" if is_loss else loss if stage == "dpo" else _OBJECTIVES[stage]
    draft.put("objective", objective, *(("pref_loss",) if objective in ("orpo", "simpo") else ()), "stage")
    used = keys_of(objective)
    if is_loss:
        draft.put("preference.loss", "sigmoid" if loss == "kto_pair" else loss, "pref_loss")
    elif stage != "dpo":
        draft.ignore("pref_loss", f"stage {stage} has its own loss")
    if "beta" in used:
        draft.put("preference.beta", values["pref_beta"], "pref_beta")
    for key in _PREFERENCE:
        ours = KEYS[key].ours
        if ours.partition(".")[2] not in used:
            draft.ignore(key, f"objective {objective} does not use it")
        elif key != "pref_beta":
            draft.put_if_set(ours, key)
    _refuse_of_preferences(draft, objective)
    if objective == "orpo":
        draft.warnings.append(
            "pref_loss: orpo: the cross-entropy covers all tokens of the chosen row, as in TRL; in"
            " LLaMA-Factory it covers its answer only"
        )


def _refuse_of_preferences(draft: Draft, objective: str) -> None:
    """Refuses keys that change the loss or the reference in a way that is not supported."""
    values = draft.values
    has_reference = "reference" in keys_of(objective)
    if objective == "dpo" and values["pref_bco_weight"] > 1e-6:
        draft.refuse("pref_bco_weight", "the loss has no classifier term", "remove it")
    if values["stage"] == "dpo" and values["ld_alpha"] is not None:
        draft.refuse("ld_alpha", "all tokens of an answer count alike", "remove it")
    if has_reference and values["ref_model"] is not None:
        if values["ref_model_adapters"] is not None:
            fix = "merge it with `unisono export ADAPTER OUT --merge`, and set ref_model to OUT"
            draft.refuse("ref_model_adapters", "the reference is a separate model", fix)
        if values["ref_model_quantization_bit"] is not None:
            draft.refuse("ref_model_quantization_bit", "a reference is loaded as its files are", "remove it")


def _optim(draft: Draft) -> None:
    values = draft.values
    if values["use_muon"]:
        draft.put("optim.kind", "muon", "use_muon")
        draft.put("optim.muon_lr", values["learning_rate"], "learning_rate")
        draft.put("optim.muon_scale", "adamw", "use_muon")
    else:
        put_optimizer(draft, values["optim"], "optim", shards=_shards(values))
    draft.put("optim.lr", values["learning_rate"], "learning_rate")
    draft.put("optim.weight_decay", values["weight_decay"], "weight_decay")
    draft.put("optim.betas", [values["adam_beta1"], values["adam_beta2"]], "adam_beta1", "adam_beta2")
    draft.put("optim.eps", values["adam_epsilon"], "adam_epsilon")
    draft.put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")
    _loss_of_tokens(draft)
    _router_loss(draft)
    _schedule(draft)


def put_optimizer(draft: Draft, name: str, key: str, *, shards: bool) -> None:
    """Sets `optim.kind` to that of a name of transformers' `optim`.

    Args:
        draft: of a file that has transformers' arguments.
        name: the name.
        key: of the file.
        shards: whether the file asks for sharded weights.
    """
    ours = optimizer_of_transformers(name)
    if ours is None:
        choice = ", ".join(theirs for kind in OPTIMIZERS.values() for theirs in kind.transformers)
        draft.refuse(key, "there is no such optimizer here", f"use one of {choice}")
    elif shards and ours in ("adamw_8bit", "adamw_8bit_paged"):
        draft.put("optim.kind", "adamw", key)
        draft.put("optim.state_dtype", "bfloat16", key)
        draft.warnings.append(
            f"{key}: {name}: the state is AdamW's in bfloat16, with 16 bits instead of 8, since weights are"
            " sharded"
        )
    else:
        draft.put("optim.kind", ours, key)


def _shards(values: Values) -> bool:
    strategy, _, _, problems = read_strategy(values)
    return strategy in _SHARDING and not problems


def _loss_of_tokens(draft: Draft) -> None:
    values = draft.values
    stage = values["stage"]
    is_weighted = values["use_dft_loss"] and stage == "sft"
    if is_weighted:
        draft.put("optim.loss_weight", "dft", "use_dft_loss")
    elif values["use_dft_loss"]:
        draft.ignore("use_dft_loss", f"no effect with stage: {stage}")
    if is_weighted or stage in PREFERENCE_STAGES:
        why = "use_dft_loss" if is_weighted else f"stage: {stage}"
        draft.ignore("label_smoothing_factor", f"no effect with {why}")
    else:
        draft.put_if_set("optim.label_smoothing", "label_smoothing_factor")


def _router_loss(draft: Draft) -> None:
    """The load balancing loss of transformers; LLaMA-Factory has it where the model itself computes
    the loss.
    """
    values, key = draft.values, "moe_aux_loss_coef"
    others = [name for name in ("use_dft_loss", "label_smoothing_factor") if values[name]]
    if values["stage"] in PREFERENCE_STAGES:
        others.append(f"stage: {values['stage']}")
    if others or not values[key]:
        draft.ignore(key, f"no effect with {others[0]}" if others else "0: no loss")
        return
    draft.put("optim.router_loss", {"load_balancing": values[key], "layers": "together"}, key)
    draft.warnings.append(
        f"{key}: the loss is averaged over the global batch; LLaMA-Factory adds the loss of each micro batch"
        " of each rank in full, so it has N times the weight with N micro batches in a step"
    )


def _schedule(draft: Draft) -> None:
    values = draft.values
    name = values["lr_scheduler_type"]
    schedule = from_transformers(name)
    if schedule is None:
        choice = ", ".join(theirs for ours in SCHEDULES.values() for theirs in ours.transformers)
        draft.refuse("lr_scheduler_type", "there is no such schedule here", f"use one of {choice}")
    ours, arguments = schedule or ("linear", {})
    draft.put("optim.schedule", ours, "lr_scheduler_type")
    draft.put("optim.schedule_start", 0)
    warmup = values["warmup_steps"] if values["warmup_ratio"] is None else values["warmup_ratio"]
    if name == "constant":
        warmup = 0
        for key in ("warmup_steps", "warmup_ratio"):
            draft.ignore(key, "no effect with lr_scheduler_type: constant; constant_with_warmup has one")
    text = f"{int(warmup)} steps" if warmup >= 1 or warmup == 0 else f"{_plain(warmup * 100)}%"
    draft.put("optim.warmup", text, "warmup_ratio", "warmup_steps")
    _schedule_kwargs(draft, name, arguments)


def _schedule_kwargs(draft: Draft, name: str, arguments: Mapping[str, str]) -> None:
    given = draft.values["lr_scheduler_kwargs"] or {}
    lr = draft.values["learning_rate"]
    if "lr_end" in arguments:
        given = {"lr_end": 1e-7, **given}  # transformers' default
    if "min_lr_rate" in arguments and not given:
        draft.refuse("lr_scheduler_type", "it needs its end", "add lr_scheduler_kwargs: {min_lr_rate: 0.1}")
    for key, value in given.items():
        if key not in arguments or not isinstance(value, int | float):
            choice = f"{name} has {', '.join(arguments)}" if arguments else f"{name} has none"
            draft.refuse("lr_scheduler_kwargs", f"`{key}` is not known; {choice}", "remove it")
            continue
        is_rate = key in ("lr_end", "min_lr")  # ours are shares
        factor = (1 / lr if lr else 0) if is_rate else 1
        ours = f"optim.{arguments[key]}"
        draft.put(ours, value if factor == 1 else value * factor, "lr_scheduler_kwargs", "lr_scheduler_type")


def _extent(draft: Draft) -> None:
    values = draft.values
    steps, epochs = values["max_steps"], values["num_train_epochs"]
    if steps > 0:
        draft.put("duration", f"{steps} steps", "max_steps")
        draft.ignore("num_train_epochs", "max_steps takes precedence")
    else:
        draft.put("duration", f"{_plain(epochs)} epochs", "num_train_epochs")
        draft.ignore("max_steps", "0 and below: num_train_epochs decides")
    each, times = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    draft.put("batch.per_rank", each, "per_device_train_batch_size")
    draft.put("batch.accumulate", times, "gradient_accumulation_steps")


def _period(draft: Draft, amount: float, strategy: str) -> str:
    """`500 steps`, `1 epochs`, or below 1 a share of the run."""
    if strategy == "epoch":
        return "1 epochs"
    if amount >= 1:
        return f"{int(amount)} steps"
    values = draft.values
    if values["max_steps"] > 0:
        return f"{max(1, math.ceil(values['max_steps'] * amount))} steps"
    return f"{_plain(values['num_train_epochs'] * amount)} epochs"


def _evaluation(draft: Draft) -> None:
    values = draft.values
    strategy = values["eval_strategy"]
    every = None
    if strategy != "no":
        amount = values["eval_steps"] or values["logging_steps"]
        every = _period(draft, amount, strategy)
    if values["eval_dataset"] or values["val_size"] or every:
        first = "eval_steps" if strategy == "steps" else "eval_strategy"
        draft.put("eval.every", every, first, "eval_strategy")
    if values["early_stopping_steps"] is not None:
        draft.put("eval.stop_after", values["early_stopping_steps"], "early_stopping_steps")
    _best(draft)


def _best(draft: Draft) -> None:
    """The metric of the best checkpoint; LLaMA-Factory names the reward accuracy by stage."""
    values = draft.values
    metric = (values["metric_for_best_model"] or "loss").removeprefix("eval_")
    accuracies = {"dpo": "rewards/accuracies"}
    is_accuracy = metric == accuracies.get(values["stage"])
    if metric != "loss" and not is_accuracy:
        alternative = f" or eval_{accuracies[values['stage']]}" if values["stage"] in accuracies else ""
        draft.refuse(
            "metric_for_best_model",
            f"the evaluation has eval_loss{alternative}",
            f"use eval_loss{alternative}, or remove it",
        )
    greater = values["greater_is_better"]
    if greater is not None and greater != is_accuracy:
        which = "larger accuracy" if is_accuracy else "smaller eval_loss"
        draft.refuse("greater_is_better", f"a {which} is better", "remove it")
    if values["load_best_model_at_end"] or values["save_strategy"] == "best":
        ours = "reward_accuracy" if is_accuracy else "eval_loss"
        draft.put("checkpoint.best", ours, "metric_for_best_model", "load_best_model_at_end", "save_strategy")


def _checkpoint(draft: Draft) -> None:
    values = draft.values
    strategy = values["save_strategy"]
    if strategy == "no":
        every = draft.config["duration"]
    elif strategy == "best":
        every = draft.config.get("eval", {}).get("every") or draft.config["duration"]
    else:
        every = _period(draft, values["save_steps"], strategy)
    draft.put(
        "checkpoint.every",
        every,
        "save_steps" if strategy == "steps" else "save_strategy",
        "save_strategy",
    )
    limit = values["save_total_limit"]
    if limit is not None and limit > 0:
        draft.put("checkpoint.keep", limit, "save_total_limit")
    elif strategy != "no":
        draft.put("checkpoint.keep_every", every, "save_total_limit")


def _machine(draft: Draft) -> None:
    values = draft.values
    strategy, keys, differences, problems = read_strategy(values)
    draft.problems += problems
    if problems:
        draft.fates |= dict.fromkeys((*keys, "fsdp_config"), ("refused", problems[0].what))
    draft.warnings += differences
    if strategy is not None:
        draft.put("parallel.strategy", strategy, *keys)
    elif keys:
        draft.put("parallel.strategy", "auto", *keys)
    recompute = not values["disable_gradient_checkpointing"] or values["gradient_checkpointing"]
    draft.put(
        "memory.gradient_checkpointing",
        recompute,
        "disable_gradient_checkpointing",
        "gradient_checkpointing",
    )
    if values["use_cpu"]:
        draft.put("device", "cpu", "use_cpu")
    draft.put_if_set("deterministic", "full_determinism")
    draft.put("seed", values["seed"], "seed")
    if values["data_seed"] not in (None, values["seed"]):
        draft.refuse(
            "data_seed", "one seed determines the order and everything else", "set seed, and remove data_seed"
        )
    _trackers(draft)
    if values["output_dir"] is None and draft.verb in ("train", "predict"):
        problem = Problem("the key `output_dir` is missing", draft.name, "it has no default", "add it")
        draft.problems.append(problem)
    draft.put("output_dir", values["output_dir"] or "?", "output_dir")


def _trackers(draft: Draft) -> None:
    values = draft.values
    named = values["report_to"] if isinstance(values["report_to"], list) else []
    track = [name for name in named if name != "none"]
    if values["use_swanlab"] and "swanlab" not in track:
        track.append("swanlab")
    unknown = [name for name in track if name not in _TRACKERS]
    if unknown:
        key = "report_to" if values.is_set("report_to") else "use_swanlab"
        draft.refuse(key, f"there is no tracker {unknown[0]} here", f"use none or {', '.join(_TRACKERS)}")
    elif track:
        draft.put("track", track, "report_to", "use_swanlab")


_OBJECTIVES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "ppo": "sft", "kto": "kto"}
_PREFERENCE = (
    "pref_beta", "pref_ftx", "dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight",
    "simpo_gamma", "ref_model",
)  # fmt: skip
"""The keys of LLaMA-Factory's preference stages that are carried."""
_TRACKERS = get_args(get_args(RunConfig.model_fields["track"].annotation)[0])


def _plain(number: float) -> str:
    """Without an exponent and without what floats add: 0.1 × 100 is `10`."""
    return f"{round(number, 9):.9f}".rstrip("0").rstrip(".")


_SHARDING = {"fsdp"}
"""Strategies with which weights are sharded."""
_STAGES = {0: "ddp", 1: "fsdp", 2: "fsdp", 3: "fsdp"}
_SAYS = {
    0: "as with stage 0, each rank has the whole model",
    1: "stage 1 shards the optimizer's state; fsdp shards weights and gradients, too",
    2: "stage 2 shards gradients and the optimizer's state; fsdp shards weights, too",
    3: "as with stage 3, each rank has a part of every tensor; bucket sizes and prefetching are our own",
}
_OFFLOAD = (
    "weights and optimizer state stay on the device; use more ranks, a LoRA adapter or"
    " `memory.gradient_checkpointing`"
)
_NO_JSON = "it is not a mapping"


class _Refused(ValueError):  # noqa: N818 - named for what happened
    """A setting that is not available: why, and what to use instead."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.why, self.fix = why, fix


def read_strategy(
    values: Values,
) -> tuple[str | None, tuple[str, ...], list[str], list[Problem]]:
    """Our strategy (None: ours decides), the keys that ask for it, lines on what differs, and
    problems.

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


def _object_in(config: Mapping[str, object], name: str) -> dict[str, object]:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise _Refused(
            f"deepspeed: `{name}` is not an object", "", f"set `{name}` to an object, or remove it"
        )
    return value or {}


def _read_deepspeed(values: Values) -> tuple[str, str]:
    config = _mapping(values["deepspeed"], "deepspeed")
    zero = _object_in(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or stage not in _STAGES:
        raise _Refused(f"deepspeed: stage {stage!r} is unknown", "", "use stage 0, 2 or 3")
    for part in ("offload_optimizer", "offload_param"):
        device = _object_in(zero, part).get("device", "none")
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
    """Numbers in a DeepSpeed file must be those of the YAML file, as transformers demands it,
    too.
    """
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
    value = values["fsdp"]
    words = (
        value.replace(",", " ").split()
        if isinstance(value, str)
        else value
        if isinstance(value, list)
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


def _mapping(value: Any, key: str) -> dict[str, object]:
    """The mapping itself, or that in the JSON file of this name."""
    if isinstance(value, str):
        text = read_given(expand(value), value, most_bytes=SETTINGS_BYTES)
        if not isinstance(text, str):
            fault, _ = text
            raise _Refused(f"{key}: {fault.what}", fault.why, fault.fix)
        try:
            value = parse_json(text)
        except ValueError as error:
            raise _Refused(f"{key}: {value} is not JSON", str(error), "fix the file") from None
    if not isinstance(value, dict):
        raise _Refused(f"{key}: {_NO_JSON}", "", "set it to a JSON file or a mapping")
    return value

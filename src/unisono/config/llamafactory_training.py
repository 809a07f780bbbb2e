"""Optimizer, duration, evaluation, checkpoints and machine of a LLaMA-Factory file, in our config."""

import math
from typing import get_args

from unisono.config.llamafactory_draft import Draft
from unisono.config.llamafactory_parallel import read_strategy
from unisono.config.schema import RunConfig
from unisono.errors import Problem


def fill_training(draft: Draft) -> None:
    """All sections but those of the model and the data."""
    _optim(draft)
    _extent(draft)
    _evaluation(draft)
    _checkpoint(draft)
    _machine(draft)


def _optim(draft: Draft) -> None:
    values = draft.values
    draft.put("optim.kind", "muon" if values["use_muon"] else "adamw", "use_muon")
    if values["use_muon"]:
        draft.put("optim.muon_lr", values["learning_rate"], "learning_rate")
        draft.put("optim.muon_scale", "adamw", "use_muon")
    name = values["optim"]
    if name not in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        draft.refuse("optim", "AdamW and Muon are the optimizers here", "use adamw_torch, or use_muon: true")
    draft.put("optim.lr", values["learning_rate"], "learning_rate")
    draft.put("optim.weight_decay", values["weight_decay"], "weight_decay")
    draft.put("optim.betas", [values["adam_beta1"], values["adam_beta2"]], "adam_beta1", "adam_beta2")
    draft.put("optim.eps", values["adam_epsilon"], "adam_epsilon")
    draft.put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")
    draft.put_if_set("optim.label_smoothing", "label_smoothing_factor")
    _schedule(draft)


def _schedule(draft: Draft) -> None:
    values = draft.values
    name = values["lr_scheduler_type"]
    ours = _SCHEDULES.get(name)
    if ours is None:
        draft.refuse(
            "lr_scheduler_type", "there is no such schedule here", f"use one of {', '.join(_SCHEDULES)}"
        )
        ours = "linear"
    draft.put("optim.schedule", ours, "lr_scheduler_type")
    draft.put("optim.schedule_start", 0)
    warmup = values["warmup_steps"] if values["warmup_ratio"] is None else values["warmup_ratio"]
    if name == "constant":
        warmup = 0
        for key in ("warmup_steps", "warmup_ratio"):
            draft.ignore(key, "no effect with lr_scheduler_type: constant; constant_with_warmup has one")
    text = f"{int(warmup)} steps" if warmup >= 1 or warmup == 0 else f"{_plain(warmup * 100)}%"
    draft.put("optim.warmup", text, "warmup_ratio", "warmup_steps")
    _schedule_kwargs(draft, name)


def _schedule_kwargs(draft: Draft, name: str) -> None:
    given = draft.values["lr_scheduler_kwargs"] or {}
    lr = draft.values["learning_rate"]
    known = {
        "cosine_with_restarts": {"num_cycles": ("optim.cycles", 1)},
        "polynomial": {"power": ("optim.power", 1), "lr_end": ("optim.min_lr", 1 / lr if lr else 0)},
        "cosine_with_min_lr": {
            "min_lr": ("optim.min_lr", 1 / lr if lr else 0),
            "min_lr_rate": ("optim.min_lr", 1),
        },
    }.get(name, {})
    if name == "polynomial":
        given = {"lr_end": 1e-7, **given}  # transformers' default
    if name == "cosine_with_min_lr" and not given:
        draft.refuse("lr_scheduler_type", "it needs its end", "add lr_scheduler_kwargs: {min_lr_rate: 0.1}")
    for key, value in given.items():
        if key not in known or not isinstance(value, int | float):
            choice = f"it takes {', '.join(known)}" if known else f"{name} takes none"
            draft.refuse("lr_scheduler_kwargs", f"`{key}` is not known; {choice}", "remove it")
            continue
        ours, factor = known[key]
        draft.put(ours, value if factor == 1 else value * factor, "lr_scheduler_kwargs", "lr_scheduler_type")


def _extent(draft: Draft) -> None:
    values = draft.values
    steps, epochs = values["max_steps"], values["num_train_epochs"]
    if steps > 0:
        draft.put("duration", f"{steps} steps", "max_steps")
        draft.ignore("num_train_epochs", "max_steps wins")
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
    metric = values["metric_for_best_model"]
    if metric not in (None, "loss", "eval_loss"):
        draft.refuse("metric_for_best_model", "the evaluation has eval_loss", "use eval_loss, or remove it")


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
    if values["load_best_model_at_end"] or strategy == "best":
        draft.put("checkpoint.best", "eval_loss", "load_best_model_at_end", "save_strategy")


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
        draft.refuse("data_seed", "one seed decides the order and all else", "set seed, and remove data_seed")
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


_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine_with_restarts", "polynomial": "polynomial", "cosine_with_min_lr": "cosine",
}  # fmt: skip
_TRACKERS = get_args(get_args(RunConfig.model_fields["track"].annotation)[0])


def _plain(number: float) -> str:
    """Without an exponent and without what floats add: 0.1 × 100 is `10`."""
    return f"{round(number, 9):.9f}".rstrip("0").rstrip(".")

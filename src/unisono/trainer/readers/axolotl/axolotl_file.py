"""From a file of axolotl to our config: which of its keys say what, and the fate of each.

`keys.toml` has all of its keys, with the same fates as those of LLaMA-Factory.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

from unisono.base.errors import Problem
from unisono.base.files import read_object
from unisono.trainer.config.optimizers import OPTIMIZERS, optimizer_of_transformers
from unisono.trainer.config.problems import find_secrets
from unisono.trainer.config.schedules import SCHEDULES, from_transformers
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.translation import Translation
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces
from unisono.trainer.readers.axolotl.axolotl_keys import KEYS, PAGE, TOOL
from unisono.trainer.readers.axolotl.datasets import read_sources
from unisono.trainer.readers.key_table import Draft, Values
from unisono.trainer.readers.overrides import with_overrides
from unisono.trainer.readers.reading import Reading, with_effect

_MARKS = {
    *("datasets", "pretraining_dataset", "test_datasets", "dataset_prepared_path", "sequence_len"),
    *("micro_batch_size", "num_epochs", "sample_packing", "val_set_size", "train_on_inputs", "model_type"),
    *("tokenizer_type", "rl", "lora_r", "wandb_project", "special_tokens", "adapter"),
}
_KERNELS = ("cut_cross_entropy", "liger", "kernels", "swanlab")
"""Integrations that change only time, memory or what is logged."""
_OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
_OPTIMIZERS = {"muon": "muon", "adamw_torch_8bit": "adamw_8bit", "lion_pytorch": "lion", "prodigy": "prodigy"}
"""Names that only axolotl has, or that another library has here."""
_ZERO = re.compile(r"zero([123])[^/]*\.json$")
_TRACKERS = get_args(get_args(RunConfig.model_fields["track"].annotation)[0])


class AxolotlFile(Translation):
    """A file of axolotl in our terms; it is always for training."""

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once."""
        del variables
        line = (
            f"{self.name} is an axolotl file: {self.count('carried')} keys carried,"
            f" {self.count('translated')} translated; `unisono init --from-axolotl {self.name}` shows our"
            " config and what happens to each key"
        )
        return [line, *self.ignored(), *self.warnings]


def recognizes(raw: Mapping[str, object], path: Path) -> bool:
    """Whether a mapping is a file of axolotl."""
    del path
    return "base_model" in raw and bool(_MARKS & set(raw)) and not {"data", "model"} & set(raw)


def to_config(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> AxolotlFile:
    """The file in our terms; its `problems` are not raised."""
    name = str(path)
    places = KeyPlaces(dict(lines), name)
    raw, ours, problems = with_overrides(raw, overrides, places, keys=KEYS)
    secrets = find_secrets({key: raw[key] for key in raw if key not in ("special_tokens", "tokens")}, places)
    unknown = ("it is not a key of axolotl", PAGE)
    reading = Reading(places, name, keys=KEYS, tool=TOOL, unknown=unknown)
    for key, value in raw.items():
        is_hidden = any(place[0] == key for place in secrets)
        reading.read(key, "…" if is_hidden else value, is_secret=is_hidden)
    values = Values(reading.values, reading.places, name, KEYS)
    draft = Draft(values, name, verb="train", tool=TOOL)
    for fill in (_model, _data, _objective, _adapter, _optim, _extent, _periods, _machine, _rest):
        fill(draft)
    return AxolotlFile(
        name=name,
        values=values,
        keys=[with_effect(fate, values, "train", draft.fates) for fate in reading.fates],
        config=draft.config,
        origins=draft.origins,
        names=draft.names,
        places=reading.places,
        warnings=draft.warnings,
        problems=[*problems, *secrets.values(), *reading.problems, *draft.problems],
        our_overrides=ours,
    )


def _model(draft: Draft) -> None:
    values = draft.values
    draft.put("model.path", values["base_model"] or "?", "base_model")
    draft.put_if_set("model.revision", "revision_of_model")
    draft.put_if_set("model.tokenizer", "tokenizer_config")
    draft.put_if_set("model.trust_remote_code", "trust_remote_code")
    draft.put_if_set("model.embedding_noise", "neftune_noise_alpha")
    half = True if values["bfloat16"] else values["bf16"]
    is_float16 = values["fp16"] or values["float16"]
    if half not in (True, False, "auto", "full", None):
        draft.refuse("bf16", "it is true, false or auto", "set it to one of these")
    if values["float32"] or (half in (False, None) and not is_float16):
        draft.put("model.dtype", "float32", "float32", "bf16")
    elif half in (True, "full"):
        draft.put("model.dtype", "bfloat16", "bf16", "bfloat16")
    else:
        draft.put("model.dtype", "auto", "bf16", "fp16", "float16")
    if is_float16:
        draft.warnings.append(
            "fp16: float16 needs loss scaling, which is not supported; bfloat16 is used where the device has it"
        )
    _special_tokens(draft)


def _special_tokens(draft: Draft) -> None:
    """The tokenizer's own are used: those of a local model are compared."""
    tokens = draft.values["special_tokens"]
    if not tokens:
        return
    if not isinstance(tokens, Mapping):
        draft.refuse("special_tokens", "it is a mapping of names to tokens", "write {pad_token: …}")
        return
    given = {name: token for name, token in tokens.items() if name != "pad_token" and token is not None}
    stored = _stored_tokens(Path(str(draft.values["base_model"])))
    odd = [name for name, token in given.items() if stored and stored.get(name) != token]
    if "additional_special_tokens" in given or odd:
        draft.refuse(
            "special_tokens",
            "the tokenizer has others",
            "set them in a copy of the tokenizer, and give its directory in tokenizer_config",
        )
    elif given and not stored:
        draft.warnings.append(
            f"special_tokens: {', '.join(given)} must be the tokenizer's, which is used unchanged"
        )


def _stored_tokens(directory: Path) -> dict[str, object]:
    try:
        stored = read_object(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        return {}
    if not stored:
        return {}
    texts = {name: stored.get(name) for name in ("bos_token", "eos_token", "unk_token")}
    return {name: value.get("content") if isinstance(value, dict) else value for name, value in texts.items()}


def _data(draft: Draft) -> None:
    values = draft.values
    is_pretraining = values["pretraining_dataset"] is not None
    key = "pretraining_dataset" if is_pretraining else "datasets"
    if values[key] is None:
        problem = Problem("the key `datasets` is missing", draft.name, "it has no default", "add it")
        draft.problems.append(problem)
    else:
        train = read_sources(values[key], key, values.place(key), has_pairs=_has_pairs(values))
        draft.problems += train.problems
        draft.put("data.train", train.entries or "?", key)
        is_pretraining = is_pretraining or train.are_texts
    if values["test_datasets"]:
        place = values.place("test_datasets")
        tests = read_sources(values["test_datasets"], "test_datasets", place, has_pairs=_has_pairs(values))
        draft.problems += tests.problems
        draft.put("data.eval", tests.entries or "?", "test_datasets")
    elif values["val_set_size"]:
        size = values["val_set_size"]
        draft.put("data.eval", int(size) if size >= 1 else size, "val_set_size")
    draft.put("data.max_length", values["sequence_len"], "sequence_len")
    draft.put("data.too_long", _too_long(draft, is_pretraining=is_pretraining), "excess_length_strategy")
    draft.put("data.packing", bool(values["sample_packing"]), "sample_packing")
    if values["train_on_inputs"]:
        draft.put("data.loss_on", "all", "train_on_inputs")
    _template(draft)


def _has_pairs(values: Values) -> bool:
    return values["rl"] is not None or bool(values["reward_model"])


def _too_long(draft: Draft, *, is_pretraining: bool) -> str:
    strategy = draft.values["excess_length_strategy"] or "drop"
    choice = {"drop": "drop", "truncate": "cut", "raise": "error"}
    if strategy not in choice:
        draft.refuse("excess_length_strategy", "there is no such strategy", f"use {', '.join(choice)}")
    return "split" if is_pretraining else choice.get(strategy, "drop")


def _template(draft: Draft) -> None:
    values = draft.values
    name, text = values["chat_template"], values["chat_template_jinja"]
    if text is not None and ("{" in text or "\n" in text):
        draft.refuse(
            "chat_template_jinja", "data.template is a file", "write the text to a file, and give its path"
        )
    elif text is not None:
        draft.put("data.template", text, "chat_template_jinja")
    elif name == "jinja":
        draft.refuse("chat_template", "there is no chat_template_jinja", "add it, with the path of a file")
    elif name == "chatml":
        draft.put("data.template", "lf:chatml", "chat_template")
    elif name is not None and not name.startswith("tokenizer_default"):
        draft.warnings.append(
            f"chat_template: {name}: the tokenizer's own template is used; axolotl has its own copy of it, which"
            " data.template can give as a file"
        )


def _objective(draft: Draft) -> None:
    values = draft.values
    if values["pretraining_dataset"] is not None:
        draft.put("objective", "pretrain", "pretraining_dataset")
        return
    if values["reward_model"]:
        draft.put("objective", "reward", "reward_model")
        return
    kind = values["rl"]
    if kind is None:
        return
    if kind not in _OBJECTIVES:
        fix = f"use one of {', '.join(_OBJECTIVES)}, or write objective: grpo with rewards (docs/how-to/grpo.md)"
        draft.refuse("rl", "it is not available for such a file", fix)
        return
    draft.put("objective", _OBJECTIVES[kind], "rl")
    _preference(draft, kind)


def _preference(draft: Draft, kind: str) -> None:
    values = draft.values
    if kind == "ipo":
        draft.put("preference.loss", "ipo", "rl")
    losses = values["dpo_loss_type"]
    if losses and kind == "dpo":
        if losses in (["sigmoid"], ["hinge"], ["ipo"]):
            draft.put("preference.loss", losses[0], "dpo_loss_type")
        else:
            draft.refuse("dpo_loss_type", "the losses are sigmoid, hinge and ipo", "use one of these")
    beta = "orpo_alpha" if kind == "orpo" and values["orpo_alpha"] is not None else "rl_beta"
    draft.put("preference.beta", 0.1 if values[beta] is None else values[beta], beta)
    for ours, theirs, kinds in (
        ("label_smoothing", "dpo_label_smoothing", ("dpo",)),
        ("desirable_weight", "kto_desirable_weight", ("kto",)),
        ("undesirable_weight", "kto_undesirable_weight", ("kto",)),
        ("gamma", "simpo_gamma", ("simpo",)),
    ):
        if kind in kinds:
            draft.put_if_set(f"preference.{ours}", theirs)
    if values["sample_packing"]:
        draft.put("data.packing", False, "sample_packing")


def _adapter(draft: Draft) -> None:
    values = draft.values
    kind = values["adapter"]
    bits = 4 if values["load_in_4bit"] or (kind == "qlora" and not values["load_in_8bit"]) else 8
    is_quantized = values["load_in_4bit"] or values["load_in_8bit"] or kind == "qlora"
    if kind is None:
        draft.put("adapter", None, "adapter")
        if is_quantized:
            key = "load_in_4bit" if values["load_in_4bit"] else "load_in_8bit"
            draft.refuse(
                key, "quantized weights are not trained themselves", "add adapter: lora, or remove it"
            )
        return
    if kind not in ("lora", "qlora"):
        draft.refuse("adapter", "the adapters of such a file are lora and qlora", "use one of these")
        return
    if is_quantized:
        key = f"load_in_{bits}bit"
        draft.put("model.quantize", "nf4" if bits == 4 else "int8", key, "adapter")
        if bits == 4:
            double = (values["bnb_config_kwargs"] or {}).get("bnb_4bit_use_double_quant", True)
            draft.put("model.quantize_double", bool(double), "bnb_config_kwargs")
    variant = "dora" if values["peft_use_dora"] else "rslora" if values["peft_use_rslora"] else "lora"
    draft.put("adapter.kind", variant, "peft_use_dora", "peft_use_rslora", "adapter")
    draft.put("adapter.rank", values["lora_r"] or 8, "lora_r")
    draft.put("adapter.alpha", values["lora_alpha"] or 8.0, "lora_alpha")
    draft.put("adapter.dropout", values["lora_dropout"], "lora_dropout")
    draft.put("adapter.targets", _targets(draft), "lora_target_modules", "lora_target_linear")
    if values["lora_modules_to_save"]:
        draft.put("adapter.modules_to_save", values["lora_modules_to_save"], "lora_modules_to_save")
    draft.put_if_set("adapter.from", "lora_model_dir")
    draft.put_if_set("optim.lora_b_ratio", "loraplus_lr_ratio")
    init = values["peft_init_lora_weights"]
    if init == "pissa":
        draft.put("adapter.init", "pissa", "peft_init_lora_weights")
    elif init not in (None, True, "true"):
        draft.refuse("peft_init_lora_weights", "B begins with zeros, or both with pissa", "remove it")


def _targets(draft: Draft) -> str | list[str]:
    """Patterns for the names: as in peft a whole name, or its end behind a dot; a text is a
    pattern.
    """
    values = draft.values
    names = values["lora_target_modules"]
    patterns = [f"^(?:{names})$"] if isinstance(names, str) and names != "all-linear" else []
    if isinstance(names, list):
        patterns = [_end(str(name)) for name in names]
    parameters = values["lora_target_parameters"] or []
    patterns += [_end(str(name)) for name in ([parameters] if isinstance(parameters, str) else parameters)]
    if values["lora_target_linear"] or names == "all-linear" or not patterns:
        return "all-linear"
    return patterns


def _end(name: str) -> str:
    return rf"(^|\.){re.escape(name)}$"


def _optim(draft: Draft) -> None:
    values = draft.values
    name = values["optimizer"] or "adamw_torch_fused"
    ours = _OPTIMIZERS.get(name) or optimizer_of_transformers(name)
    stage = _ZERO.search(str(values["deepspeed"]))
    shards = values["fsdp"] or values["fsdp_config"] or (values["dp_shard_size"] or 1) > 1
    shards = shards or (stage is not None and stage[1] != "1")
    if ours is None:
        choice = ", ".join(theirs for kind in OPTIMIZERS.values() for theirs in kind.transformers)
        draft.refuse("optimizer", "there is no such optimizer here", f"use one of {choice}, muon")
    elif ours.startswith("adamw_8bit") and shards:
        draft.put("optim.kind", "adamw", "optimizer")
        draft.put("optim.state_dtype", "bfloat16", "optimizer")
        draft.warnings.append(
            f"optimizer: {name}: the state is AdamW's in bfloat16, with 16 bits instead of 8, since weights are"
            " sharded"
        )
    else:
        draft.put("optim.kind", ours, "optimizer")
        if ours == "muon":
            draft.put("optim.muon_lr", values["learning_rate"] or 2e-4, "learning_rate")
            draft.put("optim.muon_scale", "adamw", "optimizer")
        if name == "adamw_torch_8bit":
            draft.warnings.append(
                "optimizer: adamw_torch_8bit: the 8-bit state comes from bitsandbytes, not torchao"
            )
    if values["learning_rate"] is None:
        problem = Problem("the key `learning_rate` is missing", draft.name, "it has no default", "add it")
        draft.problems.append(problem)
    draft.put("optim.lr", values["learning_rate"] or 2e-4, "learning_rate")
    draft.put("optim.weight_decay", values["weight_decay"], "weight_decay")
    betas = [values["adam_beta1"], values["adam_beta2"]]
    defaults = (0.9, 0.999)
    chosen = [default if beta is None else beta for beta, default in zip(betas, defaults, strict=True)]
    draft.put("optim.betas", chosen, "adam_beta1", "adam_beta2")
    draft.put_if_set("optim.eps", "adam_epsilon")
    draft.put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")
    _schedule(draft)


def _schedule(draft: Draft) -> None:
    values = draft.values
    name = values["lr_scheduler"] or "cosine"
    schedule = from_transformers(name)
    lowest = values["cosine_min_lr_ratio"]
    if name == "cosine" and lowest == 1:  # a cosine that never falls
        draft.put("optim.schedule", "constant", "cosine_min_lr_ratio", "lr_scheduler")
    elif schedule is None:
        choice = ", ".join(theirs for kind in SCHEDULES.values() for theirs in kind.transformers)
        draft.refuse("lr_scheduler", "there is no such schedule here", f"use one of {choice}")
    else:
        draft.put("optim.schedule", schedule[0], "lr_scheduler")
    draft.put("optim.schedule_start", 0)
    if lowest is not None and lowest < 1:
        draft.put("optim.min_lr", lowest, "cosine_min_lr_ratio")
    if lowest is not None and name != "cosine":
        draft.refuse(
            "cosine_min_lr_ratio", f"lr_scheduler is {name}", "set lr_scheduler: cosine, or remove it"
        )
    steps = values["warmup_steps"]
    warmup = values["warmup_ratio"] if steps is None else steps
    if name == "constant":
        warmup = 0
    if warmup is None:
        warmup = 0.03
    text = f"{int(warmup)} steps" if warmup >= 1 or warmup == 0 else f"{round(warmup * 100, 6):g}%"
    draft.put("optim.warmup", text, "warmup_steps" if steps is not None else "warmup_ratio")


def _extent(draft: Draft) -> None:
    values = draft.values
    if (values["max_steps"] or 0) > 0:
        draft.put("duration", f"{values['max_steps']} steps", "max_steps")
        draft.ignore("num_epochs", "max_steps takes precedence")
    else:
        draft.put("duration", f"{values['num_epochs']:g} epochs", "num_epochs")
    each = values["micro_batch_size"]
    draft.put("batch.per_rank", each, "micro_batch_size")
    times = values["gradient_accumulation_steps"]
    if values["batch_size"] is not None:
        times = max(1, values["batch_size"] // max(1, each))
        if "gradient_accumulation_steps" in values.given and values["gradient_accumulation_steps"] != times:
            draft.refuse(
                "batch_size",
                f"gradient_accumulation_steps says {values['gradient_accumulation_steps']}",
                "remove one of them",
            )
    draft.put("batch.accumulate", times, "gradient_accumulation_steps", "batch_size")


def _period(draft: Draft, per_epoch: str, steps: str) -> tuple[str | None, str]:
    """How often, and the key that says it: times in an epoch, a number of steps, or below 1 a share
    of the run.
    """
    values = draft.values
    if values[per_epoch]:
        return f"{round(1 / values[per_epoch], 9):g} epochs", per_epoch
    amount = values[steps]
    if amount and amount >= 1:
        return f"{int(amount)} steps", steps
    if amount:
        if (values["max_steps"] or 0) > 0:
            return f"{max(1, round(values['max_steps'] * amount))} steps", steps
        return f"{round(values['num_epochs'] * amount, 9):g} epochs", steps
    return None, steps


def _periods(draft: Draft) -> None:
    values = draft.values
    has_rows = bool(values["test_datasets"] or values["val_set_size"])
    every, key = _period(draft, "evals_per_epoch", "eval_steps")
    strategy = values["eval_strategy"]
    if has_rows and strategy != "no":
        draft.put("eval.every", every or "1 epochs", key, "eval_strategy")
    elif has_rows:
        draft.put("eval.every", draft.config["duration"], "eval_strategy")
    if has_rows:
        draft.put_if_set("eval.stop_after", "early_stopping_patience")
    for name in ("evals_per_epoch", "eval_steps", "eval_strategy", "early_stopping_patience"):
        if not has_rows:
            draft.ignore(name, "no effect: there are no evaluation rows")
    every, key = _period(draft, "saves_per_epoch", "save_steps")
    strategy = values["save_strategy"]
    if strategy == "no":
        every, key = draft.config["duration"], "save_strategy"
    draft.put("checkpoint.every", every or "1 epochs", key, "save_strategy")
    if values["save_total_limit"]:
        draft.put("checkpoint.keep", values["save_total_limit"], "save_total_limit")
    else:
        draft.put("checkpoint.keep_every", every or "1 epochs", "save_total_limit")
    if values["load_best_model_at_end"] or strategy == "best":
        draft.put("checkpoint.best", "eval_loss", "load_best_model_at_end", "save_strategy")


def _machine(draft: Draft) -> None:
    values = draft.values
    draft.put(
        "memory.gradient_checkpointing", bool(values["gradient_checkpointing"]), "gradient_checkpointing"
    )
    if values["gradient_checkpointing"] in ("offload", "offload_disk"):
        draft.warnings.append("gradient_checkpointing: activations are recomputed, not offloaded")
    draft.put("seed", values["seed"], "seed")
    draft.put("output_dir", values["output_dir"], "output_dir")
    _strategy(draft)
    _trackers(draft)


def _strategy(draft: Draft) -> None:
    values = draft.values
    given = values["fsdp_config"] or {}
    if any(given.get(key) for key in ("offload_params", "fsdp_offload_params")):
        fix = "remove it; use more ranks, an adapter or gradient_checkpointing"
        draft.refuse("fsdp_config", "weights and optimizer state stay on the device", fix)
    if values["fsdp"] or given or (values["dp_shard_size"] or 1) > 1:
        draft.put("parallel.strategy", "fsdp", "fsdp", "fsdp_config", "dp_shard_size")
    elif values["deepspeed"]:
        _deepspeed(draft)


def _deepspeed(draft: Draft) -> None:
    """The stage by the name of axolotl's own files."""
    name = draft.values["deepspeed"]
    stage = _ZERO.search(name) if isinstance(name, str) else None
    if stage is None:
        fix = "use one of its deepspeed_configs/, or set parallel.strategy"
        draft.refuse(
            "deepspeed", "the stage is read from the name of axolotl's files: zero1, zero2, zero3", fix
        )
    elif "offload" in name:
        draft.refuse("deepspeed", "weights and optimizer state stay on the device", "use one without offload")
    else:
        strategy = "ddp" if stage[1] == "1" else "fsdp"
        draft.put("parallel.strategy", strategy, "deepspeed")
        draft.warnings.append(f"deepspeed: parallel.strategy is {strategy}, for stage {stage[1]}")


def _trackers(draft: Draft) -> None:
    values = draft.values
    chosen = [
        name
        for name, is_used in (
            (
                "wandb",
                values["use_wandb"] is not False and bool(values["wandb_project"] or values["use_wandb"]),
            ),
            ("swanlab", bool(values["use_swanlab"])),
            ("tensorboard", bool(values["use_tensorboard"])),
        )
        if is_used and name in _TRACKERS
    ]
    if chosen:
        draft.put("track", chosen, "wandb_project", "use_wandb", "use_swanlab", "use_tensorboard")


def _rest(draft: Draft) -> None:
    """Plugins, of which those that change what is trained are refused."""
    plugins = draft.values["plugins"] or []
    names = plugins if isinstance(plugins, list) else [plugins]
    odd = [str(name) for name in names if not any(f".{word}." in f".{name}." for word in _KERNELS)]
    if odd:
        draft.refuse("plugins", f"{odd[0]} is not available", "remove it")
    else:
        draft.ignore("plugins", "they change only time, memory or what is logged")

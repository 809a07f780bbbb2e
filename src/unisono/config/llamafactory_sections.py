"""The values of a LLaMA-Factory file as sections of our config.

What LLaMA-Factory does by default and we do not is written out, so that the config says all of it.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, get_args

from unisono.config.dataset_info import read_datasets
from unisono.config.lf_template import find_lf_template
from unisono.config.llamafactory_keys import Fate, Values
from unisono.config.llamafactory_parallel import read_strategy
from unisono.config.schema import RunConfig
from unisono.errors import ConfigError, DataError, Problem


class Sections:
    """Our config, as it is filled key by key.

    Attributes:
        config: in our schema; `?` for what is required and missing.
        origins: our dotted key: where the value comes from.
        names: our dotted key: the key of the file.
        fates: of keys whose fate depends on values, with a note.
        eval_sources: the sources of eval_dataset.
    """

    def __init__(self, values: Values, name: str, *, verb: str) -> None:
        self._values, self._name, self._verb = values, name, verb
        self.config: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.fates: dict[str, tuple[Fate, str]] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.eval_sources: list[dict[str, Any]] = []

    def build(self) -> None:
        """Fills all sections; of a file that merges or chats, without rows, only the model's."""
        self._model()
        if self._verb in ("export", "chat") and not (self._values["dataset"] or self._values["eval_dataset"]):
            return
        self._method()
        self._data()
        self._optim()
        self._extent()
        self._evaluation()
        self._checkpoint()
        self._machine()

    def drop(self, *ours: str) -> None:
        """Takes keys back, e.g. since an override of ours says the same in another way."""
        for key in ours:
            section, _, name = key.partition(".")
            del self.config[section][name], self.origins[key]

    # ---- how a value gets into the config

    def _put(self, ours: str, value: Any, *keys: str) -> None:
        """Sets one of our keys; `keys` are those of the file that decide it, the first given one is its origin."""
        *sections, last = ours.split(".")
        target = self.config
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
        given = next((key for key in keys if key in self._values.given), None)
        default = f"{self._name}: LLaMA-Factory's default"
        self.origins[ours] = self._values.places[given] if given else default
        if given:
            self.names[ours] = given

    def _put_if_set(self, ours: str, key: str) -> None:
        if self._values.is_set(key):
            self._put(ours, self._values[key], key)

    def _refuse(self, key: str, why: str, fix: str) -> None:
        """A problem with the value of a key that has other values that are fine."""
        value = self._values[key]
        shown = ", ".join(value) if isinstance(value, list) else value
        place = self._values.place(key)
        self.problems.append(Problem(f"`{key}: {shown}` is not available", place, why, fix))
        self.fates[key] = ("refused", fix)

    def _ignore(self, key: str, note: str) -> None:
        self.fates[key] = ("ignored", note)

    # ---- the sections

    def _model(self) -> None:
        values = self._values
        if values["model_name_or_path"] is None:
            problem = Problem(
                "the key `model_name_or_path` is missing", self._name, "it has no default", "add it"
            )
            self.problems.append(problem)
        self._put("model.path", values["model_name_or_path"] or "?", "model_name_or_path")
        self._put_if_set("model.revision", "model_revision")
        is_bf16 = values["bf16"] or values["pure_bf16"]
        self._put("model.dtype", "bfloat16" if is_bf16 else "auto", "bf16", "pure_bf16")
        if values["fp16"]:
            self.warnings.append(
                "fp16: float16 needs loss scaling, which is not here; model.dtype is auto: bfloat16 where the device has it, else float32"
            )
        if values["train_from_scratch"]:
            self._put("model.weights", "random", "train_from_scratch")
        self._put_if_set("model.resize_vocabulary", "resize_vocab")
        self._put_if_set("model.embedding_noise", "neftune_noise_alpha")
        self._put_if_set("model.trust_remote_code", "trust_remote_code")
        self._rope()

    def _rope(self) -> None:
        kind = self._values["rope_scaling"]
        if kind is not None:
            self._put("model.rope", {"kind": kind, "factor": "auto"}, "rope_scaling")

    def _method(self) -> None:
        values = self._values
        kind = values["finetuning_type"]
        if kind == "lora":
            self._adapter()
            return
        if kind == "oft":
            self._refuse("finetuning_type", "OFT is not here", "use lora, full or freeze")
        self._put("adapter", None, "finetuning_type")
        if kind == "freeze":
            self._train_only()

    def _adapter(self) -> None:
        values = self._values
        kind = "dora" if values["use_dora"] else "rslora" if values["use_rslora"] else "lora"
        self._put("adapter.kind", kind, "use_dora", "use_rslora")
        self._put("adapter.rank", values["lora_rank"], "lora_rank")
        self._put(
            "adapter.alpha", float(values["lora_alpha"] or 2 * values["lora_rank"]), "lora_alpha", "lora_rank"
        )
        self._put("adapter.dropout", values["lora_dropout"], "lora_dropout")
        targets = values["lora_target"]
        if targets in ("all", ["all"]):
            self._put("adapter.targets", "all-linear", "lora_target")
        else:  # as in PEFT: the whole name, or its end behind a dot
            self._put("adapter.targets", [rf"(^|\.){re.escape(name)}$" for name in targets], "lora_target")
        if values["additional_target"]:
            self._put("adapter.modules_to_save", values["additional_target"], "additional_target")
        if values["pissa_init"]:
            self._put("adapter.init", "pissa", "pissa_init")
            steps = values["pissa_iter"]
            self._put("adapter.init_steps", steps if steps >= 0 else None, "pissa_iter")
        self._other_adapters()
        if values["loraplus_lr_ratio"] is not None:
            self._put("optim.lora_b_ratio", values["loraplus_lr_ratio"], "loraplus_lr_ratio")

    def _other_adapters(self) -> None:
        """Those that training begins with: all but the last are merged, and with create_new_adapter the last, too."""
        adapters = self._values["adapter_name_or_path"] or []
        if not adapters or self._verb != "train":
            return
        merged = adapters if self._values["create_new_adapter"] else adapters[:-1]
        if merged:
            self._put("adapter.merge", merged, "create_new_adapter", "adapter_name_or_path")
        if merged != adapters:
            self._put("adapter.from", adapters[-1], "adapter_name_or_path")
            self._as_stored(_stored_settings(adapters[-1]))

    def _as_stored(self, stored: dict[str, Any]) -> None:
        """Takes the shape of the adapter that is continued from its own settings, as LLaMA-Factory does; the file's keys do not count."""
        if not stored:
            return
        kind = "dora" if stored.get("use_dora") else "rslora" if stored.get("use_rslora") else "lora"
        shape = {
            "kind": kind,
            "rank": stored.get("r"),
            "alpha": stored.get("lora_alpha"),
            "dropout": stored.get("lora_dropout", 0.0),
            "modules_to_save": stored.get("modules_to_save") or [],
        }
        for name, value in shape.items():
            self._put(f"adapter.{name}", value, "adapter_name_or_path")
        own = (
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "lora_target",
            "use_dora",
            "use_rslora",
            "additional_target",
        )
        for key in own:
            self._ignore(key, "the adapter in adapter_name_or_path has its own")

    def _train_only(self) -> None:
        values = self._values
        self._put("train_only.layers", values["freeze_trainable_layers"], "freeze_trainable_layers")
        if values["use_llama_pro"]:
            self._put("train_only.spread", True, "use_llama_pro")
        modules = values["freeze_trainable_modules"]
        self._put(
            "train_only.modules",
            "all" if modules in ("all", ["all"]) else modules,
            "freeze_trainable_modules",
        )
        if values["freeze_extra_modules"]:
            self._put("train_only.extra", values["freeze_extra_modules"], "freeze_extra_modules")

    def _data(self) -> None:
        values = self._values
        train = values["dataset"]
        sources = self._sources(train, "dataset")
        self.eval_sources = self._sources(values["eval_dataset"], "eval_dataset")
        if train is None and self._verb != "train":  # a file that predicts: its rows can still be previewed
            if self.eval_sources:
                self._put("data.train", self.eval_sources, "eval_dataset")
        else:
            self._put("data.train", sources or "?", "dataset", "dataset_dir", "max_samples")
            if self.eval_sources:
                self._put("data.eval", self.eval_sources, "eval_dataset")
            elif values["val_size"]:
                size = values["val_size"]
                self._put("data.eval", size if size < 1 else int(size), "val_size")
        if "data" in self.config:
            self._rows()
            self._mix()

    def _sources(self, names: list[str] | None, key: str) -> list[dict[str, Any]]:
        if not names:
            return []
        values = self._values
        limit = values["max_samples"]
        try:
            return read_datasets(
                names,
                values["dataset_dir"],
                where=values.place(key),
                stage=values["stage"],
                max_samples=limit if limit is not None and limit > 0 else None,
            )
        except ConfigError as error:
            self.problems += error.problems
            return []

    def _rows(self) -> None:
        values = self._values
        pretrain = values["stage"] == "pt"
        if values["stage"] == "ppo":
            self._refuse("stage", "PPO is not here", "use sft, or pt for plain text")
        elif values["stage"] in ("rm", "dpo", "kto"):
            self.fates["stage"] = ("refused", "not trained yet; `unisono data preview` shows its rows")
        self._put("objective", "pretrain" if pretrain else "sft", "stage")
        if values["template"] is not None:
            self._put("data.template", f"lf:{values['template']}", "template")
            try:
                find_lf_template(values["template"])
            except DataError as error:
                why = error.problems[0].why.replace("lf:", "")
                self._refuse("template", why, "use one of them; any other name: the tokenizer's own template")
        elif pretrain:  # texts with their end of sequence, and no other special token
            self._put("data.template", "lf:empty")
        else:
            self.warnings.append(
                f"{self._name} names no template: rows are written with the tokenizer's own chat template"
            )
        packed = values["neat_packing"] or values["packing"] or (values["packing"] is None and pretrain)
        asked = values["neat_packing"] or bool(values["packing"])
        # LLaMA-Factory takes one off where packing is asked for, and not where pretraining brings it.
        self._put("data.max_length", values["cutoff_len"] - (1 if asked else 0), "cutoff_len")
        too_long = "balanced" if not pretrain else "split" if packed else "cut"
        self._put("data.too_long", too_long, "cutoff_len")
        self._put("data.on_bad_row", "skip")
        self._put("data.packing", bool(packed), "neat_packing", "packing", "stage")
        if not pretrain:
            loss_on = (
                "all" if values["train_on_prompt"] else "last-answer" if values["mask_history"] else "answers"
            )
            self._put("data.loss_on", loss_on, "train_on_prompt", "mask_history")
            if values["template"] is not None:
                self._put("data.thinking", values["enable_thinking"], "enable_thinking")

    def _mix(self) -> None:
        values = self._values
        if values["mix_strategy"] != "concat":
            self._put("data.mix.strategy", values["mix_strategy"], "mix_strategy")
            if values["interleave_probs"]:
                self._put("data.mix.probabilities", values["interleave_probs"], "interleave_probs")

    def _optim(self) -> None:
        values = self._values
        self._put("optim.kind", "muon" if values["use_muon"] else "adamw", "use_muon")
        if values["use_muon"]:
            self._put("optim.muon_lr", values["learning_rate"], "learning_rate")
            self._put("optim.muon_scale", "adamw", "use_muon")
        name = values["optim"]
        if name not in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
            self._refuse(
                "optim", "AdamW and Muon are the optimizers here", "use adamw_torch, or use_muon: true"
            )
        self._put("optim.lr", values["learning_rate"], "learning_rate")
        self._put("optim.weight_decay", values["weight_decay"], "weight_decay")
        self._put("optim.betas", [values["adam_beta1"], values["adam_beta2"]], "adam_beta1", "adam_beta2")
        self._put("optim.eps", values["adam_epsilon"], "adam_epsilon")
        self._put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")
        self._put_if_set("optim.label_smoothing", "label_smoothing_factor")
        self._schedule()

    def _schedule(self) -> None:
        values = self._values
        name = values["lr_scheduler_type"]
        ours = _SCHEDULES.get(name)
        if ours is None:
            self._refuse(
                "lr_scheduler_type", "there is no such schedule here", f"use one of {', '.join(_SCHEDULES)}"
            )
            ours = "linear"
        self._put("optim.schedule", ours, "lr_scheduler_type")
        self._put("optim.schedule_start", 0)
        warmup = values["warmup_steps"] if values["warmup_ratio"] is None else values["warmup_ratio"]
        if name == "constant":
            warmup = 0
            for key in ("warmup_steps", "warmup_ratio"):
                self._ignore(key, "no effect with lr_scheduler_type: constant; constant_with_warmup has one")
        text = f"{int(warmup)} steps" if warmup >= 1 or warmup == 0 else f"{_plain(warmup * 100)}%"
        self._put("optim.warmup", text, "warmup_ratio", "warmup_steps")
        self._schedule_kwargs(name)

    def _schedule_kwargs(self, name: str) -> None:
        given = self._values["lr_scheduler_kwargs"] or {}
        lr = self._values["learning_rate"]
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
            self._refuse(
                "lr_scheduler_type", "it needs its end", "add lr_scheduler_kwargs: {min_lr_rate: 0.1}"
            )
        for key, value in given.items():
            if key not in known or not isinstance(value, int | float):
                choice = f"it takes {', '.join(known)}" if known else f"{name} takes none"
                self._refuse("lr_scheduler_kwargs", f"`{key}` is not known; {choice}", "remove it")
                continue
            ours, factor = known[key]
            self._put(
                ours, value if factor == 1 else value * factor, "lr_scheduler_kwargs", "lr_scheduler_type"
            )

    def _extent(self) -> None:
        values = self._values
        steps, epochs = values["max_steps"], values["num_train_epochs"]
        if steps > 0:
            self._put("duration", f"{steps} steps", "max_steps")
            self._ignore("num_train_epochs", "max_steps wins")
        else:
            self._put("duration", f"{_plain(epochs)} epochs", "num_train_epochs")
            self._ignore("max_steps", "0 and below: num_train_epochs decides")
        each, times = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
        self._put("batch.per_rank", each, "per_device_train_batch_size")
        self._put("batch.accumulate", times, "gradient_accumulation_steps")

    def _period(self, amount: float, strategy: str) -> str:
        """`500 steps`, `1 epochs`, or below 1 a share of the run."""
        if strategy == "epoch":
            return "1 epochs"
        if amount >= 1:
            return f"{int(amount)} steps"
        values = self._values
        if values["max_steps"] > 0:
            return f"{max(1, math.ceil(values['max_steps'] * amount))} steps"
        return f"{_plain(values['num_train_epochs'] * amount)} epochs"

    def _evaluation(self) -> None:
        values = self._values
        strategy = values["eval_strategy"]
        every = None
        if strategy != "no":
            amount = values["eval_steps"] or values["logging_steps"]
            every = self._period(amount, strategy)
        if values["eval_dataset"] or values["val_size"] or every:
            first = "eval_steps" if strategy == "steps" else "eval_strategy"
            self._put("eval.every", every, first, "eval_strategy")
        if values["early_stopping_steps"] is not None:
            self._put("eval.stop_after", values["early_stopping_steps"], "early_stopping_steps")
        metric = values["metric_for_best_model"]
        if metric not in (None, "loss", "eval_loss"):
            self._refuse(
                "metric_for_best_model", "the evaluation has eval_loss", "use eval_loss, or remove it"
            )

    def _checkpoint(self) -> None:
        values = self._values
        strategy = values["save_strategy"]
        if strategy == "no":
            every = self.config["duration"]
        elif strategy == "best":
            every = self.config.get("eval", {}).get("every") or self.config["duration"]
        else:
            every = self._period(values["save_steps"], strategy)
        self._put(
            "checkpoint.every",
            every,
            "save_steps" if strategy == "steps" else "save_strategy",
            "save_strategy",
        )
        limit = values["save_total_limit"]
        if limit is not None and limit > 0:
            self._put("checkpoint.keep", limit, "save_total_limit")
        elif strategy != "no":
            self._put("checkpoint.keep_every", every, "save_total_limit")
        if values["load_best_model_at_end"] or strategy == "best":
            self._put("checkpoint.best", "eval_loss", "load_best_model_at_end", "save_strategy")

    def _machine(self) -> None:
        values = self._values
        strategy, keys, differences, problems = read_strategy(values)
        self.problems += problems
        if problems:
            self.fates |= dict.fromkeys((*keys, "fsdp_config"), ("refused", problems[0].what))
        self.warnings += differences
        if strategy is not None:
            self._put("parallel.strategy", strategy, *keys)
        elif keys:
            self._put("parallel.strategy", "auto", *keys)
        recompute = not values["disable_gradient_checkpointing"] or values["gradient_checkpointing"]
        self._put(
            "memory.gradient_checkpointing",
            recompute,
            "disable_gradient_checkpointing",
            "gradient_checkpointing",
        )
        if values["use_cpu"]:
            self._put("device", "cpu", "use_cpu")
        self._put_if_set("deterministic", "full_determinism")
        self._put("seed", values["seed"], "seed")
        if values["data_seed"] not in (None, values["seed"]):
            self._refuse(
                "data_seed", "one seed decides the order and all else", "set seed, and remove data_seed"
            )
        self._trackers()
        if values["output_dir"] is None and self._verb in ("train", "predict"):
            problem = Problem("the key `output_dir` is missing", self._name, "it has no default", "add it")
            self.problems.append(problem)
        self._put("output_dir", values["output_dir"] or "?", "output_dir")

    def _trackers(self) -> None:
        values = self._values
        named = values["report_to"] if isinstance(values["report_to"], list) else []
        track = [name for name in named if name != "none"]
        if values["use_swanlab"] and "swanlab" not in track:
            track.append("swanlab")
        unknown = [name for name in track if name not in _TRACKERS]
        if unknown:
            key = "report_to" if values.is_set("report_to") else "use_swanlab"
            self._refuse(key, f"there is no tracker {unknown[0]} here", f"use none or {', '.join(_TRACKERS)}")
        elif track:
            self._put("track", track, "report_to", "use_swanlab")


def _stored_settings(adapter: str) -> dict[str, Any]:
    """The settings of an adapter on this machine, or of that in a run; empty if there is none, which is refused when it is loaded."""
    for folder in (Path(adapter).expanduser(), Path(adapter).expanduser() / "adapter"):
        try:
            found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine_with_restarts", "polynomial": "polynomial", "cosine_with_min_lr": "cosine",
}  # fmt: skip
_TRACKERS = get_args(get_args(RunConfig.model_fields["track"].annotation)[0])


def _plain(number: float) -> str:
    """Without an exponent and without what floats add: 0.1 × 100 is `10`."""
    return f"{round(number, 9):.9f}".rstrip("0").rstrip(".")

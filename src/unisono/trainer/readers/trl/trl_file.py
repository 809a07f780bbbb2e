"""From a file or a command of TRL (1.16) to our config: which of its keys say what, and the fate of
each.

A file does not say which trainer it is for: the command does, a key that only one has, or our
`objective=…` behind the file; else it is SFT.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError, Problem
from unisono.trainer.config.problems import find_secrets
from unisono.trainer.config.translation import Translation
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces, read_yaml
from unisono.trainer.readers.key_table import Draft, Values
from unisono.trainer.readers.llamafactory.training import fill_trainer
from unisono.trainer.readers.overrides import with_overrides
from unisono.trainer.readers.reading import Reading, with_effect
from unisono.trainer.readers.trl.command import read_command
from unisono.trainer.readers.trl.sampled import DEFAULTS, GROUP, SAMPLED, fill_sampled
from unisono.trainer.readers.trl.trl_keys import KEYS, PAGE, TOOL, WITH_DEFAULTS

_MARKS = {
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_text_field"),
    *("datasets", "use_peft", "lora_r", "lora_target_modules", "attn_implementation", "assistant_only_loss"),
    "dtype",
}
_NEVER = {
    *("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "do_train", "data", "model"),
    "base_model",
}
_RATES = {"sft": 2e-5, "reward": 1e-4, **dict.fromkeys(("dpo", "kto", "orpo", "cpo", *SAMPLED), 1e-6)}
_OBJECTIVES = {"rloo": "grpo", "cpo": "simpo"}
"""Our name of a trainer that has another."""
_OF_CPO = ("cpo_alpha", "simpo_gamma")
_LOSSES = ("sigmoid", "hinge", "ipo")
_OF_KTO = ("desirable_weight", "undesirable_weight")
_OF_DPO = (
    *("beta", "label_smoothing", "loss_type", "precompute_ref_log_probs", "sync_ref_model"),
    "f_divergence_type",
)


class TrlFile(Translation):
    """A file or command of TRL in our terms; it is always for training."""

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once."""
        del variables
        line = (
            f"{self.name} is a TRL file: {self.count('carried')} keys carried, {self.count('translated')} translated;"
            f" `unisono init --from-trl {self.name}` shows our config and the fate of each key"
        )
        return [line, *self.ignored(), *self.warnings]


def recognizes(raw: Mapping[str, object], path: Path) -> bool:
    """Whether a mapping is a file of TRL."""
    del path
    return "model_name_or_path" in raw and bool(_MARKS & set(raw)) and not _NEVER & set(raw)


def to_config(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> TrlFile:
    """The file in our terms; its `problems` are not raised."""
    return translate(raw, lines, str(path), overrides=overrides)


def read_trl(text: str) -> TrlFile:
    """A file, or the text of a command, in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read, or is a command of another trainer.
    """
    if " " not in text.strip() and Path(text).suffix.lower() in (".yaml", ".yml", ".json", ""):
        raw, lines = read_yaml(Path(text))
        return translate(raw, lines, text)
    command = read_command(text)
    if command.trainer not in _RATES:
        raise ConfigError.of(
            f"TRL's {command.trainer} is not translated",
            where="--from-trl",
            why=f"{', '.join(_RATES)} are; other trainers and scripts have functions, models or data of their own",
            fix=f"begin with `unisono init --out train.yaml`; {PAGE} has our key for each of its keys",
        )
    return translate(command.raw, command.lines, "the command", trainer=command.trainer)


def translate(
    raw: Mapping[str, object],
    lines: Mapping[KeyPath, int],
    name: str,
    *,
    trainer: str | None = None,
    overrides: tuple[str, ...] = (),
) -> TrlFile:
    """Our config of a TRL file, and what became of each of its keys; `problems` has all that is
    wrong.

    Args:
        raw: the mapping in the file.
        lines: the line of each key.
        name: the file's name, for messages.
        trainer: one of TRL's, e.g. dpo; None: as the file shows.
        overrides: `key=value` with its names, or ours.
    """
    places = KeyPlaces(dict(lines), name)
    raw, ours, problems = with_overrides(raw, overrides, places, keys=KEYS)
    secrets = find_secrets({key: raw[key] for key in raw if key not in ("eos_token", "pad_token")}, places)
    reading = Reading(
        places,
        name,
        keys=KEYS,
        tool=TOOL,
        unknown=("it is not a key of the trainers of TRL that are read", PAGE),
    )
    for key, value in raw.items():
        is_hidden = any(place[0] == key for place in secrets)
        reading.read(key, "…" if is_hidden else value, is_secret=is_hidden)
    chosen = trainer or _trainer(reading.values, ours)
    given = {"learning_rate": _RATES[chosen], "save_strategy": "steps"} | DEFAULTS.get(chosen, {})
    given |= reading.values
    values = Values(given, reading.places, name, WITH_DEFAULTS)
    draft = Draft(_Shown(values, reading.values), name, verb="train", tool=TOOL)
    _fill(draft, chosen)
    return TrlFile(
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


class _Shown(Values):
    """Values with the trainer's own defaults, which are not among those that the file gives."""

    def __init__(self, values: Values, given: Mapping[str, Any]) -> None:
        super().__init__(given, values.places, values.name, values.table)
        self._all = values

    def __getitem__(self, key: str) -> Any:
        return self._all[key]


def _trainer(given: Mapping[str, object], overrides: tuple[str, ...]) -> str:
    named = [text.partition("=")[2] for text in overrides if text.startswith("objective=")]
    if named and named[-1] in (*_RATES, "simpo"):
        return "cpo" if named[-1] == "simpo" else named[-1]
    if any(KEYS[key].group == GROUP for key in given):
        return "grpo"
    if any(key in given for key in _OF_CPO):
        return "cpo"
    if any(key in given for key in _OF_KTO):
        return "kto"
    loss = given.get("loss_type")
    is_of_sft = loss in ("nll", "dft", "chunked_nll")
    return "dpo" if any(key in given for key in _OF_DPO if not (key == "loss_type" and is_of_sft)) else "sft"


def _fill(draft: Draft, trainer: str) -> None:
    draft.put("objective", _OBJECTIVES.get(trainer, trainer))
    _model(draft)
    _data(draft, trainer)
    _adapter(draft, trainer)
    fill_trainer(draft)
    values = draft.values
    names = ("activation_checkpointing", "gradient_checkpointing")
    given = [values[name] for name in names if values[name] is not None]
    draft.put("memory.gradient_checkpointing", given[0], *names)
    draft.put("output_dir", values["output_dir"] or "trainer_output", "output_dir")
    draft.problems = [p for p in draft.problems if p.what != "the key `output_dir` is missing"]
    if trainer in SAMPLED:
        fill_sampled(draft, trainer)
    else:
        _losses(draft, trainer)
    if values["push_to_hub"]:
        draft.warnings.append("push_to_hub: nothing is uploaded; `unisono push RUN OWNER/NAME` does it")


def _model(draft: Draft) -> None:
    values = draft.values
    if values["model_name_or_path"] is None:
        problem = Problem(
            "the key `model_name_or_path` is missing", draft.name, "it has no default", "add it"
        )
        draft.problems.append(problem)
    draft.put("model.path", values["model_name_or_path"] or "?", "model_name_or_path")
    draft.put_if_set("model.revision", "model_revision")
    draft.put_if_set("model.trust_remote_code", "trust_remote_code")
    draft.put_if_set("model.embedding_noise", "neftune_noise_alpha")
    dtype = values["dtype"]
    if dtype in ("bfloat16", "float16") or values["bf16"]:
        draft.put("model.dtype", "bfloat16", "dtype", "bf16")
    elif values["bf16"] is False and not values["fp16"] and dtype in ("float32", None):
        draft.put("model.dtype", "float32", "bf16", "dtype")
    else:
        draft.put("model.dtype", "auto", "bf16", "dtype")
    if values["load_in_4bit"]:
        draft.put("model.quantize", values["bnb_4bit_quant_type"], "load_in_4bit", "bnb_4bit_quant_type")
        draft.put("model.quantize_double", values["use_bnb_nested_quant"], "use_bnb_nested_quant")
    elif values["load_in_8bit"]:
        draft.put("model.quantize", "int8", "load_in_8bit")


def _data(draft: Draft, trainer: str) -> None:
    values = draft.values
    sources = _sources(draft, trainer)
    if not sources:
        problem = Problem("the key `dataset_name` is missing", draft.name, "it has no default", "add it")
        draft.problems.append(problem)
    draft.put("data.train", sources or "?", "dataset_name", "datasets")
    if values["eval_strategy"] != "no":
        if values["test_split_size"]:
            draft.put("data.eval", values["test_split_size"], "test_split_size")
        elif values["dataset_name"]:
            test = {**sources[0], "split": values["dataset_test_split"]}
            draft.put("data.eval", [test], "dataset_test_split", "eval_strategy")
    draft.put("data.plain_texts", value=True)
    draft.put_if_set("data.template", "chat_template_path")
    if trainer in SAMPLED:
        return
    draft.ignore("max_prompt_length", "data.max_length is that of prompt and answer")
    if values["max_length"] is None:
        draft.refuse("max_length", "data.max_length is a number", "set it to the longest row's")
    else:
        draft.put("data.max_length", values["max_length"], "max_length")
    choice = {"keep_start": "cut", "keep_end": "keep-answer"}
    if values["truncation_mode"] not in choice:
        draft.refuse("truncation_mode", "rows are cut at one end", "use keep_start or keep_end")
    ours = choice.get(values["truncation_mode"], "cut") if trainer != "reward" else "drop"
    draft.put("data.too_long", ours, "truncation_mode")
    draft.put("data.packing", values["packing"] and trainer == "sft", "packing")
    if trainer == "sft":
        _loss_on(draft)


def _sources(draft: Draft, trainer: str) -> list[dict[str, object]]:
    values = draft.values
    shape: dict[str, object] = {} if trainer in ("sft", *SAMPLED) else {"format": "preference"}
    if trainer == "sft" and values.is_set("dataset_text_field"):
        shape = {"columns": {"text": values["dataset_text_field"]}}
    if values["dataset_name"]:
        subset = {"subset": values["dataset_config"]} if values["dataset_config"] else {}
        return [{"path": values["dataset_name"], "split": values["dataset_train_split"], **subset, **shape}]
    listed = values["datasets"] or []
    if not isinstance(listed, list) or not all(
        isinstance(entry, Mapping) and entry.get("path") for entry in listed
    ):
        draft.refuse("datasets", "each dataset is a mapping with a path", "write [{path: …}]")
        return []
    sources: list[dict[str, object]] = []
    for entry in listed:
        if any(entry.get(key) is not None for key in ("columns", "fraction", "data_dir")) or isinstance(
            entry.get("data_files"), Mapping
        ):
            draft.refuse("datasets", "path, name, split and data_files are read", "remove the others")
        files = entry.get("data_files")
        paths = [entry["path"]] if files is None else files if isinstance(files, list) else [files]
        for path in paths:
            subset = {"subset": entry["name"]} if entry.get("name") else {}
            split = {} if files is not None else {"split": entry.get("split", "train")}
            sources.append({"path": str(path), **split, **subset, **shape})
    return sources


def _loss_on(draft: Draft) -> None:
    values = draft.values
    if values["completion_only_loss"] is False and not values["assistant_only_loss"]:
        draft.put("data.loss_on", "all", "completion_only_loss")
        return
    draft.put("data.loss_on", "answers", "assistant_only_loss", "completion_only_loss")
    if not values["assistant_only_loss"]:
        draft.warnings.append(
            "assistant_only_loss: false: in rows of messages TRL counts all tokens, and here answers count;"
            " data.loss_on=all counts all"
        )


def _adapter(draft: Draft, trainer: str) -> None:
    values = draft.values
    if not values["use_peft"]:
        draft.put("adapter", None, "use_peft")
        return
    kind = "dora" if values["use_dora"] else "rslora" if values["use_rslora"] else "lora"
    draft.put("adapter.kind", kind, "use_dora", "use_rslora", "use_peft")
    draft.put("adapter.rank", values["lora_r"], "lora_r")
    draft.put("adapter.alpha", values["lora_alpha"], "lora_alpha")
    switches_off = trainer != "sft" and values["disable_dropout"]
    draft.put(
        "adapter.dropout", 0.0 if switches_off else values["lora_dropout"], "lora_dropout", "disable_dropout"
    )
    names = [*(values["lora_target_modules"] or []), *(values["lora_target_parameters"] or [])]
    if names == ["all-linear"]:
        draft.put("adapter.targets", "all-linear", "lora_target_modules")
    else:
        patterns = [rf"(^|\.){re.escape(name)}$" for name in names or ["q_proj", "v_proj"]]
        draft.put("adapter.targets", patterns, "lora_target_modules", "lora_target_parameters")
    if not names:
        draft.warnings.append("lora_target_modules: q_proj and v_proj, which peft chooses for most models")
    if values["lora_modules_to_save"]:
        draft.put("adapter.modules_to_save", values["lora_modules_to_save"], "lora_modules_to_save")


def _losses(draft: Draft, trainer: str) -> None:
    values = draft.values
    _refuse_of_others(draft, trainer)
    loss = values["loss_type"]
    if isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    if trainer == "sft" and loss == "dft":
        draft.put("optim.loss_weight", "dft", "loss_type")
    elif trainer == "dpo" and loss in _LOSSES:
        draft.put("preference.loss", loss, "loss_type")
    elif trainer == "cpo":
        _simpo(draft)
    elif loss not in (None, "nll", "chunked_nll", "kto") or (loss == "kto" and trainer != "kto"):
        draft.refuse(
            "loss_type",
            f"the losses here are nll and dft of sft, {', '.join(_LOSSES)} of dpo",
            "use one of these",
        )
    if trainer not in ("sft", "reward"):
        draft.put("preference.beta", values["beta"], "beta")
    for key in {"dpo": ("label_smoothing",), "kto": _OF_KTO}.get(trainer, ()):
        draft.put_if_set(f"preference.{key}", key)


def _refuse_of_others(draft: Draft, trainer: str) -> None:
    """Refuses keys of GRPO and SimPO for trainers without them."""
    if trainer in ("orpo", "cpo"):
        draft.ignore("max_completion_length", "of encoder-decoder models")
    for key in set(draft.values.given) - set(draft.fates):
        is_sampled = draft.values.table[key].group == GROUP
        if is_sampled or (key in _OF_CPO and trainer != "cpo"):
            objective = "grpo" if is_sampled else "simpo"
            fix = f"remove it, or set objective={objective} behind the file"
            draft.refuse(key, f"it is a key of objective {objective}", fix)


def _simpo(draft: Draft) -> None:
    values = draft.values
    if values["loss_type"] != "simpo":
        draft.refuse(
            "loss_type", "of cpo only SimPO is available", "set loss_type: simpo, or use dpo or orpo"
        )
    draft.put("preference.gamma", values["simpo_gamma"], "simpo_gamma")
    draft.put("preference.sft_weight", values["cpo_alpha"], "cpo_alpha")
    if values["cpo_alpha"]:
        draft.warnings.append(
            "cpo_alpha: the mean over answers of the cross entropy per token; TRL's mean is over all their tokens"
        )

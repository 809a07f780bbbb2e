"""From a file of LLaMA-Factory (v0, of version 0.9.5) to our config: which of its keys say what,
and the fate of each.

`keys.toml` has all of its keys. A key is carried (the same value), translated (the same meaning),
ignored (does no harm), or refused (known, with what to use instead).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.base.errors import ConfigError, Problem
from unisono.trainer.config.problems import find_secrets
from unisono.trainer.config.translation import Fate, Translation, Verb
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces, read_yaml
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.readers.key_table import Draft, Values
from unisono.trainer.readers.llamafactory.contradictions import find_contradictions
from unisono.trainer.readers.llamafactory.keys import KEYS, TOOL
from unisono.trainer.readers.llamafactory.model import fill_data, fill_method, fill_model
from unisono.trainer.readers.llamafactory.training import fill_training
from unisono.trainer.readers.overrides import with_overrides
from unisono.trainer.readers.reading import Reading, with_effect

_UNKNOWN = (
    "it is a key of neither LLaMA-Factory nor Hugging Face's TrainingArguments",
    "docs/reference/llamafactory.md",
)


@dataclass(frozen=True, kw_only=True)
class LlamaFactoryFile(Translation):
    """A file of LLaMA-Factory in our terms.

    Attributes:
        stage: pt, sft, rm, ppo, dpo or kto.
        verb: what the file is for.
    """

    stage: str
    verb: Verb

    @property
    def model(self) -> str:
        """The path or hub id of the model."""
        return str(self.values["model_name_or_path"])

    @property
    def adapters(self) -> list[str]:
        """The adapters that the file names, in their order."""
        given = self.values["adapter_name_or_path"]
        return list(given or [])

    @property
    def template(self) -> str | None:
        """Our `data.template`, e.g. `lf:qwen3_nothink`; None: the tokenizer's own."""
        return f"lf:{self.values['template']}" if self.values["template"] else None

    @property
    def max_tokens(self) -> int:
        """The most tokens of an answer."""
        limit: int = self.values["max_new_tokens"]
        whole: int = self.values["max_length"]
        return limit if limit > 0 else whole

    @property
    def sampling(self) -> SamplingParams:
        """What its generation keys mean; LLaMA-Factory's defaults where it is silent."""
        values = self.values
        sampled = values["do_sample"] and values["temperature"] > 0
        return SamplingParams(
            temperature=values["temperature"] if sampled else 0.0,
            top_p=values["top_p"],
            top_k=values["top_k"],
            repetition_penalty=values["repetition_penalty"],
            beams=values["num_beams"],
            length_penalty=values["length_penalty"],
            seed=values["seed"],
        )

    @property
    def overwrites_output(self) -> bool:
        """Whether the file sets `overwrite_output_dir`."""
        return bool(self.values["overwrite_output_dir"])

    def refusals(self, verb: Verb) -> list[Problem]:
        """Why `unisono train`, `data preview` or `init` cannot use the file; empty if they can."""
        problems = []
        trains = verb in ("train", "init")
        if trains and self.verb != "train":
            problems.append(self._belongs_elsewhere())
        elif self.lacks_config:
            what = f"{self.name} names no dataset"
            problems.append(Problem(what, self.name, "there are no rows to read", "add `dataset: NAME`"))
        return problems

    def _belongs_elsewhere(self) -> Problem:
        command, why = {
            "predict": (f"unisono eval {self.name}", "it predicts, and has no `do_train: true`"),
            "export": (f"unisono export {self.name}", "it merges an adapter into the model (`export_dir`)"),
        }.get(self.verb, (f"unisono chat {self.name}", "it has no `do_train: true`"))
        return Problem(f"{self.name} is not a file for training", self.name, why, f"run `{command}`")

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once, with LLaMA-Factory's switches among the variables."""
        line = (
            f"{self.name} is a LLaMA-Factory file: {self.count('carried')} keys carried,"
            f" {self.count('translated')} translated; `unisono init --from-llamafactory {self.name}` shows"
            " our config and what happens to each key"
        )
        switches = [f"{name}: {text}" for name, text in SWITCHES.items() if name in variables]
        return [line, *self.ignored(), *self.warnings, *switches]

    @property
    def epoch_ends(self) -> str:
        """What differs at the end of an epoch, whatever the number of rows; empty if the run has
        only one.
        """
        if self.values["max_steps"] > 0 or self.values["num_train_epochs"] <= 1:
            return ""
        return (
            "num_train_epochs: LLaMA-Factory ends each epoch with a short step if the rows do not fill it;"
            " here steps run across the ends of epochs, and `unisono train` shows both numbers of steps if"
            " they differ"
        )

    def fewer_steps(self, epochs: float, *, sequences: int, global_batch: int) -> str:
        """Both numbers of steps if they differ: LLaMA-Factory ends each epoch with a short step."""
        theirs = math.ceil(round(epochs * math.ceil(sequences / global_batch), 6))
        ours = math.ceil(math.ceil(round(epochs * sequences, 6)) / global_batch)
        if theirs == ours:
            return ""
        return (
            f"LLaMA-Factory makes {theirs:,} steps of the same rows, with a short one at the end of each"
            f" epoch; here they are {ours:,}, and only the last is short"
        )


def recognizes(raw: Mapping[str, object], path: Path) -> bool:
    """Whether a mapping is a file of LLaMA-Factory, of either generation."""
    del path
    return llamafactory_version(raw) is not None


def to_config(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> LlamaFactoryFile:
    """The file in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it is of the generation v1.
    """
    if llamafactory_version(raw) == "v1":
        raise refuse_v1(raw, lines, str(path))
    return translate(raw, lines, str(path), overrides)


def read_llamafactory(path: Path, overrides: tuple[str, ...] = ()) -> LlamaFactoryFile:
    """A file of LLaMA-Factory in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read, is of the generation v1, or is not LLaMA-Factory's.
    """
    raw, lines = read_yaml(path)
    if not recognizes(raw, path):
        raise ConfigError.of(
            f"{path} is not a file of LLaMA-Factory",
            where=str(path),
            why="it has no `model_name_or_path` with one of its other keys",
            fix="pass such a file; our own config needs no translation",
        )
    return to_config(raw, lines, path, overrides)


def translate(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], name: str, overrides: tuple[str, ...] = ()
) -> LlamaFactoryFile:
    """Our config of a LLaMA-Factory file, and what became of each of its keys.

    Nothing is raised: `problems` has all.

    Args:
        raw: the mapping in the file.
        lines: the line of each key.
        name: the file's name, for messages.
        overrides: `key=value` with its names; those with a dot, or with a name that only we have,
            are ours.
    """
    places = KeyPlaces(dict(lines), name)
    raw, ours, problems = with_overrides(raw, overrides, places, keys=KEYS)
    secrets = find_secrets(raw, places)
    reading = Reading(places, name, keys=KEYS, tool=TOOL, unknown=_UNKNOWN)
    for key, value in raw.items():
        is_hidden = any(path[0] == key for path in secrets)
        reading.read(key, "…" if is_hidden else value, is_secret=is_hidden)
    problems += [*secrets.values(), *reading.problems]
    values = Values(reading.values, reading.places, name, KEYS)
    verb = _verb_of(values)
    draft = _filled(Draft(values, name, verb=verb, tool=TOOL))
    if any(text.startswith("batch.global=") for text in ours):
        draft.drop("batch.per_rank", "batch.accumulate")
    contradictions = find_contradictions(values, verb)
    problems += [*draft.problems, *contradictions.values()]
    refused: dict[str, tuple[Fate, str]] = {k: ("refused", p.what) for k, p in contradictions.items()}
    return LlamaFactoryFile(
        name=name,
        values=values,
        keys=[with_effect(fate, values, verb, draft.fates | refused) for fate in reading.fates],
        config=draft.config,
        origins=draft.origins,
        names=draft.names,
        places=reading.places,
        stage=values["stage"],
        verb=verb,
        warnings=draft.warnings,
        problems=problems,
        our_overrides=ours,
    )


def _filled(draft: Draft) -> Draft:
    """The draft with all sections; of a file that merges or chats, without rows, only with the
    model's.
    """
    fill_model(draft)
    if draft.verb in ("export", "chat") and not (draft.values["dataset"] or draft.values["eval_dataset"]):
        return draft
    fill_method(draft)
    fill_data(draft)
    fill_training(draft)
    return draft


SWITCHES = {
    "FORCE_TORCHRUN": "not needed; `--nproc N` starts N ranks on a node",
    "NPROC_PER_NODE": "read as `--nproc`",
    "NNODES": "read as `--nodes`",
    "NODE_RANK": "read as `--node-rank`",
    "MASTER_ADDR": "read as `--head`",
    "MASTER_PORT": "read as the port of `--head`",
    "MIN_NNODES": "not read; use `--nodes MIN:MAX`",
    "MAX_NNODES": "not read; use `--nodes MIN:MAX`",
    "MAX_RESTARTS": "not read; use `--restarts N`",
    "RDZV_ID": "not read; nodes with the same `--head` and token meet",
    "USE_RAY": "not read; use `--launcher ray --nodes N`",
    "USE_MODELSCOPE_HUB": "not read; download the model and the data, and give their directories",
    "USE_OPENMIND_HUB": "not read; download the model and the data, and give their directories",
    "USE_MCA": "not read; use parallel.strategy=fsdp",
    "USE_MEGATRON_BRIDGE": "not read; use parallel.strategy=fsdp",
    "ALLOW_EXTRA_ARGS": "not read; unknown keys are always refused",
    "OPTIM_TORCH": "not read; use optim.kind",
}
"""LLaMA-Factory's switches in the environment, and what they are here."""


def _verb_of(values: Values) -> Verb:
    if values["do_train"]:
        return "train"
    if values["export_dir"] is not None:
        return "export"
    if values["do_predict"] or values["do_eval"] or values["predict_with_generate"]:
        return "predict"
    return "chat"


# ---- what is a file of LLaMA-Factory, and of which generation

_SHARED = {
    "model_name_or_path",
    "trust_remote_code",
    "dataset",
    "max_length",
    "temperature",
    "seed",
    "task",
    "batch_size",
}
"""Keys of its own that files of TRL, axolotl and others have, too."""
_FROM_HUGGING_FACE = "Seq2SeqTrainingArguments"
_TRLS = ("dataset_name", "dataset_config")
_NEVER_TRLS = ("stage", "finetuning_type", "template", "cutoff_len")
V1_KEYS = {
    "model": "model", "train_dataset": "data.train", "eval_dataset": "data.eval",
    "template": "data.template: lf:NAME", "cutoff_len": "data.max_length",
    "micro_batch_size": "batch.micro", "global_batch_size": "batch.global", "learning_rate": "optim.lr",
    "num_train_epochs": "duration: N epochs", "max_steps": "duration: N steps",
    "max_grad_norm": "optim.max_grad_norm", "optim_config": "optim.kind",
    "lr_scheduler_config": "optim.schedule", "output_dir": "output_dir", "seed": "seed",
    "full_determinism": "deterministic", "bf16": "model.dtype: bfloat16",
    "save_steps": "checkpoint.every: N steps", "save_epochs": "checkpoint.every: N epochs",
    "save_total_limit": "checkpoint.keep", "peft_config": "adapter", "dist_config": "parallel.strategy",
    "init_config": "model.weights", "enable_activation_checkpointing": "memory.gradient_checkpointing",
    "batching_strategy": "data.packing", "trust_remote_code": "model.trust_remote_code",
    "max_new_tokens": "unisono chat --max-tokens", "resume_from_checkpoint": "unisono train --resume",
    "model_class": "", "flash_attn": "", "kernel_config": "", "quant_config": "", "cp_size": "",
    "batching_workers": "", "sample_backend": "", "save_ckpt_as_hf": "", "logging_steps": "",
}  # fmt: skip
"""The keys of the generation v1, and ours; empty: there is none."""


def llamafactory_version(raw: Mapping[str, object]) -> str | None:
    """`v0` or `v1` if the mapping is a LLaMA-Factory file, else None."""
    if "data" in raw:  # required here, unknown there
        return None
    if "model" in raw:
        return "v1" if "train_dataset" in raw else None
    if any(key in raw for key in _TRLS) and not any(key in raw for key in _NEVER_TRLS):
        return None
    recognized = [k for k in raw if k in KEYS and KEYS[k].group != _FROM_HUGGING_FACE and k not in _SHARED]
    return "v0" if len(recognized) + ("model_name_or_path" in raw) > 1 else None


def refuse_v1(raw: Mapping[str, object], lines: Mapping[KeyPath, int], name: str) -> ConfigError:
    """The refusal of a v1 file, with our key for each of its keys."""
    pairs = [f"{key} → {V1_KEYS[key]}" for key in raw if V1_KEYS.get(key)]
    without = [key for key in raw if not V1_KEYS.get(key)]
    unmatched = f"; without a counterpart: {', '.join(without)}" if without else ""
    return ConfigError.of(
        f"{name} is a LLaMA-Factory v1 file; only v0 files, with `model_name_or_path`, are read",
        where=f"{name}:{lines.get(('train_dataset',), 1)}",
        fix=f"write our config (`unisono init --out train.yaml`) with {', '.join(pairs)}{unmatched}",
    )

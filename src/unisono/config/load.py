"""From a YAML file and `key.sub=value` overrides to a RunConfig, or to all that is wrong with them at once.

A file of LLaMA-Factory is recognized and refused.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.config.problems import find_secrets, problems_of
from unisono.config.schema import RunConfig
from unisono.config.yaml_file import COMMAND_LINE, KeyPath, KeyPlaces, parse_value, read_yaml
from unisono.errors import ConfigError, Problem

# Keys that only LLaMA-Factory has (not those of transformers' TrainingArguments), and the equivalent keys of unisono.
# fmt: off
_OWN_KEYS = {
    "model_name_or_path": "model", "stage": "objective", "finetuning_type": "adapter.kind", "dataset": "data.train",
    "dataset_dir": "data.train", "eval_dataset": "data.eval", "val_size": "data.eval", "template": "data.template",
    "cutoff_len": "data.max_length", "lora_rank": "adapter.rank", "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout", "lora_target": "adapter.targets", "adapter_name_or_path": "", "max_samples": "",
    "preprocessing_num_workers": "", "overwrite_cache": "", "plot_loss": "", "quantization_bit": "", "export_dir": "",
    "infer_backend": "", "neat_packing": "data.packing", "train_on_prompt": "data.loss_on", "mask_history": "data.loss_on",
}
_SHARED_KEYS = {
    "learning_rate": "optim.lr", "num_train_epochs": "duration", "max_steps": "duration", "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup", "per_device_train_batch_size": "batch.micro", "gradient_accumulation_steps": "batch.global",
    "save_steps": "checkpoint.every", "eval_steps": "eval.every",
}
# fmt: on
_ENOUGH_KEYS = 2


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where each of its values was set."""

    config: RunConfig
    path: Path | None
    origins: dict[str, str]
    """Key, e.g. `batch.micro`: `train.yaml:7` or `command line`. Keys at their default are omitted."""


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    """Reads a config file and applies overrides of the form `key.sub=value`, the value in YAML.

    Raises:
        ConfigError: with all problems found, or because it is a file of a different tool.
    """
    raw, lines = read_yaml(path)
    refuse_if_llamafactory(raw, str(path))
    return build_config(raw, lines=lines, name=str(path), path=path, overrides=overrides)


def build_config(
    raw: dict[str, Any],
    *,
    lines: dict[KeyPath, int],
    name: str,
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
) -> LoadedConfig:
    """Validates a mapping that was read from `name`, with overrides applied.

    Raises:
        ConfigError: with all problems found.
    """
    places = KeyPlaces(lines, name)
    raw, problems = apply_overrides(raw, overrides, places)
    secrets = find_secrets(raw, places)
    problems += secrets.values()
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        others = problems_of(error, raw, places)
        problems += [problem for key, found in others.items() if key not in secrets for problem in found]
        # Without the cause: pydantic's message would repeat the values, including secrets.
        raise ConfigError(*sorted(problems, key=_line)) from None
    if problems:
        raise ConfigError(*sorted(problems, key=_line))
    return LoadedConfig(config, path, places.dotted())


def _line(problem: Problem) -> float:
    """The line of a problem, for sorting; problems without a line come last."""
    found = re.search(r":(\d+)$", problem.where)
    return int(found[1]) if found else math.inf


# ---- overrides


def apply_overrides(
    raw: dict[str, Any], overrides: tuple[str, ...], places: KeyPlaces
) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping with all overrides applied in order, and the problems with them."""
    problems: list[Problem] = []
    raw = _with_model_section(raw)
    for text in overrides:
        try:
            key, value = _parse_override(text)
            raw = _with_model_section(_replaced(raw, key, value, text))
            places.override(key)
        except ConfigError as error:
            problems += error.problems
    return raw, problems


def _with_model_section(raw: dict[str, Any]) -> dict[str, Any]:
    """`model: NAME` as a section, so that `model.dtype=…` can be applied."""
    return {**raw, "model": {"path": raw["model"]}} if isinstance(raw.get("model"), str) else raw


def _parse_override(text: str) -> tuple[KeyPath, Any]:
    dotted, equals, value_text = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError.of(
            f"{text!r} is not a valid override",
            where=COMMAND_LINE,
            fix="write key.sub=value, e.g. optim.lr=1e-4",
        )
    return tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in parts), parse_value(
        value_text, name=COMMAND_LINE
    )


def _replaced(base: Any, key: KeyPath, value: Any, text: str) -> Any:
    """A copy of `base` with the value at `key`; missing sections are created."""
    if not key:
        return value
    head, *rest = key
    if isinstance(base, list):
        if not isinstance(head, int) or head >= len(base):
            raise ConfigError.of(
                f"{text!r} does not match: it is a list of {len(base)} items",
                where=COMMAND_LINE,
                fix=f"give the index of an item, 0 to {len(base) - 1}",
            )
        return [
            _replaced(item, tuple(rest), value, text) if i == head else item for i, item in enumerate(base)
        ]
    inner = base if isinstance(base, dict) else {}
    name = str(head)
    return {**inner, name: _replaced(inner.get(name), tuple(rest), value, text)}


# ---- files of LLaMA-Factory


def llamafactory_version(raw: dict[str, Any]) -> str | None:
    """`v0` or `v1` if the mapping is a LLaMA-Factory file, else None."""
    if "data" in raw:  # required here, unknown there
        return None
    if "model" in raw:
        return "v1" if "train_dataset" in raw else None
    return "v0" if len(_OWN_KEYS.keys() & raw.keys()) >= _ENOUGH_KEYS else None


def refuse_if_llamafactory(raw: dict[str, Any], name: str) -> None:
    """Rejects a LLaMA-Factory file with one error.

    Args:
        raw: the mapping from the file.
        name: the file's name, for the message.

    Raises:
        ConfigError: if it is one.
    """
    version = llamafactory_version(raw)
    if version is None:
        return
    ours = [
        f"{key} → {target}" for key, target in (_OWN_KEYS | _SHARED_KEYS).items() if target and key in raw
    ]
    carry = f", and transfer {', '.join(ours)}" if ours else ""
    raise ConfigError.of(
        f"{name} is a LLaMA-Factory file ({version}), which unisono does not read",
        where=name,
        fix=f"create a config with `unisono init --out train.yaml`{carry}",
    )

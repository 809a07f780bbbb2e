"""The keys of LLaMA-Factory and of Hugging Face's TrainingArguments, as `llamafactory_keys.toml`
lists them, and how a value is read.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from unisono.base.errors import Problem
from unisono.base.files import parse_json
from unisono.base.text import nearest, one_line

Fate = Literal["carried", "translated", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """One key; the file explains the fields."""

    name: str
    group: str
    type: str = "any"
    words: tuple[str, ...] = ()
    default: Any = None
    null: bool = False
    fate: Fate = "ignored"
    ours: str = ""
    needs: str = ""
    verbs: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    note: str = ""
    same_as: str = ""
    zero: str = ""
    level: str = ""


class Table(Mapping[str, Key]):
    """The keys of a tool by name, from a file of this room.

    It is read when a key is looked up: few starts need it.

    Args:
        words: choices of keys that a table of ours has.
    """

    def __init__(self, file: str, *, words: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._file, self._words = file, words or {}

    @cached_property
    def _keys(self) -> dict[str, Key]:
        text = resources.files("unisono.trainer.config").joinpath(self._file).read_text(encoding="utf-8")
        groups: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)
        keys = {name: _key(name, group, key) for group, keys in groups.items() for name, key in keys.items()}
        return keys | {name: replace(keys[name], words=words) for name, words in self._words.items()}

    def __getitem__(self, name: str) -> Key:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _key(name: str, group: str, found: dict[str, Any]) -> Key:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return Key(name, group, **fields)


KEYS = Table("llamafactory_keys.toml")
"""By name, in the order of LLaMA-Factory's classes."""


class Values(Mapping[str, Any]):
    """The value of each key: the file's, or LLaMA-Factory's default.

    Attributes:
        given: the file's.
        places: of each given key: `x.yaml:7`, or the command line.
        name: of the file.
        table: the keys of the tool that the file is for.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        places: Mapping[str, str],
        name: str,
        table: Mapping[str, Key] = KEYS,
    ) -> None:
        self.given, self.places, self.name, self.table = given, places, name, table

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.table[key].default

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def is_set(self, key: str) -> bool:
        """Whether the file gives it another value than the default."""
        return key in self.given and self.given[key] != self.table[key].default

    def place(self, key: str) -> str:
        """Where a key is set, or the file."""
        return self.places.get(key, self.name)


def convert(key: Key, value: Any) -> Any:
    """A value as its key has it: numbers also from text (`1e-4`), lists also from text with commas.

    Raises:
        ValueError: if the key does not take it, in plain words.
    """
    if value is None and key.null:
        return None
    if key.words:
        return _word(key, value)
    return _READERS[key.type](value)


def _word(key: Key, value: Any) -> str:
    if value is False and "no" in key.words:  # YAML reads `no` as false
        return "no"
    if isinstance(value, str) and value in key.words:
        return value
    near = nearest(value, list(key.words)) if isinstance(value, str) else None
    asked = f"; did you mean `{near}`?" if near else ""
    raise ValueError(f"must be one of {', '.join(key.words)}, got {_shown(value)}{asked}")


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)


def _bool(value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"must be true or false, got {_shown(value)}")


def _float(value: Any) -> float:
    try:
        number = (
            float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        )
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a number, got {_shown(value)}")
    return number


def _int(value: Any) -> int:
    try:
        number = _float(value)
    except ValueError:
        number = 0.5
    if number != int(number):
        raise ValueError(f"must be a whole number, got {_shown(value)}")
    return int(number)


def _text(value: Any) -> str:
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise ValueError(f"must be text, got {_shown(value)}")


def _list(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    names = [_text(item).strip() for item in items]
    return [name for name in names if name]


def _numbers(value: Any) -> list[float]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [_float(item) for item in items]


def _number(value: Any) -> int | float:
    number = _float(value)
    return int(number) if number == int(number) else number


def _any(value: Any) -> Any:
    return value


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping, or one as JSON text, as transformers takes it."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            raise ValueError(f"must be a mapping, got {_shown(value)}") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"must be a mapping, got {_shown(value)}")


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool, "int": _int, "float": _float, "text": _text, "list": _list, "numbers": _numbers, "number": _number, "any": _any,
    "mapping": _mapping,
}  # fmt: skip


PREFERENCE_STAGES = ("rm", "dpo", "kto")
"""LLaMA-Factory's stages on rows of preferences."""


class Draft:
    """Our config, as it is filled key by key.

    Attributes:
        values: of the file.
        name: of the file.
        verb: what it is for.
        config: in our schema; `?` for what is required and missing.
        origins: our dotted key: where the value comes from.
        names: our dotted key: the key of the file.
        fates: of keys whose fate depends on values, with a note.
        eval_sources: the sources of eval_dataset.
    """

    def __init__(self, values: Values, name: str, *, verb: str, tool: str = "LLaMA-Factory") -> None:
        self.values, self.name, self.verb, self.tool = values, name, verb, tool
        self.config: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.fates: dict[str, tuple[Fate, str]] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.eval_sources: list[dict[str, Any]] = []

    def drop(self, *ours: str) -> None:
        """Takes keys back, e.g. since an override of ours says the same in another way."""
        for key in ours:
            section, _, name = key.partition(".")
            del self.config[section][name], self.origins[key]

    def put(self, ours: str, value: Any, *keys: str) -> None:
        """Sets one of our keys; `keys` are those of the file that decide it, the first given one is
        its origin.
        """
        *sections, last = ours.split(".")
        target = self.config
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
        given = next((key for key in keys if key in self.values.given), None)
        default = f"{self.name}: {self.tool}'s default"
        self.origins[ours] = self.values.places[given] if given else default
        if given:
            self.names[ours] = given

    def put_if_set(self, ours: str, key: str) -> None:
        """Carries a value that is not LLaMA-Factory's default."""
        if self.values.is_set(key):
            self.put(ours, self.values[key], key)

    def refuse(self, key: str, why: str, fix: str) -> None:
        """A problem with the value of a key that has other values that are fine."""
        value = self.values[key]
        shown = ", ".join(value) if isinstance(value, list) else value
        place = self.values.place(key)
        self.problems.append(Problem(f"`{key}: {shown}` is not available", place, why, fix))
        self.fates[key] = ("refused", fix)

    def ignore(self, key: str, note: str) -> None:
        """Marks a key that has no effect beside the others of this file."""
        self.fates[key] = ("ignored", note)


Rule = tuple[bool, str, str, str]
"""Whether it is broken; the key; what is wrong; the remedy."""


def find_contradictions(values: Values, verb: str) -> dict[str, Problem]:
    """By key, a problem for each pair of keys that contradict each other.

    Args:
        values: of the file, or LLaMA-Factory's defaults.
        verb: what the file is for.
    """
    rules = [*_of_method(values), *_of_data(values, verb), *_of_evaluation(values, verb)]
    return {key: _problem(values, key, what, fix) for is_broken, key, what, fix in rules if is_broken}


def _problem(values: Values, key: str, what: str, fix: str) -> Problem:
    return Problem(f"{key}: {what}", values.place(key), "", fix)


def _of_method(values: Values) -> list[Rule]:
    is_lora = values["finetuning_type"] == "lora"
    kind = values["finetuning_type"]
    only_lora = [
        (key, values[key] not in (None, False))
        for key in ("adapter_name_or_path", "loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
    ]
    return [
        *(
            (given and not is_lora, key, f"only with `finetuning_type: lora`, not {kind}", "remove it")
            for key, given in only_lora
        ),
        (
            values["use_dora"] and values["use_rslora"],
            "use_rslora",
            "an adapter is DoRA or rsLoRA, not both",
            "remove one of use_dora and use_rslora",
        ),
        (
            values["use_llama_pro"] and kind != "freeze",
            "use_llama_pro",
            "only with `finetuning_type: freeze`",
            "remove it",
        ),
        (values["bf16"] and values["fp16"], "fp16", "bf16 is set, too", "remove one of them"),
        (
            values["max_samples"] is not None and values["max_samples"] < 1,
            "max_samples",
            "must be at least 1",
            "remove it",
        ),
        (values["lora_rank"] < 1, "lora_rank", "must be at least 1", "set it to 8"),
    ]


def _of_data(values: Values, verb: str) -> list[Rule]:
    stage, streams = values["stage"], values["streaming"]
    names, probabilities = values["dataset"] or [], values["interleave_probs"]
    size = values["val_size"]
    return [
        (verb == "train" and not names, "dataset", "there is no dataset to train on", "add `dataset: NAME`"),
        *(
            (bool(values[key]) and stage != "sft", key, f"only with `stage: sft`, not {stage}", "remove it")
            for key in ("neat_packing", "train_on_prompt", "mask_history", "predict_with_generate")
        ),
        (
            values["mask_history"] and values["train_on_prompt"],
            "mask_history",
            "it trains on the last answer alone, train_on_prompt on everything",
            "remove one of them",
        ),
        (streams and values["max_steps"] < 1, "streaming", "it needs max_steps", "add `max_steps: N`"),
        (streams and 0 < size < 1, "val_size", "with streaming a number of rows", "set it to a whole number"),
        (
            streams and values["max_samples"] is not None,
            "max_samples",
            "not with streaming",
            "remove one of them",
        ),
        (
            probabilities is not None and values["mix_strategy"] == "concat",
            "interleave_probs",
            "only with an interleaving mix_strategy",
            "set mix_strategy to interleave_under, interleave_over or interleave_once",
        ),
        (
            probabilities is not None
            and values["mix_strategy"] != "concat"
            and len(probabilities) != len(names),
            "interleave_probs",
            f"{len(probabilities or [])} probabilities for {len(names)} datasets",
            "set one for each dataset",
        ),
        (
            values["train_sampling_strategy"] == "sequential",
            "train_sampling_strategy",
            "rows are shuffled in each epoch",
            "remove it",
        ),
        (
            isinstance(values["accelerator_config"], dict)
            and bool(values["accelerator_config"].get("split_batches")),
            "accelerator_config",
            "split_batches divides a batch over the ranks, and batches are per rank here",
            "remove it, and set per_device_train_batch_size",
        ),
        (bool(size) and not names, "val_size", "there is no dataset to split", "add `dataset: NAME`"),
        (size < 0, "val_size", "must be a share or a number of rows", "set it to 0.1"),
    ]


def _of_evaluation(values: Values, verb: str) -> list[Rule]:
    has_eval = bool(values["eval_dataset"]) or bool(values["val_size"])
    strategy, keeps_best = values["eval_strategy"], values["load_best_model_at_end"]
    by_best = values["save_strategy"] == "best"
    steps, save_steps = values["eval_steps"] or values["logging_steps"], values["save_steps"]
    asked = [key for key in ("do_eval", "do_predict", "predict_with_generate") if values[key]]
    uneven = strategy == "steps" and bool(steps) and save_steps / steps % 1 > 1e-9
    return [
        (
            bool(values["eval_dataset"]) and bool(values["val_size"]),
            "val_size",
            "eval_dataset is set, too",
            "remove one of them",
        ),
        (
            strategy != "no" and not has_eval,
            "eval_strategy",
            "there are no rows to evaluate on",
            "add `eval_dataset: NAME` or `val_size: 0.1`",
        ),
        *(
            (
                strategy == "no" and not has_eval,
                key,
                "there are no rows for it",
                "add `eval_dataset: NAME` or `val_size: 0.1`",
            )
            for key in asked[:1]
        ),
        (
            values["do_predict"] and values["stage"] == "sft" and not values["predict_with_generate"],
            "do_predict",
            "predictions are generated",
            "add `predict_with_generate: true`",
        ),
        (
            verb in ("predict", "chat")
            and values["num_beams"] > 1
            and values["do_sample"]
            and values["temperature"] > 0,
            "num_beams",
            "beam search does not sample",
            "add `do_sample: false`, or remove it",
        ),
        *(
            (values[key] <= low, key, f"must be above {low:g}", "remove it")
            for key, low in (("num_beams", 0), ("repetition_penalty", 0.0))
        ),
        (
            values["predict_with_generate"] and values["compute_accuracy"],
            "compute_accuracy",
            "not with predict_with_generate",
            "remove one of them",
        ),
        (
            keeps_best and not by_best and strategy != values["save_strategy"],
            "load_best_model_at_end",
            f"save_strategy is {values['save_strategy']}, and eval_strategy {strategy}",
            "set both to steps or to epoch",
        ),
        (
            keeps_best and not by_best and strategy == values["save_strategy"] and uneven,
            "load_best_model_at_end",
            f"save_steps {save_steps:g} is not a multiple of eval_steps {steps:g}",
            "save where it is evaluated",
        ),
        (
            values["early_stopping_steps"] is not None and strategy == "no",
            "early_stopping_steps",
            "it counts evaluations, and there are none",
            "set eval_strategy",
        ),
        (
            verb == "train" and values["infer_backend"] != "huggingface",
            "infer_backend",
            "another engine cannot train",
            "remove it",
        ),
    ]

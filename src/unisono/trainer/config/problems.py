"""The problems of a config in plain words: from the errors of its validation, and the secrets in
it.

A config holds no secrets, since it is kept with the results and shown to others.
"""

import re
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from unisono.base.errors import Problem
from unisono.base.text import is_secret, nearest, one_line
from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import (
    NO_VARIABLES,
    KeyPath,
    KeyPlaces,
    Takes,
    all_keys,
    describe,
    keys_of,
    section_in,
    words_in,
)

_SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|access_?key)s?$", re.IGNORECASE)
_NOT_SECRETS = (
    "add_tokens",
    "add_special_tokens",
    "init_special_tokens",
    "control_tokens",
    "split_special_tokens",
)
_WHY_NO_SECRETS = "configs are stored with the results and shared"


def find_secrets(value: Any, places: KeyPlaces, key: KeyPath = ()) -> dict[KeyPath, Problem]:
    """A problem for every secret in a tree of values, without the secret itself."""
    if not isinstance(value, dict | list):
        problem = _judge_value(value, places, key)
        return {key: problem} if problem else {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        k: secret for name, inner in items for k, secret in find_secrets(inner, places, (*key, name)).items()
    }


def _judge_value(value: Any, places: KeyPlaces, key: KeyPath) -> Problem | None:
    name = ".".join(map(str, key))
    if is_secret(value):
        is_url = "://" in value
        what = "a URL with credentials" if is_url else "what looks like an access token"
        fix = (
            "remove it, and set it in the environment of the storage backend (for s3: AWS_ACCESS_KEY_ID …)"
            if is_url
            else "remove it, and set it in the environment (for the hub: HF_TOKEN)"
        )
        return Problem(f"{name} holds {what}", places.of(key), _WHY_NO_SECRETS, fix)
    if isinstance(value, str) and value and key and names_secret(str(key[-1])):
        fix = "remove it, and set it in the environment (for the hub: HF_TOKEN)"
        return Problem(f"{name} looks like a secret", places.of(key), _WHY_NO_SECRETS, fix)
    return None


_VARIABLE = re.compile(
    r"\$\{[^}\n]+\}|\$\([^)\n]+\)|(?:^|(?<=/))\$[A-Za-z_]\w*(?=$|/)|\$[A-Z_][A-Z0-9_]+|%[A-Z_]{2,}[A-Z0-9_]*%"
)
"""`${NAME}`, `$(command)`, `$NAME` as a part of a path, names in capitals anywhere, and `%NAME%` as
on Windows; a `$` at the end of a pattern is none.
"""
_TEXTS = (("data", "system"), ("diffusion", "prompts"), ("reasons",))
"""Keys of texts, which may hold anything."""


def find_variables(value: Any, places: KeyPlaces, key: KeyPath = ()) -> dict[KeyPath, Problem]:
    """A problem for every value that asks for a variable, e.g. `${NAME}` or `$NAME/…`: a file says
    what it says, on every machine.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            k: problem
            for name, inner in items
            for k, problem in find_variables(inner, places, (*key, name)).items()
        }
    is_text = any(key[: len(text)] == text for text in _TEXTS)
    match = _VARIABLE.search(value) if isinstance(value, str) and not is_text else None
    if match is None:
        return {}
    name, variable = ".".join(map(str, key)), one_line(match[0], limit=_LONGEST_VALUE)
    whole = next((".".join(map(str, key[:at])) for at, part in enumerate(key) if isinstance(part, int)), None)
    if whole is not None:
        fix = (
            f"write the value, or use KEY=VALUE on the command line with all of {whole}: items of a list have"
            " no keys"
        )
    elif variable.startswith("%"):
        fix = "write the value, or use KEY=VALUE on the command line"
    else:
        command = f'"{name}={one_line(value, limit=_LONGEST_VALUE)}"'
        fix = f"write the value, or use KEY=VALUE on the command line, where the shell expands it: {command}"
    return {key: Problem(f"{name} has the variable {variable}", places.of(key), NO_VARIABLES, fix)}


def names_secret(key: str) -> bool:
    """Whether a key of this name holds a secret, e.g. `hf_hub_token`."""
    return bool(_SECRET_KEY.search(key)) and key not in _NOT_SECRETS


_EXAMPLES = {
    "model": "model: Qwen/Qwen3-0.6B",
    "model.path": "model: {path: Qwen/Qwen3-0.6B}",
    "data": "data: {train: data/train.jsonl}",
    "data.train": "train: data/train.jsonl",
    "output_dir": "output_dir: runs/first",
}
_SPECIAL = ("extra_forbidden", "missing", "value_error", "invalid_key")
_LONGEST_VALUE = 60  # characters of a value in a message


def problems_of(
    error: ValidationError, raw: dict[str, object], places: KeyPlaces
) -> dict[KeyPath, list[Problem]]:
    """The problems, by key."""
    by_key: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_key.setdefault(_key_of(item, raw), []).append(item)
    problems: dict[KeyPath, list[Problem]] = {}
    for key, items in by_key.items():
        has_inner = any(len(other) > len(key) and other[: len(key)] == key for other in by_key)
        if has_inner and not any(item["type"] in _SPECIAL for item in items):
            continue  # a union reports an error for each member; the actual problem is deeper
        problems[key] = _problems_of_key(key, items, places)
    return problems


def _key_of(item: Any, raw: Any) -> KeyPath:
    """The key of an error, without the parts that pydantic inserts for members of a union.

    A part is a key if the value has it; the last part may be a missing key.
    """
    key: list[str | int] = []
    value = raw
    for part in item["loc"]:
        if _has(value, part):
            value = value[part]
            key.append(part)
    return (*key, item["loc"][-1]) if _is_missing_key(item) else tuple(key)


def _is_missing_key(item: Any) -> bool:
    """Whether a section lacks a key; for a list that is too short pydantic reports `missing`,
    too.
    """
    return item["type"] == "missing" and isinstance(item["loc"][-1], str)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _problems_of_key(key: KeyPath, items: list[Any], places: KeyPlaces) -> list[Problem]:
    """The problems of one key: unknown, missing, an invalid value, or a wrong type."""
    name, where = ".".join(map(str, key)), places.of(key)
    item = next((item for item in items if item["type"] in _SPECIAL), items[0])
    kind = item["type"]
    if kind == "extra_forbidden":
        return [Problem(f"unknown key `{name}`", where, "", _near_key(key))]
    if _is_missing_key(item):
        example = _EXAMPLES.get(name, name)
        return [Problem(f"the key `{name}` is missing", where, "it has no default", f"add `{example}`")]
    if kind == "invalid_key":
        return [Problem(f"the key `{name}` is not text", where, "", "keys must be text")]
    if kind == "value_error":
        text = str(item["ctx"]["error"])
        if not key:
            return [_contradiction(line, places) for line in text.splitlines()]
        return [Problem(f"{name}: {one_line(text)}", where)]
    annotation, metadata = _type_at(key)
    what = f"{name}: must be {describe(annotation, metadata)}{_shown(item['input'])}"
    return [Problem(what, where, "", _type_fix(item, annotation, metadata))]


def _contradiction(text: str, places: KeyPlaces) -> Problem:
    """The problem from a line of the root validator: `key: what; remedy`, or with why between."""
    name = text.partition(":")[0]
    what, _, fix = text.partition("; ")
    why, _, fix = fix.rpartition("; ")
    key = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    return Problem(one_line(what), places.of(key), one_line(why), one_line(fix))


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return f", got a {'section' if isinstance(value, dict) else 'list'}"
    if value is None:
        return ", got null"
    return "" if is_secret(value) else f", got {one_line(repr(value), limit=_LONGEST_VALUE)}"


def _type_fix(item: Any, annotation: Any, metadata: list[Any]) -> str:
    value = item["input"]
    if isinstance(value, str):
        if value.lower() in ("none", "nil") and type(None) in get_args(annotation):
            return "write null"
        words = words_in(annotation)
        words += [word for item in metadata if isinstance(item, Takes) for word in item.words]
        near = "cuda" if value == "gpu" and "cuda" in words else nearest(value, words)
        return f"did you mean `{near}`?" if near else ""
    takes_any_text = str in (annotation, *get_args(annotation)) and not any(
        isinstance(m, Takes) for m in metadata
    )
    return f"put it in quotes: '{value}'" if takes_any_text and isinstance(value, int | float) else ""


_OTHER_NAMES = {
    "epochs": "duration: 3 epochs", "num_epochs": "duration: 3 epochs",
    "num_train_epochs": "duration: 3 epochs", "steps": "duration: 500 steps",
    "max_steps": "duration: 500 steps", "batch_size": "batch.global", "global_batch_size": "batch.global",
    "micro_batch_size": "batch.micro", "per_device_train_batch_size": "batch.per_rank",
    "gradient_accumulation_steps": "batch.accumulate", "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule", "warmup_ratio": "optim.warmup", "warmup_steps": "optim.warmup",
    "max_seq_length": "data.max_length", "cutoff_len": "data.max_length", "dataset": "data.train",
    "lora_r": "adapter.rank", "lora_rank": "adapter.rank", "lora_alpha": "adapter.alpha",
    "save_steps": "checkpoint.every", "eval_steps": "eval.every", "bf16": "model.dtype",
    "model_name_or_path": "model",
}  # fmt: skip
"""Names of other trainers, where one of ours is not like them."""


def _near_key(key: KeyPath) -> str:
    """A suggestion for a misspelled key: in this section, or the same name in a different section,
    or that of another trainer.
    """
    annotation, _ = _type_at(key[:-1])
    section = section_in(annotation)
    known = keys_of(section) if section else []
    word = str(key[-1])
    near = (_OTHER_NAMES.get(word) if len(key) == 1 else None) or nearest(word, known)
    if near:
        return f"did you mean `{near}`?"
    if key[:-1] in (("data",), ("data", "train"), ("data", "eval")) and word in keys_of(SourceSection):
        root = "data.eval" if "eval" in key else "data.train"
        return f"it belongs to a source: {root}: [{{path: FILE, {word}: …}}]"
    elsewhere = [dotted for dotted in all_keys(RunConfig) if dotted.rpartition(".")[2] == word]
    if elsewhere:
        return f"did you mean `{elsewhere[0]}`?"
    return f"known keys here: {', '.join(known)}"


def _type_at(key: KeyPath) -> tuple[Any, list[Any]]:
    """The type of a key, and its bounds."""
    annotation: Any = RunConfig
    metadata: list[Any] = []
    for part in key:
        section = section_in(annotation)
        if isinstance(part, int) or section is None:
            annotation, metadata = _item_of(annotation), []
            continue
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        if part not in fields:
            return Any, []
        annotation, metadata = fields[part].annotation, fields[part].metadata
    return annotation, metadata


def _item_of(annotation: Any) -> Any:
    """The type of a list's items or of a mapping's values."""
    if get_origin(annotation) in (list, dict, tuple):
        return get_args(annotation)[-1]
    inner = [_item_of(argument) for argument in get_args(annotation)]
    return next((item for item in inner if item is not Any), Any)

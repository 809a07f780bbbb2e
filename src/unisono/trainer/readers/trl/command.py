"""A command of TRL as the keys that it sets: `trl sft …`, or a script of TRL with arguments."""

import re
import shlex
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from unisono.base.errors import ConfigError
from unisono.base.text import one_line
from unisono.trainer.config.yaml_file import KeyPath, parse_value, read_yaml

_TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "orpo", "cpo")
_SCRIPT = re.compile(r"(?:^|/)(\w+)\.py$|^trl\.scripts\.(\w+)$")
_WORDS = {"reward_modeling": "reward"}


@dataclass
class TrlCommand:
    """What a command says.

    Attributes:
        trainer: e.g. `sft`; a script of TRL's may have another name.
        raw: the keys and their values.
        lines: of a file that `--config` names.
    """

    trainer: str
    raw: dict[str, object] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_command(text: str) -> TrlCommand:
    """The keys of a command.

    Raises:
        ConfigError: if it does not start a trainer of TRL, or an argument cannot be read.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise _unreadable(text, str(error)) from None
    first = next((i for i, word in enumerate(words) if _trainer_of(word, words[i - 1] if i else "")), None)
    if first is None:
        raise _unreadable(text, "no `trl TRAINER` and no script of TRL is in it")
    command = TrlCommand(_trainer_of(words[first], words[first - 1] if first else ""))
    _add_launcher(command, words[:first])
    _add_arguments(command, words[first + 1 :], text)
    return command


def _unreadable(text: str, why: str) -> ConfigError:
    return ConfigError.of(
        f"{one_line(text, limit=80)} is not a command of TRL",
        where="--from-trl",
        why=why,
        fix="pass a YAML file with TRL's keys, or a command as `trl sft --model_name_or_path …`",
    )


def _trainer_of(word: str, before: str) -> str:
    if before == "trl" and word in _TRAINERS:
        return word
    script = _SCRIPT.search(word)
    name = "" if script is None else script[1] or script[2]
    return _WORDS.get(name, name)


def _add_launcher(command: TrlCommand, words: list[str]) -> None:
    """Of accelerate's file only the name counts: deepspeed_zero3.yaml, fsdp2.yaml."""
    for option, value in pairwise(words):
        if option == "--config_file" and (stage := re.search(r"zero([123])", value)):
            command.raw["deepspeed"] = {"zero_optimization": {"stage": int(stage[1])}}
        elif option == "--config_file" and "fsdp" in value:
            command.raw["fsdp"] = "full_shard"


def _add_arguments(command: TrlCommand, words: list[str], text: str) -> None:
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [value] if equals else []
        elif not name:
            raise _unreadable(text, f"{word!r} belongs to no argument")
        else:
            given[name].append(word)
    for config in given.pop("config", []):
        raw, lines = read_yaml(Path(config))
        command.raw, command.lines = {**raw, **command.raw}, dict(lines)
    for name, values in given.items():
        key, is_on = name, True
        if not values and name.startswith("no_"):
            key, is_on = name.removeprefix("no_"), False
        parsed = [parse_value(word, name="command") for word in values]
        command.raw[key] = is_on if not parsed else parsed[0] if len(parsed) == 1 else parsed

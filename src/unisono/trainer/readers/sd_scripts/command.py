"""LoRA-Scripts' `train.sh`, `train.ps1` and `train_by_toml.sh`, and scripts that call sd-scripts,
as the keys that they set.

A script is read and never run: its plain assignments `NAME=value`, and the arguments behind
`train_network.py`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import SOURCE_BYTES, read_given
from unisono.base.text import one_line
from unisono.trainer.config.yaml_file import KeyPath
from unisono.trainer.readers.sd_scripts.datasets import locate, read_toml
from unisono.trainer.readers.sd_scripts.keys import resolved

SUFFIXES = (".sh", ".bash", ".ps1", ".bat", ".cmd")
_FIXED: dict[str, object] = {
    "enable_bucket": True, "output_dir": "./output", "logging_dir": "./logs", "mixed_precision": "fp16",
    "save_precision": "fp16", "seed": 1337, "cache_latents": True, "prior_loss_weight": 1,
    "max_token_length": 225, "caption_extension": ".txt", "xformers": True, "shuffle_caption": True,
}  # fmt: skip
"""What train.sh always passes to train_network.py."""
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_PS1_ASSIGNMENT = re.compile(r"\s*\$([A-Za-z_]\w*)\s*=\s*(.*)$")
_PS1_VALUE = re.compile(r"""(?:"([^"`$]*)"|'([^']*)'|(\$true|\$false|[^\s"'`$#;()@]+))\s*(?:\#.*)?$""", re.I)
_GOES_ON = {".ps1": "`", ".bat": "^", ".cmd": "^"}
"""What a line ends with that goes on in the next one; in other shells a backslash."""
_MODEL = re.compile(r"\s*\$?(?:pretrained_model|config_file)\s*=")
"""The variable that each of LoRA-Scripts' scripts has."""
_END_OF_SETTINGS = "DO NOT MODIFY"
"""In the comment of LoRA-Scripts' scripts between the settings and what is done with them."""
_TRAINER = re.compile(r"(?:^|[/\\])(\w*train_network)\.py$")
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass
class Script:
    """The keys that a script sets, with their lines, and what of it cannot be read."""

    name: str
    raw: dict[str, object] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def set(self, key: str, value: Any, line: int) -> None:
        """Sets a key; a later value replaces an earlier one."""
        self.raw[key], self.lines[(key,)] = value, line

    def refuse(self, what: str, line: int, why: str, fix: str) -> None:
        """A problem with a line."""
        self.problems.append(Problem(what, f"{self.name}:{line}", why, fix))


def is_script(path: Path) -> bool:
    """Whether a config is a script of a shell."""
    return path.suffix.lower() in SUFFIXES


def read_script(path: Path) -> Script:
    """The keys of sd-scripts that a script sets.

    Raises:
        ConfigError: with all that cannot be read, or if it trains nothing that is known.
    """
    text = read_given(path, str(path), most_bytes=SOURCE_BYTES)
    if not isinstance(text, str):
        fault, where = text
        raise ConfigError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
    script = Script(str(path))
    lines = _joined_lines(text, mark=_GOES_ON.get(path.suffix.lower(), "\\"))
    end = next((i for i, (_, line) in enumerate(lines) if _END_OF_SETTINGS in line), None)
    settings = lines if end is None else lines[:end]
    variables = _assignments(
        script, settings, is_ps1=path.suffix.lower() == ".ps1", all_lines=end is not None
    )
    if end is not None and any(_MODEL.match(line) for _, line in settings):
        _fill_from_variables(script, variables)
    else:
        _fill_from_command(script, lines, variables)
    if script.problems:
        raise ConfigError(*script.problems)
    name = script.raw.get("config_file")
    if name:
        _lay_over_file(script, str(name), path)
    return script


def _joined_lines(text: str, *, mark: str) -> list[tuple[int, str]]:
    """The lines with their numbers; a line that ends with the mark of the shell together with the
    next ones.
    """
    joined: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.rstrip()
        if goes_on:
            first, before = joined[-1]
            joined[-1] = (first, f"{before} {stripped}")
        else:
            joined.append((number, stripped))
        goes_on = stripped.endswith(mark) and not stripped.lstrip().startswith("#")
        if goes_on:
            first, before = joined[-1]
            joined[-1] = (first, before[:-1])
    return joined


def _assignments(
    script: Script, lines: list[tuple[int, str]], *, is_ps1: bool, all_lines: bool
) -> dict[str, tuple[str, int]]:
    """The plain assignments with their lines.

    With `all_lines` a line that is none, and no comment, is a problem.
    """
    assignments: dict[str, tuple[str, int]] = {}
    pattern = _PS1_ASSIGNMENT if is_ps1 else _ASSIGNMENT
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = pattern.match(line)
        value = None if match is None else _ps1_value(match[2]) if is_ps1 else _bash_value(match[2])
        if match is not None and value is not None:
            assignments[match[1]] = (value, number)
        elif all_lines:
            script.refuse(
                f"`{one_line(line.strip(), limit=60)}` is not a plain assignment",
                number,
                "the script is read, not run",
                (
                    "write NAME=value with the value itself"
                    if not is_ps1
                    else "write $NAME = value with the value itself"
                ),
            )
    return assignments


def _bash_value(text: str) -> str | None:
    """The value behind `NAME=`; None if a shell would have to work it out."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None
    asks_shell = not text.startswith("'") and re.search(r"[$`]|^\(", text.split(" #")[0])
    # `NAME=value command`, `NAME= command`
    is_command = len(words) > 1 or (bool(words) and text[:1].isspace())
    if asks_shell or is_command:
        return None
    return words[0] if words else ""


def _ps1_value(text: str) -> str | None:
    match = _PS1_VALUE.match(text.strip())
    if match is None:
        return None
    value = next(group for group in match.groups() if group is not None)
    return {"$true": "1", "$false": "0"}.get(value.lower(), value)


def _fill_from_variables(script: Script, variables: dict[str, tuple[str, int]]) -> None:
    """What LoRA-Scripts' own script makes of its variables."""
    values = {name: value for name, (value, _) in variables.items()}
    if "pretrained_model" in values:
        for key, value in _FIXED.items():
            script.raw[key] = value
        script.raw["log_with"] = "all" if values.get("use_wandb") == "1" else "tensorboard"
    for name, (value, line) in variables.items():
        if name == "clip_skip" and values.get("model_type", "sd1.5") != "sd1.5":
            continue  # passed with 1.5 only
        script.set("train_batch_size" if name == "batch_size" else name, value, line)


def _fill_from_command(
    script: Script, lines: list[tuple[int, str]], variables: dict[str, tuple[str, int]]
) -> None:
    """The arguments of the script's call of train_network.py."""
    for number, line in lines:
        if "train_network.py" not in line or line.lstrip().startswith("#"):
            continue
        words = _words(script, number, line, variables)
        at = next((i for i, word in enumerate(words) if _TRAINER.search(word)), None)
        if at is None:
            continue
        match = _TRAINER.search(words[at])
        assert match is not None
        kind = match[1].removesuffix("train_network").strip("_")
        if kind not in ("", "sdxl"):
            script.set("model_train_type", f"{kind}-lora", number)
        for key, values in _options(words[at + 1 :]):
            _set_option(script, key, values, number)
        return
    raise ConfigError.of(
        f"{script.name} calls no train_network.py",
        where=script.name,
        why=(
            "in a script, only the variables of LoRA-Scripts' train.sh and the arguments of sd-scripts'"
            " train_network.py are read"
        ),
        fix="pass the TOML file, or our config (`unisono init --out train.yaml`)",
    )


def _words(script: Script, number: int, line: str, variables: dict[str, tuple[str, int]]) -> list[str]:
    """The words of a command, with the script's own plain variables in place of their names."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in variables:
            return variables[name][0]
        script.refuse(
            f"${name} is not assigned in the script",
            number,
            "the script is read, not run",
            "write the value itself",
        )
        return ""

    try:
        return [_REFERENCE.sub(value_of, word) for word in shlex.split(line, comments=True)]
    except ValueError as error:
        raise ConfigError.of(
            "a command cannot be read",
            where=f"{script.name}:{number}",
            why=str(error),
            fix="close its quotes",
        ) from error


def _options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The options of a command with their values: `--name=value`, `--name value …` or `--name`."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def _set_option(script: Script, name: str, values: list[str], line: int) -> None:
    key = resolved(name)
    takes_list = key is not None and key.type in ("list", "numbers", "any")
    if not values and (key is None or key.type == "bool"):
        script.set(name, value=True, line=line)
    elif len(values) == 1 or (values and not takes_list):
        script.set(name, values[0] if len(values) == 1 else " ".join(values), line)
    else:
        script.set(name, values, line)


def _lay_over_file(script: Script, name: str, path: Path) -> None:
    """Reads the file that a script names, under the script's own keys."""
    file = locate(name if name.endswith(".toml") else f"{name}.toml", path)
    raw, _ = read_toml(file)
    below = {key: value for key, value in flat(raw).items() if key not in script.raw}
    script.raw = below | script.raw


def flat(raw: Mapping[str, object]) -> dict[str, object]:
    """The keys of a TOML file without the sections that they are in, as sd-scripts reads them; a
    preset's `[metadata]` is no setting.
    """
    flattened: dict[str, object] = {}
    for name, value in raw.items():
        if name != "metadata":
            flattened |= value if isinstance(value, dict) else {name: value}
    return flattened

"""The names that config keys have in other tools, from the tables by which their files are
translated, and the words of the field.

Used by scripts/config_page.py.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys
from unisono.trainer.readers.llamafactory.keys import KEYS
from unisono.trainer.readers.llamafactory.reader import V1_KEYS
from unisono.trainer.readers.sd_scripts.keys import KEYS as SD_SCRIPTS_KEYS

WORDS = Path(__file__).parent / "config_words.toml"
GUIDES = Path(__file__).parent.parent / "docs" / "how-to"
TABLES = {"TRL": "from-trl.md", "axolotl": "from-axolotl.md", "torchtune": "from-torchtune.md"}
"""Pages that have a table of a tool's keys and ours."""
_TRANSFORMERS = "Seq2SeqTrainingArguments"
"""The group of keys that LLaMA-Factory takes from transformers."""
_CODE = re.compile(r"`([^`]+)`")
_BELONGS = re.compile(r"\(?\bof `[^`]+`\)?")
_KEY = re.compile(r"[A-Za-z][\w.]*(: |$)")
_CHOICE = re.compile(r"[a-z_]+: (?!true|false)[a-z]+")
"""A key of which only one value is meant: `rl: dpo`."""


@dataclass(frozen=True, slots=True)
class About:
    """What config_words.toml has for a key; the file explains the fields."""

    example: str = ""
    with_: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    zh: tuple[str, ...] = ()


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(WORDS.read_text("utf-8"))


def about_keys() -> dict[str, About]:
    """What the file has for each key."""
    return {
        key: About(
            entry.get("example", ""), *(tuple(entry.get(name, ())) for name in ("with", "words", "zh"))
        )
        for key, entry in _file()["key"].items()
    }


def names_without_key() -> list[dict[str, Any]]:
    """Names that people look for and that have no key: `names`, and what holds in `en` and `zh`."""
    found: list[dict[str, Any]] = _file()["no_key"]
    return found


@cache
def other_names() -> dict[str, dict[str, list[str]]]:
    """By our key: the names of it, each with the tools that have it."""
    names: dict[str, dict[str, list[str]]] = {}
    for tool, theirs, ours in (*_of_readers(), *_of_guides()):
        if theirs == ours:
            continue
        tools = names.setdefault(ours, {}).setdefault(theirs, [])
        if tool not in tools:
            tools.append(tool)
    return names


def _of_readers() -> Iterator[tuple[str, str, str]]:
    """Tool, its key, our key: from the tables of tools whose files are read."""
    known = set(all_keys(RunConfig))
    for tool, table in (("LLaMA-Factory", KEYS), ("sd-scripts", SD_SCRIPTS_KEYS)):
        for key in table.values():
            if key.fate not in ("carried", "translated") and not key.same_as:
                continue
            for ours in (table[key.same_as] if key.same_as else key).ours.split(", "):
                if ours in known:
                    if key.group == _TRANSFORMERS:
                        yield "transformers", key.name, ours
                    yield tool, key.name, ours
    for name, target in V1_KEYS.items():
        ours = target.partition(":")[0]
        if ours in known and name not in KEYS:
            yield "LLaMA-Factory", name, ours


def _of_guides() -> Iterator[tuple[str, str, str]]:
    """The same from the tables for people."""
    for tool, page in TABLES.items():
        for line in (GUIDES / page).read_text("utf-8").splitlines():
            cells = line.strip("|").split(" | ")
            if line.startswith("| ") and len(cells) > 1:
                ours = list(_our_keys(cells[1]))
                names = [
                    code if _CHOICE.fullmatch(code) else code.partition(":")[0]
                    for code in _CODE.findall(_BELONGS.sub("", cells[0]))
                ]
                for name, key in _pairs([name for name in names if _KEY.match(name)], ours):
                    yield tool, name, key


def _our_keys(cell: str) -> Iterator[str]:
    """The keys in a cell; those `of a source` are below data.train."""
    known = set(all_keys(RunConfig))
    for code in _CODE.findall(cell):
        name = code.partition(":")[0]
        if "of a source" in cell and f"data.train.{name}" in known:
            yield f"data.train.{name}"
        elif name in known:
            yield name


def _pairs(names: list[str], keys: list[str]) -> Iterable[tuple[str, str]]:
    """One to one if there are as many of both; else all with all, unless both are several: which
    belong together is not known then.
    """
    if len(names) == len(keys):
        return zip(names, keys, strict=True)
    distinct = list(dict.fromkeys(keys))
    return (
        [(name, key) for name in names for key in distinct] if len(distinct) == 1 or len(names) == 1 else []
    )

"""Axolotl's datasets as sources of our schema."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.base.errors import Problem
from unisono.base.text import one_line

_LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""Names of `path` that are kinds of files; the files are in data_files."""
_ROWS = re.compile(r"(\w+)\[:(\d+)\]")
_PREFERENCE = (
    "chat_template",
    "chat_template.default",
    "bradley_terry.chat_template",
    "chatml.ultra",
    "llama3.ultra",
)
_IGNORED = (
    "ds_type",
    "trust_remote_code",
    "field_thinking",
    "template_thinking_key",
    "roles",
    "train_on_eot",
)
"""Fields without effect: the thought of an answer is found by its usual names."""
_READ = (
    *("path", "name", "split", "type", "data_files", "field_messages", "message_property_mappings", "field"),
    *("message_field_role", "message_field_content", "text_column", "field_chosen", "field_rejected"),
    *("chat_template", "roles_to_train", "train_on_eos", "field_tools"),
)
_HARMLESS: dict[str, tuple[object, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn",),
    "chat_template": ("tokenizer_default",),
}
TYPES = "alpaca, chat_template, completion and pretrain; with rl or reward_model chat_template.default and *.ultra"


@dataclass(frozen=True)
class Sources:
    """What a list of datasets means.

    Attributes:
        entries: each a mapping that `SourceSection` accepts, one for each file.
        problems: what is not available, each with its line.
        are_texts: whether every token of all rows counts.
    """

    entries: list[dict[str, object]]
    problems: list[Problem]
    are_texts: bool


def read_sources(value: Any, key: str, where: str, *, has_pairs: bool) -> Sources:
    """The sources of `datasets`, `test_datasets` or `pretraining_dataset`.

    Args:
        value: of the key.
        key: its name.
        where: its place, for messages.
        has_pairs: whether the rows are preferences.
    """
    entries: list[dict[str, object]] = []
    problems: list[Problem] = []
    listed = value if isinstance(value, list) else [value]
    for number, given in enumerate(listed):
        name = f"{key}[{number}]"
        raw = {"path": given} if isinstance(given, str) else given
        if not isinstance(raw, Mapping) or not isinstance(raw.get("path"), str):
            problems.append(
                Problem(f"{name} has no `path`", where, "it is a dataset", "write {path: …, type: …}")
            )
            continue
        entry = _AxolotlDataset(
            dict(raw), name, where, has_pairs=has_pairs, is_pretraining=key == "pretraining_dataset"
        )
        entries += entry.sources()
        problems += entry.problems
    return Sources(entries, problems, bool(entries) and all(e.get("format") == "text" for e in entries))


class _AxolotlDataset:
    """One dataset of a list."""

    def __init__(
        self, raw: dict[str, Any], name: str, where: str, *, has_pairs: bool, is_pretraining: bool
    ) -> None:
        self._raw, self._name, self._where = raw, name, where
        self._has_pairs, self._is_pretraining = has_pairs, is_pretraining
        self.problems: list[Problem] = []

    def sources(self) -> list[dict[str, object]]:
        """One for each of its files."""
        for field, value in self._raw.items():
            if value is None or field in _IGNORED or value in _HARMLESS.get(field, ()):
                continue
            if field not in _READ or field in _HARMLESS:
                self._refuse(field, "it is not read here", "remove it, or change the rows")
        shape = self._shape()
        return [{**place, **shape} for place in self._places()]

    def _refuse(self, field: str, why: str, fix: str) -> None:
        shown = one_line(str(self._raw[field]), limit=60)
        self.problems.append(
            Problem(f"`{field}: {shown}` of {self._name} is not available", self._where, why, fix)
        )

    def _places(self) -> Iterator[dict[str, object]]:
        path, files = self._raw["path"], self._raw.get("data_files")
        if files is not None:
            names = files if isinstance(files, list) else [files]
            for name in names:
                yield {"path": str(name) if path in _LOADERS else f"hf://datasets/{path}/{name}"}
            return
        place: dict[str, object] = {"path": path}
        if self._raw.get("name"):
            place["subset"] = str(self._raw["name"])
        split = self._raw.get("split")
        if isinstance(split, str) and (rows := _ROWS.fullmatch(split)):
            place |= {"split": rows[1], "rows": int(rows[2])}
        elif split:
            place["split"] = str(split)
        yield place

    def _shape(self) -> dict[str, object]:
        """Format and columns."""
        kind = self._raw.get("type") or ("pretrain" if self._is_pretraining else None)
        if kind in ("completion", "pretrain"):
            column = self._raw.get("field") or self._raw.get("text_column") or "text"
            return {"format": "text", **({} if column == "text" else {"columns": {"text": str(column)}})}
        if self._has_pairs and kind in _PREFERENCE:
            return self._pairs()
        if kind == "alpaca" and not self._has_pairs:
            return {"format": "alpaca-prompt"}
        if kind == "chat_template" and not self._has_pairs:
            return self._turns()
        self._raw.setdefault("type", None)
        self._refuse("type", f"the types here are {TYPES}", "use one of these, or write the rows as messages")
        return {}

    def _pairs(self) -> dict[str, object]:
        names = {ours: self._raw.get(f"field_{ours}") for ours in ("messages", "chosen", "rejected")}
        columns = {ours: theirs for ours, theirs in names.items() if theirs not in (None, ours)}
        if self._raw["type"] == "bradley_terry.chat_template":
            columns["prompt"] = "input"
        if self._raw.get("message_property_mappings") not in (None, {"role": "role", "content": "content"}):
            self._refuse(
                "message_property_mappings", "turns of preferences have role and content", "rename them"
            )
        return {"format": "preference", **({"columns": columns} if columns else {})}

    def _turns(self) -> dict[str, object]:
        given = self._raw.get("message_property_mappings")
        keys = given if isinstance(given, Mapping) else {}
        role = keys.get("role") or self._raw.get("message_field_role") or "role"
        text = keys.get("content") or self._raw.get("message_field_content") or "content"
        odd = sorted(set(keys) - {"role", "content"})
        if odd:
            self._refuse("message_property_mappings", f"{odd[0]} of a turn has one name", "remove it")
        field = self._raw.get("field_messages") or "messages"
        renamed: dict[str, object] = (
            {"tools": self._raw["field_tools"]} if self._raw.get("field_tools") else {}
        )
        if (role, text) == ("role", "content"):
            return _shaped("messages", renamed | ({} if field == "messages" else {"messages": field}))
        shape = _shaped("sharegpt", renamed | ({} if field == "conversations" else {"conversations": field}))
        return (
            shape
            if (role, text) == ("from", "value")
            else {**shape, "tags": {"role_tag": role, "content_tag": text}}
        )


def _shaped(name: str, columns: Mapping[str, object]) -> dict[str, object]:
    return {"format": name, **({"columns": dict(columns)} if columns else {})}

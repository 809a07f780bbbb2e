"""LLaMA-Factory's dataset_info.json: what its entries mean, as sources of our schema.

An entry without `columns` or `tags` has LLaMA-Factory's default names. One with `columns` has only
those that it names, and the same holds for `tags`: `{"columns": {"prompt": "text"}}` also switches
`query` and `response` off.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import SETTINGS_BYTES, fault_of, parse_json, path_below, read_given
from unisono.base.text import nearest, one_line
from unisono.trainer.config.problems import find_secrets
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces

_FILE = "dataset_info.json"
_REMOTE = "REMOTE:"
_SOURCES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
_TYPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys((*_SOURCES, "formatting", "subset", "split", "folder"), (str, "text")),
    "ranking": (bool, "true or false"),
    "num_samples": (int, "a whole number"),
    "columns": (dict, "an object"),
    "tags": (dict, "an object"),
}
_IGNORED = ("file_sha1",)  # of LLaMA-Factory's earlier versions
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
_COLUMNS: dict[str, str | None] = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": None,
    "messages": "conversations",
    "system": None,
    "tools": None,
    "images": None,
    "videos": None,
    "audios": None,
    "chosen": None,
    "rejected": None,
    "kto_tag": None,
}
_TAGS: dict[str, str | None] = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_FILE_TYPES = ("arrow", "csv", "json", "jsonl", "ndjson", "parquet", "tsv", "txt")
_CLOUDS = ("s3://", "gs://", "gcs://")
_ALPACA = {
    "instruction": "prompt",
    "input": "query",
    "output": "response",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
"""Our columns, and those of an entry."""
_KEPT = ("chosen", "rejected", "label", "images", "videos")


@dataclass(frozen=True, slots=True)
class _Info:
    """The file, and where each of its keys is."""

    name: str
    directory: str
    entries: dict[str, object]
    places: KeyPlaces


def read_datasets(
    names: Sequence[str],
    dataset_dir: str,
    *,
    where: str,
    file_where: str = "",
    stage: str,
    max_samples: int | None,
    use_modelscope: bool = False,
    use_openmind: bool = False,
) -> list[dict[str, object]]:
    """The sources of the named datasets, each a mapping that `SourceSection` accepts.

    A name that occurs twice counts once.

    Args:
        names: the datasets; spaces around them do not count.
        dataset_dir: the directory of dataset_info.json and of its files, relative to the working
            directory; `ONLINE`: the names are hub ids; `REMOTE:user/repo`: a hub dataset that has
            the file.
        where: the place that names the datasets, for messages: `FILE:LINE`.
        file_where: the place that names dataset_dir; empty: `where`.
        stage: `pt`, `sft`, `rm`, `ppo`, `dpo` or `kto`.
        max_samples: the first rows of each source; None: all.
        use_modelscope: whether `ms_hub_url` goes before `hf_hub_url`.
        use_openmind: whether `om_hub_url` goes before `hf_hub_url`.

    Raises:
        ConfigError: with all problems, each with file and line.
    """
    unique_names = list(dict.fromkeys(name.strip() for name in names))
    problems: list[Problem] = []
    if dataset_dir == "ONLINE":
        entries = [_DatasetEntry(name, {"hf_hub_url": name}, None, where) for name in unique_names]
    else:
        info = _read_info(dataset_dir, file_where or where)
        problems += find_secrets(info.entries, info.places).values()
        problems += [_unknown(name, info, where) for name in unique_names if name not in info.entries]
        entries = [
            _DatasetEntry(name, info.entries[name], info, where)
            for name in unique_names
            if name in info.entries
        ]
    preferred = {"ms_hub_url": use_modelscope, "om_hub_url": use_openmind}
    for entry in entries:
        entry.check(stage, preferred)
    problems += [problem for entry in entries for problem in entry.problems]
    if problems:
        raise ConfigError(*problems)
    limit = {} if max_samples is None else {"rows": max_samples}
    return [entry.source(stage, preferred) | limit for entry in entries]


def _unknown(name: str, info: _Info, where: str) -> Problem:
    near = nearest(name, list(info.entries))
    known = ", ".join(list(info.entries)[:8]) or "none"
    return Problem(
        f"there is no dataset {one_line(repr(name), limit=80)} in {info.name}",
        where,
        f"it has {len(info.entries)}: {one_line(known, limit=160)}",
        f"did you mean `{near}`?" if near else f"add it to {info.name}, or use one of these",
    )


# ---- the file


def _read_info(dataset_dir: str, where: str) -> _Info:
    if dataset_dir.startswith(_REMOTE):
        path = _fetch(dataset_dir.removeprefix(_REMOTE), where)
        name = f"{dataset_dir}/{_FILE}"
    else:
        path = Path(dataset_dir) / _FILE
        name = str(path)
    text = _read_text(path, name, where)
    try:
        entries = parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError.of(
            f"{name} is not valid JSON",
            where=f"{name}:{error.lineno}:{error.colno}",
            why=error.msg,
            fix="fix the line",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            f"{name} is not valid JSON", where=f"{name}:1", why=one_line(str(error)), fix="fix the file"
        ) from error
    places = KeyPlaces(key_lines(text), name)
    if not isinstance(entries, dict):
        raise ConfigError.of(
            f"{name} is not an object of datasets",
            where=f"{name}:1",
            why=f"it is {_kind(entries)}",
            fix='write {"NAME": {"file_name": …}, …}',
        )
    return _Info(name, dataset_dir, entries, places)


def _read_text(path: Path, name: str, where: str) -> str:
    text = read_given(path, name, most_bytes=SETTINGS_BYTES)
    if isinstance(text, str):
        return text
    fault, location = text
    fix = "set dataset_dir to the directory that has it" if fault.is_missing else fault.fix
    raise ConfigError.of(fault.what, where=where if location == name else location, why=fault.why, fix=fix)


def _fetch(repo: str, where: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from unisono.guard.facts.environment import check_hub_answers, hub_silence, read_environment, read_hub

    folder = read_environment().hub_cache
    hub = read_hub(folder)
    silence = hub_silence(hub)
    check_hub_answers()
    try:
        return Path(
            hf_hub_download(repo_id=repo, filename=_FILE, repo_type="dataset", local_files_only=bool(silence))
        )
    except Exception as error:  # the hub's package passes on errors of several others
        why = f"{type(error).__name__}: {one_line(str(error), limit=200)}"
        if silence and isinstance(error, LocalEntryNotFoundError):
            why = f"it is not in {folder}, and {silence}"
        network = f"unset {hub.offline}" if hub.offline else "check the name and the network"
        raise ConfigError.of(
            f"{_FILE} of the hub dataset {one_line(repo, limit=80)} cannot be downloaded",
            where=where,
            why=why,
            fix=f"{network}, or set dataset_dir to a directory with {_FILE}",
        ) from error


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key path of a valid JSON text; of a key that occurs twice, the
    last.
    """
    lines: dict[KeyPath, int] = {}
    path: list[str | int] = []
    line, last = 1, ""
    for match in _TOKEN.finditer(text):
        sign = match[0]
        if sign == "\n":
            line += 1
        elif sign in "{[":
            path.append(0 if sign == "[" else "")
        elif sign in "}]":
            path.pop()
        elif sign == "," and isinstance(path[-1], int):
            path[-1] += 1
        elif sign == ":":
            path[-1] = json.loads(last)
            lines[tuple(path)] = line
        elif sign != ",":
            last = sign
    return lines


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = nearest(word, list(known))
    return f"did you mean `{near}`?" if near else f"use one of {', '.join(known)}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# ---- an entry


class _DatasetEntry:
    """An entry of the file.

    Attributes:
        problems: what `check` has found.
    """

    def __init__(self, name: str, value: Any, info: _Info | None, where: str) -> None:
        self.problems: list[Problem] = []
        self._name = name
        self._value: dict[str, Any] = value if isinstance(value, dict) else {}
        self._info = info
        self._where = where
        if not isinstance(value, dict):
            fix = 'write {"file_name": …, "formatting": …, "columns": {…}}'
            self._add(f"the dataset {name} is {_kind(value)}, not an object", fix=fix)

    def _place(self, *keys: str) -> str:
        return self._where if self._info is None else self._info.places.of((self._name, *keys))

    def _add(self, what: str, *keys: str, why: str = "", fix: str = "") -> None:
        self.problems.append(Problem(what, self._place(*keys), why, fix))

    def check(self, stage: str, preferred: Mapping[str, bool]) -> None:
        """Finds all that is wrong with the entry for a stage."""
        if self.problems:
            return
        self._check_keys()
        if self.problems:
            return
        self._check_source(preferred)
        self._check_stage(stage)
        self._check_columns(stage)

    def _check_keys(self) -> None:
        for key, value in self._value.items():
            if key in _IGNORED:
                continue
            if key not in _TYPES:
                self._add(
                    f"unknown key `{key}` of the dataset {self._name}", key, fix=_suggestion(key, _TYPES)
                )
                continue
            needed, words = _TYPES[key]
            is_right = isinstance(value, needed) and not (needed is int and isinstance(value, bool))
            if not is_right and (value is not None or key in (*_SOURCES, "formatting", "columns", "tags")):
                self._add(f"{key} of the dataset {self._name} is {_kind(value)}, not {words}", key)
        for section, known in (("columns", _COLUMNS), ("tags", _TAGS)):
            if isinstance(self._value.get(section), dict):
                self._check_inner(section, known)
        samples = self._value.get("num_samples")
        if isinstance(samples, int) and samples < 1:
            self._add(
                f"num_samples of the dataset {self._name} is {samples}", "num_samples", fix="set at least 1"
            )
        if self._formatting not in _FORMATTINGS:
            fix = _suggestion(str(self._formatting), _FORMATTINGS)
            what = (
                f"unknown formatting {one_line(repr(self._formatting), limit=60)} of the dataset {self._name}"
            )
            self._add(what, "formatting", fix=fix)

    def _check_inner(self, section: str, known: Mapping[str, str | None]) -> None:
        for key, value in self._value[section].items():
            if key not in known:
                self._add(
                    f"unknown key `{section}.{key}` of the dataset {self._name}",
                    section,
                    key,
                    fix=_suggestion(key, known),
                )
            elif not isinstance(value, str | None):
                self._add(
                    f"{section}.{key} of the dataset {self._name} is {_kind(value)}, not text", section, key
                )

    @property
    def _formatting(self) -> Any:
        return self._value.get("formatting", "alpaca")

    @property
    def _columns(self) -> dict[str, str | None]:
        named = self._value.get("columns")
        return _COLUMNS if named is None else {column: named.get(column) for column in _COLUMNS}

    @property
    def _tags(self) -> dict[str, str | None]:
        named = self._value.get("tags")
        return _TAGS if named is None else {tag: named.get(tag) for tag in _TAGS}

    def _source_key(self, preferred: Mapping[str, bool]) -> str | None:
        """The key of the one source that is used."""
        has = [key for key in _SOURCES if key in self._value]
        for key in ("ms_hub_url", "om_hub_url"):
            if key in has and (preferred.get(key) or "hf_hub_url" not in has):
                return key
        return has[0] if has else None

    def _check_source(self, preferred: Mapping[str, bool]) -> None:
        key = self._source_key(preferred)
        if key is None:
            known = ", ".join(_SOURCES)
            self._add(f"the dataset {self._name} has no source", fix=f"add one of {known}")
            return
        value = self._value[key]
        if self._directory.startswith(_REMOTE) and key in ("file_name", "hf_hub_url"):
            self._check_foreign(key, value)
        if key == "file_name":
            self._check_file(value)
        elif key == "cloud_file_name" and not value.startswith(_CLOUDS):
            self._add(
                f"{one_line(value, limit=80)} is not a URL of a cloud storage",
                key,
                fix="write s3://… or gs://…",
            )
        elif key == "script_url":
            why = "a loading script is code, which is not run"
            self._add(
                f"the dataset {self._name} is a loading script",
                key,
                why=why,
                fix="save its rows to a file, and set file_name to it",
            )
        elif key in ("ms_hub_url", "om_hub_url"):
            hub = "ModelScope" if key == "ms_hub_url" else "OpenMind"
            self._add(
                f"the dataset {self._name} comes from {hub}, and unisono does not download from there",
                key,
                fix="set its hf_hub_url, or download it and name the file in file_name",
            )

    def _check_foreign(self, key: str, value: str) -> None:
        """Refuses a name in a file of the hub that could lead to any file of this machine."""
        try:
            path_below(Path(), value)
        except ValueError as error:
            fix = "use a dataset_info.json that names datasets of the hub"
            self._add(f"{key} of the dataset {self._name} is not used", key, why=str(error), fix=fix)

    def _check_file(self, value: str) -> None:
        path = self._path(value)
        fault = fault_of(Path(path), path)
        if fault is not None and not fault.is_directory:
            why = (
                f"file_name is relative to dataset_dir ({self._directory})" if fault.is_missing else fault.why
            )
            self._add(fault.what, "file_name", why=why, fix=fault.fix)
        elif fault is None and Path(path).suffix.lower().removeprefix(".") not in _FILE_TYPES:
            self._add(
                f"{path} has an unsupported file type",
                "file_name",
                fix=f"use one of {', '.join(_FILE_TYPES)}",
            )
        split = self._value.get("split") or "train"
        if split != "train":
            self._add(
                f"the dataset {self._name} has the split {one_line(repr(split), limit=60)} of a file",
                "split",
                why="a file has the split train only",
                fix="remove split; for fewer rows set num_samples or max_samples",
            )

    @property
    def _directory(self) -> str:
        return "" if self._info is None else self._info.directory

    def _path(self, file_name: str) -> str:
        return os.path.join(self._directory, file_name)  # noqa: PTH118 - keeps the text as it was written

    def _check_stage(self, stage: str) -> None:
        """Rows of pairs are for rm and dpo, rows with a label for kto, and all others for the
        rest.
        """
        is_ranking, is_kto = self._value.get("ranking") is True, bool(self._columns["kto_tag"])
        if stage in ("rm", "dpo") and not is_ranking:
            self._add(
                f"the dataset {self._name} has no pairs, and stage {stage} needs them",
                fix="name a dataset with `ranking: true`",
            )
        elif stage not in ("rm", "dpo") and is_ranking:
            fix = "name a dataset without ranking, or set stage to rm or dpo"
            self._add(
                f"the dataset {self._name} has pairs (ranking), and stage is {stage}", "ranking", fix=fix
            )
        elif stage == "kto" and not is_kto:
            fix = "name the column in columns.kto_tag, or a different dataset"
            self._add(f"the dataset {self._name} has no kto_tag, and stage kto needs it", "columns", fix=fix)
        elif stage in ("sft", "pt") and is_kto and not is_ranking:
            fix = "name a different dataset, or set stage to kto"
            self._add(
                f"the dataset {self._name} has a kto_tag, and stage is {stage}", "columns", "kto_tag", fix=fix
            )

    def _check_media(self, stage: str) -> None:
        columns = self._columns
        if columns["audios"]:
            self._add(
                f"the dataset {self._name} has audios, and unisono trains on text, pictures and videos only",
                "columns",
                "audios",
                fix="remove columns.audios if its rows have none",
            )
        for name, what in (("images", "pictures"), ("videos", "videos")):
            if columns[name] and stage not in ("sft", "dpo", "kto"):
                self._add(
                    f"the dataset {self._name} has {name}, and stage is {stage}",
                    "columns",
                    name,
                    why=f"{what} are trained with the stages sft, dpo and kto only",
                    fix=f"remove columns.{name} if its rows are text",
                )

    def _check_columns(self, stage: str) -> None:
        columns, tags, form = self._columns, self._tags, self._formatting
        self._check_media(stage)
        trap = "naming one of the {0} switches off all that are not named"
        if self._value.get("ranking") is True and not (columns["chosen"] and columns["rejected"]):
            self._add(
                f"the dataset {self._name} is for ranking, without the columns chosen and rejected",
                "columns",
                fix="name both in columns",
            )
        if form == "alpaca" and not (columns["prompt"] or columns["query"]):
            self._add(
                f"the dataset {self._name} has neither prompt nor query",
                "columns",
                why=trap.format("columns"),
                fix="name columns.prompt",
            )
        elif form == "alpaca" and stage == "pt" and columns["history"]:
            self._add(
                f"the dataset {self._name} has a history, and stage is pt",
                "columns",
                "history",
                fix="remove columns.history: pretraining takes the text of prompt",
            )
        if form != "alpaca":
            if not columns["messages"]:
                self._add(
                    f"the dataset {self._name} has no column of messages",
                    "columns",
                    why=trap.format("columns"),
                    fix="name columns.messages",
                )
            if not (tags["role_tag"] and tags["content_tag"]):
                self._add(
                    f"the dataset {self._name} has no role_tag or no content_tag",
                    "tags",
                    why=trap.format("tags"),
                    fix="name tags.role_tag and tags.content_tag",
                )
            if stage == "pt":
                self._add(
                    f"the dataset {self._name} has conversations, and stage is pt",
                    "formatting",
                    fix="name a dataset of text, e.g. with columns.prompt: text",
                )

    def source(self, stage: str, preferred: Mapping[str, bool]) -> dict[str, object]:
        """The source, once `check` has found no problem."""
        key = self._source_key(preferred)
        assert key is not None
        value = self._value[key]
        source: dict[str, object] = {"path": self._path(value) if key == "file_name" else value}
        source |= self._shape(stage)
        if key == "hf_hub_url":
            source["split"] = self._value.get("split") or "train"
            source |= {name: self._value[name] for name in ("subset", "folder") if self._value.get(name)}
        if self._value.get("num_samples") is not None:
            source["samples"] = self._value["num_samples"]
        return source

    def _shape(self, stage: str) -> dict[str, object]:
        """Format, columns and tags of our schema.

        A column that LLaMA-Factory would not read is null.
        """
        theirs, form = self._columns, self._formatting
        if stage == "pt":
            parts = [name for name in (theirs["prompt"], theirs["query"]) if name]
            return {"format": "text", "columns": dict(zip(("text", "input"), parts, strict=False))}
        is_pairs, is_kto = self._value.get("ranking") is True, stage == "kto"
        if form == "alpaca":
            columns = {ours: theirs[name] for ours, name in _ALPACA.items()}
        else:
            column, other = ("conversations", "messages")[:: 1 if form == "sharegpt" else -1]
            columns = {column: theirs["messages"], other: None} | {n: theirs[n] for n in ("system", "tools")}
        columns |= {name: theirs[name] for name in ("images", "videos") if theirs[name]}
        if is_pairs or is_kto:
            unread = ("conversations", "messages") if form == "alpaca" else ("instruction",)
            columns = dict.fromkeys(unread) | columns
        if is_pairs:
            columns.pop("output", None)
            columns |= {"chosen": theirs["chosen"], "rejected": theirs["rejected"], "label": None}
        elif is_kto:
            columns |= {"label": theirs["kto_tag"], "chosen": None, "rejected": None}
        shape: dict[str, object] = {
            "format": "preference" if is_pairs or is_kto else form,
            "columns": {ours: name for ours, name in columns.items() if ours != name or ours in _KEPT},
        }
        return shape | ({} if form == "alpaca" else {"tags": dict(self._tags)})

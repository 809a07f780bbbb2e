"""The files of a language model and its rows, found without torch."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from unisono.base.errors import ModelError, UnisonoError
from unisono.base.files import expand, fault_of, path_below, read_text
from unisono.guard.facts import read_environment
from unisono.trainer.config.model_sections import AdapterSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import lf_name
from unisono.trainer.data.sources import find_local
from unisono.trainer.data.tokenizer import TOKENIZER_FILES
from unisono.trainer.families.family import InputFiles, labelled_sources, present
from unisono.trainer.model.directory import is_hub_id, locate_model
from unisono.trainer.model.file_settings import ADAPTER_FILE, adapter_directory
from unisono.trainer.model.files import read_json_object, weight_files

_MODEL = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def list_inputs(config: RunConfig) -> InputFiles:
    """Rows, template, model, tokenizer and code."""
    listed = InputFiles()
    for label, key, named in labelled_sources(config):
        try:
            files = find_local(named, key)
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        if files is None:
            listed.notes.append(f"{label} is not on this machine yet: compared after its rows are prepared")
        else:
            listed.data += _labelled(label, [file.path for file in files])
    if config.data.template and lf_name(config.data.template) is None:
        path = expand(config.data.template)
        fault = fault_of(path, config.data.template)
        if fault is None:
            listed.data.append((f"template: {path.name}", path))
        else:
            listed.notes.append(fault.what)
    _list_model(config, listed)
    return listed


def _labelled(label: str, files: list[Path]) -> list[tuple[str, Path]]:
    """Paths relative to the common folder of all files: the folder itself may differ between
    nodes.
    """
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [(f"{label}: {file.relative_to(folder).as_posix()}", file) for file in files]


def _list_model(config: RunConfig, listed: InputFiles) -> None:
    model = _directory(config.model.path, config.model.revision, listed)
    tokenizer = model
    if config.model.tokenizer:
        tokenizer = _directory(config.model.tokenizer, None, listed)
    if tokenizer is not None:
        # transformers chooses the class of a tokenizer by the config.json beside it
        more = ("config.json", "generation_config.json") if tokenizer != model else ()
        listed.tokenizer = present(tokenizer, (*TOKENIZER_FILES, *more))
    if model is not None:
        listed.model = present(model, _MODEL)
        if config.model.weights == "pretrained":
            _list_weights(model, listed)
    if config.adapter is not None:
        _list_adapters(config.adapter, listed)
    if config.preference.reference != "auto":
        _list_reference(config.preference.reference, listed)
    if config.model.trust_remote_code:
        for name, directory in (("model", model), ("tokenizer", tokenizer)):
            if directory is not None and (name == "model" or directory != model):
                listed.code += _code(name, directory)


def _list_adapters(section: AdapterSection, listed: InputFiles) -> None:
    named = [(f"adapter.merge.{i}", name) for i, name in enumerate(section.merge)]
    named += [("adapter.from", section.from_)] if section.from_ is not None else []
    for key, name in named:
        try:
            file = adapter_directory(name, key) / ADAPTER_FILE
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        listed.model.append((f"{key}: {ADAPTER_FILE}", file))


def _list_reference(named: str, listed: InputFiles) -> None:
    directory = _directory(named, None, listed)
    if directory is None:
        return
    try:
        files = [directory / "config.json", *weight_files(directory)]
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
        return
    listed.model += [(f"preference.reference: {file.name}", file) for file in files]


def _list_weights(model: Path, listed: InputFiles) -> None:
    try:
        listed.weights = weight_files(model)
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
    listed.model += [(file.name, file) for file in listed.weights]


def _directory(named: str, revision: str | None, listed: InputFiles) -> Path | None:
    """The directory of a model or tokenizer on this machine, without network access."""
    if is_hub_id(named):
        cached = _in_hub_cache(named, revision)
        if cached is None:
            listed.notes.append(f"{named} comes from the hub: compared after the download")
        return cached
    try:
        return locate_model(named)
    except UnisonoError as error:
        if Path(named).expanduser().is_dir():  # a folder with only a tokenizer
            return Path(named).expanduser().resolve()
        listed.notes.append(error.problems[0].what)
        return None


def _in_hub_cache(named: str, revision: str | None) -> Path | None:
    """The cached snapshot that the run will certainly use; None if the hub may have a newer one."""
    environment = read_environment()
    pinned = revision is not None and _COMMIT.match(revision) is not None
    if not pinned and environment.variables.get("HF_HUB_OFFLINE", "0").upper() not in (
        "1",
        "ON",
        "YES",
        "TRUE",
    ):
        return None
    folder = environment.hub_cache / f"models--{named.replace('/', '--')}"
    commit = revision if pinned else _read_reference(folder / "refs", revision or "main")
    snapshot = folder / "snapshots" / (commit or "-")
    return snapshot if snapshot.is_dir() else None


def _read_reference(refs: Path, name: str) -> str | None:
    try:
        text = read_text(path_below(refs, name), most_bytes=4096).strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.match(text) else None


def _code(label: str, directory: Path) -> list[tuple[str, Path]]:
    files = sorted(directory.rglob("*.py"))
    return [(f"{label}/{file.relative_to(directory).as_posix()}", file) for file in files]


def find_base(config: RunConfig) -> Path:
    """The directory of the model."""
    return locate_model(config.model.path, config.model.revision)


def check_adapter(directory: Path) -> None:
    """Refuses an adapter that lacks its weights or settings."""
    if not (directory / "adapter_model.safetensors").is_file():
        raise ModelError.of(
            "the adapter lacks its weights",
            where=str(directory),
            why="it has no adapter_model.safetensors",
            fix="copy the whole directory again",
        )
    adapter_settings(directory)


def adapter_settings(directory: Path) -> Mapping[str, object]:
    """The contents of adapter_config.json, with the kind of adapter at least.

    Raises:
        ModelError: if it is missing or has no kind.
    """
    file = directory / "adapter_config.json"
    try:
        settings = read_json_object(file, fix="copy it again")
    except FileNotFoundError:
        raise ModelError.of(
            "the adapter lacks its settings",
            where=str(directory),
            why="it has no adapter_config.json",
            fix="copy the whole directory again",
        ) from None
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError.of(
            f"adapter_config.json has no peft_type{'' if kind is None else f', but {kind!r}'}",
            where=str(file),
            why="it is the kind of the adapter, e.g. LORA, which peft needs to load it",
            fix="copy adapter_config.json of the adapter again",
        )
    return settings

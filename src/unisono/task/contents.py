"""What the files hold that a run on this node would read: digests that nodes compare before anything imports torch."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config.schema import RunConfig, SourceSection
from unisono.data.sources import find_local
from unisono.errors import UnisonoError
from unisono.events import Reporter
from unisono.facts import read_environment
from unisono.inputs import expand, fault_of
from unisono.model.files import read_safetensors_header, weight_files
from unisono.model.inspect import is_embedding
from unisono.model.locate import is_hub_id, locate_model
from unisono.task.file_digests import Digested, DigestProgress, digest_files
from unisono.text import one_line

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_MODEL = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass
class _Listed:
    """The files of a run by their labels, and what could not be listed."""

    data: list[tuple[str, Path]] = field(default_factory=list)
    tokenizer: list[tuple[str, Path]] = field(default_factory=list)
    model: list[tuple[str, Path]] = field(default_factory=list)
    code: list[tuple[str, Path]] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def everything(self) -> list[Path]:
        return [path for _, path in (*self.data, *self.tokenizer, *self.model, *self.code)]


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `data_files`, `tokenizer_files`, `model_files` (label, bytes, digest), `code`, `note`, `parameters`, `linear_in_out`.

    It refuses nothing: what is missing is in `note`, and is UNKNOWN to whoever compares; `prepare` refuses it in its own words.
    What is not on this machine yet, as rows behind a URL or a model of the hub, is compared when it has been prepared.
    `parameters` and `linear_in_out` are as in ModelFacts, or null.

    Args:
        request: `config` (a RunConfig as JSON, its paths absolute) and `cache_dir`, where digests of large files are kept.
        report: told about progress where files are large.
    """
    config = RunConfig.model_validate(request["config"])
    listed = _list(config)
    found = digest_files(
        listed.everything(),
        cache=Path(request["cache_dir"]) / "digests.json",
        told=DigestProgress(report, "contents").told,
    )
    for path, value in found.items():
        if isinstance(value, OSError):
            listed.notes.append(f"{path} cannot be read: {value.strerror}")
    parameters, linear_in_out = _figures(listed.weights)
    return {
        "data_files": _digests(listed.data, found),
        "tokenizer_files": _digests(listed.tokenizer, found),
        "model_files": _digests(listed.model, found),
        "code": {str(item["label"]): str(item["digest"]) for item in _digests(listed.code, found)},
        "note": one_line("; ".join(listed.notes), limit=600),
        "parameters": parameters,
        "linear_in_out": linear_in_out,
    }


def _list(config: RunConfig) -> _Listed:
    listed = _Listed()
    for label, key, named in _sources(config):
        try:
            files = find_local(named, key)
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        if files is None:
            listed.notes.append(f"{label} is not on this machine: compared when its rows have been prepared")
        else:
            listed.data += _labelled(label, [file.path for file in files])
    if config.data.template:
        path = expand(config.data.template)
        fault = fault_of(path, config.data.template)
        if fault is None:
            listed.data.append((f"template: {path.name}", path))
        else:
            listed.notes.append(fault.what)
    _list_model(config, listed)
    return listed


def _sources(config: RunConfig) -> list[tuple[str, str, str]]:
    """Label, key and name of every source of rows."""
    train = config.data.train if isinstance(config.data.train, list) else [config.data.train]
    named = [entry.path if isinstance(entry, SourceSection) else entry for entry in train]
    found = [(f"train[{i}]", f"data.train.{i}", name) for i, name in enumerate(named)]
    if isinstance(config.data.eval, str):
        found.append(("eval", "data.eval", config.data.eval))
    return found


def _labelled(label: str, files: list[Path]) -> list[tuple[str, Path]]:
    """Names below the folder that all of them share: the folder itself may be another one on each node."""
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [(f"{label}: {file.relative_to(folder).as_posix()}", file) for file in files]


def _list_model(config: RunConfig, listed: _Listed) -> None:
    model = _directory(config.model.path, config.model.revision, listed)
    tokenizer = model
    if config.model.tokenizer:
        tokenizer = _directory(config.model.tokenizer, None, listed)
    if tokenizer is not None:
        listed.tokenizer = _present(tokenizer, _TOKENIZER)
    if model is not None:
        listed.model = _present(model, _MODEL)
        if config.model.weights == "pretrained":
            _list_weights(model, listed)
    if config.model.trust_remote_code:
        for name, directory in (("model", model), ("tokenizer", tokenizer)):
            if directory is not None and (name == "model" or directory != model):
                listed.code += _code(name, directory)


def _list_weights(model: Path, listed: _Listed) -> None:
    try:
        listed.weights = weight_files(model)
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
    listed.model += [(file.name, file) for file in listed.weights]


def _directory(named: str, revision: str | None, listed: _Listed) -> Path | None:
    """Where a model or tokenizer is on this machine. The network is not asked."""
    if is_hub_id(named):
        found = _in_hub_cache(named, revision)
        if found is None:
            listed.notes.append(f"{named} comes from the hub: compared when it has been fetched")
        return found
    try:
        return locate_model(named)
    except UnisonoError as error:
        if Path(named).expanduser().is_dir():  # a folder with a tokenizer alone
            return Path(named).expanduser().resolve()
        listed.notes.append(error.problems[0].what)
        return None


def _in_hub_cache(named: str, revision: str | None) -> Path | None:
    """The cached snapshot that the run will use for certain; None where the hub may have a newer one."""
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
    commit = revision if pinned else _read_reference(folder / "refs" / (revision or "main"))
    snapshot = folder / "snapshots" / (commit or "-")
    return snapshot if snapshot.is_dir() else None


def _read_reference(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.match(text) else None


def _present(directory: Path, names: Iterable[str]) -> list[tuple[str, Path]]:
    return [(name, directory / name) for name in names if (directory / name).is_file()]


def _code(label: str, directory: Path) -> list[tuple[str, Path]]:
    files = sorted(directory.rglob("*.py"))
    return [(f"{label}/{file.relative_to(directory).as_posix()}", file) for file in files]


def _digests(
    listed: Iterable[tuple[str, Path]], found: dict[Path, Digested | OSError]
) -> list[dict[str, str | int]]:
    return [
        {"label": label, "bytes": value.bytes, "digest": value.digest}
        for label, path in listed
        if isinstance(value := found[path], Digested)
    ]


def _figures(weights: list[Path]) -> tuple[int | None, int | None]:
    """All parameters, and the sum of in and out features over the matrices that adapters adapt; by the files' headers."""
    try:
        headers = [header for file in weights for header in read_safetensors_header(file)]
    except (UnisonoError, OSError):
        return None, None  # damaged: prepare says so
    if not headers:
        return None, None
    matrices = [header for header in headers if len(header.shape) == 2 and not is_embedding(header.name)]
    return sum(_product(header.shape) for header in headers), sum(sum(header.shape) for header in matrices)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product

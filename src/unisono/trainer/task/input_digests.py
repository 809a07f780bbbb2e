"""The task `contents`: digests of the files that a run on this node would read, which nodes compare
before anything imports torch.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.errors import UnisonoError
from unisono.base.events import Reporter
from unisono.base.files import expand, fault_of, open_plain, path_below, read_object, read_text, write_json
from unisono.base.text import one_line
from unisono.guard.facts import read_environment
from unisono.trainer.config.schema import AdapterSection, RunConfig, sources_of
from unisono.trainer.config.sections import DIFFUSION, lf_name
from unisono.trainer.data.sources import find_local
from unisono.trainer.data.tokenizer import TOKENIZER_FILES
from unisono.trainer.model.directory import is_embedding, is_hub_id, locate_model
from unisono.trainer.model.file_settings import ADAPTER_FILE, adapter_directory
from unisono.trainer.model.files import read_safetensors_header, weight_files

_BLOCK = 1 << 23
_KEPT_FROM_BYTES = 1 << 24  # smaller ones are read in a hundredth of a second
_KEPT_FILES = 4_000
_SETTLED_S = 2.0
_THREADS = 4
_REPORTED_FROM_BYTES = 1 << 28
_REPORT_EVERY_S = 1.0
_MOST_PICTURES = 2_000  # of a folder, in a report that goes to the head


@dataclass(frozen=True, slots=True)
class Digested:
    """A file's size, and the xxh3-128 of its bytes in hex."""

    bytes: int
    digest: str


def digest_files(
    files: Sequence[Path],
    *,
    cache: Path,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[Path, Digested | OSError]:
    """Size and xxh3-128 of each file, or the error of the file system.

    The digest of a large file is kept in `cache`, keyed by path, size, inode, and the times of its
    last change (mtime) and of the last change of its inode (ctime), which no program can set. The
    assumption: if all of these are unchanged, so are the contents. Bit rot, a network file system
    with stale attributes, and a clock that was set back are not detected here, but when the weights
    are read for the run (the digest of `prepare`). The digest of a file that changed in the last
    two seconds is not kept: a second change could leave the same time.

    Args:
        files: regular files.
        cache: a JSON file of bounded size; created if missing.
        on_progress: called with bytes done and total bytes, from several threads, one at a time.
    """
    kept = read_object(cache).get("files")
    run = _DigestRun(kept if isinstance(kept, dict) else {}, on_progress)
    stats = {file: _stat(file) for file in dict.fromkeys(files)}
    run.total = sum(stat.st_size for stat in stats.values() if isinstance(stat, os.stat_result))
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(stats, pool.map(run.digest, stats, stats.values()), strict=True))
    _keep(cache, run)
    return found


class _DigestRun:
    def __init__(self, kept: dict[str, Any], on_progress: Callable[[int, int], None]) -> None:
        self.kept = kept
        self.new: dict[str, list[Any]] = {}
        self.total = 0
        self._done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def digest(self, file: Path, stat: os.stat_result | OSError) -> Digested | OSError:
        if isinstance(stat, OSError):
            return stat
        key = _key(stat)
        old = self.kept.get(str(file))
        if isinstance(old, list) and old[:-1] == key and isinstance(old[-1], str):
            self._advance(stat.st_size)
            self.new[str(file)] = old
            return Digested(stat.st_size, old[-1])
        try:
            value = self._read(file)
            unchanged = _key(file.stat()) == key
        except OSError as error:
            return error
        if unchanged and stat.st_size >= _KEPT_FROM_BYTES and time.time() - stat.st_ctime > _SETTLED_S:
            self.new[str(file)] = [*key, value]
        return Digested(stat.st_size, value)

    def _read(self, file: Path) -> str:
        total = xxhash.xxh3_128()
        block = memoryview(bytearray(_BLOCK))
        with open_plain(file) as stream:
            while count := stream.readinto(block):
                total.update(block[:count])
                self._advance(count)
        return total.hexdigest()

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._on_progress(self._done, self.total)


def _stat(file: Path) -> os.stat_result | OSError:
    try:
        return file.stat()
    except OSError as error:
        return error


def _key(stat: os.stat_result) -> list[Any]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _keep(cache: Path, run: _DigestRun) -> None:
    """Writes new entries; the files of this run are last, and are the last to be dropped."""
    if all(run.kept.get(name) == entry for name, entry in run.new.items()):
        return
    files = {name: entry for name, entry in run.kept.items() if name not in run.new} | run.new
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, {"schema": 1, "files": dict(list(files.items())[-_KEPT_FILES:])})
    except OSError:
        return  # a home that is full or read-only costs the next start some seconds


class DigestProgress:
    """Reports the progress of the digests once a second, if there is much to read."""

    def __init__(self, report: Reporter, phase: str) -> None:
        self._report = report
        self._phase = phase
        self._next = time.monotonic() + _REPORT_EVERY_S

    def report(self, done: int, total: int) -> None:
        """For `digest_files`: bytes done and bytes in all."""
        if total < _REPORTED_FROM_BYTES or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REPORT_EVERY_S
        self._report.phase(self._phase, "digests of the files", done=done, total=total)


_MODEL = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


@dataclass
class _InputFiles:
    """The files of a run by their labels, and notes on what could not be listed."""

    data: list[tuple[str, Path]] = field(default_factory=list)
    tokenizer: list[tuple[str, Path]] = field(default_factory=list)
    model: list[tuple[str, Path]] = field(default_factory=list)
    code: list[tuple[str, Path]] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def everything(self) -> list[Path]:
        return [path for _, path in (*self.data, *self.tokenizer, *self.model, *self.code)]


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `data_files`, `tokenizer_files`, `model_files` (label, bytes, digest), `code`, `note`,
    `parameters`, `linear_in_out`.

    It refuses nothing: missing files are listed in `note`, and are UNKNOWN in the comparison;
    `prepare` refuses them. Inputs that are not on this machine yet, e.g. rows of a URL or a model
    of the hub, are compared after `prepare`. `parameters` and `linear_in_out` are as in ModelFacts,
    or null.

    Args:
        request: `config` (a RunConfig as JSON, its paths absolute) and `cache_dir`, where digests
            of large files are kept.
        report: receives progress if files are large.
    """
    config = RunConfig.model_validate(request["config"])
    listed = _list(config)
    found = digest_files(
        listed.everything(),
        cache=Path(request["cache_dir"]) / "digests.json",
        on_progress=DigestProgress(report, "contents").report,
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


def _list(config: RunConfig) -> _InputFiles:
    listed = _InputFiles()
    if config.objective == DIFFUSION:
        _list_pictures(config, listed)
        return listed
    for label, key, named in _sources(config):
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


def _list_pictures(config: RunConfig, listed: _InputFiles) -> None:
    """Pictures with their captions, and the files of the pipeline."""
    from unisono.trainer.families.pictures.picture_folders import list_files
    from unisono.trainer.families.pictures.pipeline_files import all_files, locate_pipeline
    from unisono.trainer.families.pictures.single_file import single_file, tokenizer_of_file

    folders = [(label, named) for label, _, named in _sources(config)]
    if config.diffusion.prior is not None:
        folders.append(("prior", config.diffusion.prior))
    for label, named in folders:
        root = Path(named).expanduser()
        try:
            files = [path for path, _, _ in list_files(root) if path.is_file()]
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        listed.data += [
            (f"{label}: {path.relative_to(root).as_posix()}", path) for path in files[:_MOST_PICTURES]
        ]
        if len(files) > _MOST_PICTURES:
            listed.notes.append(
                f"{named} has {len(files)} files: the first {_MOST_PICTURES} are compared by name, all of"
                " them after they are prepared"
            )
    try:
        file = single_file(config)
        if file is not None:
            listed.model, listed.weights = [("model file", file)], [file]
            listed.tokenizer = _present(tokenizer_of_file(config.model.tokenizer), TOKENIZER_FILES)
            return
        pipeline = locate_pipeline(config)
        listed.model = all_files(pipeline)
        listed.weights = pipeline.weights("unet")
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)


def _sources(config: RunConfig) -> list[tuple[str, str, str]]:
    """Label, key and name of every source of rows."""
    found = []
    for key, section in sources_of(config.data):
        _, role, *number = key.split(".")
        label = f"{role}[{number[0]}]" if number else {"train": "train[0]"}.get(role, role)
        found.append((label, key, section.path))
    return found


def _labelled(label: str, files: list[Path]) -> list[tuple[str, Path]]:
    """Paths relative to the common folder of all files: the folder itself may differ between
    nodes.
    """
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [(f"{label}: {file.relative_to(folder).as_posix()}", file) for file in files]


def _list_model(config: RunConfig, listed: _InputFiles) -> None:
    model = _directory(config.model.path, config.model.revision, listed)
    tokenizer = model
    if config.model.tokenizer:
        tokenizer = _directory(config.model.tokenizer, None, listed)
    if tokenizer is not None:
        # transformers chooses the class of a tokenizer by the config.json beside it
        more = ("config.json", "generation_config.json") if tokenizer != model else ()
        listed.tokenizer = _present(tokenizer, (*TOKENIZER_FILES, *more))
    if model is not None:
        listed.model = _present(model, _MODEL)
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


def _list_adapters(section: AdapterSection, listed: _InputFiles) -> None:
    named = [(f"adapter.merge.{i}", name) for i, name in enumerate(section.merge)]
    named += [("adapter.from", section.from_)] if section.from_ is not None else []
    for key, name in named:
        try:
            file = adapter_directory(name, key) / ADAPTER_FILE
        except UnisonoError as error:
            listed.notes.append(error.problems[0].what)
            continue
        listed.model.append((f"{key}: {ADAPTER_FILE}", file))


def _list_reference(named: str, listed: _InputFiles) -> None:
    directory = _directory(named, None, listed)
    if directory is None:
        return
    try:
        files = [directory / "config.json", *weight_files(directory)]
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
        return
    listed.model += [(f"preference.reference: {file.name}", file) for file in files]


def _list_weights(model: Path, listed: _InputFiles) -> None:
    try:
        listed.weights = weight_files(model)
    except UnisonoError as error:
        listed.notes.append(error.problems[0].what)
    listed.model += [(file.name, file) for file in listed.weights]


def _directory(named: str, revision: str | None, listed: _InputFiles) -> Path | None:
    """The directory of a model or tokenizer on this machine, without network access."""
    if is_hub_id(named):
        found = _in_hub_cache(named, revision)
        if found is None:
            listed.notes.append(f"{named} comes from the hub: compared after the download")
        return found
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
    """The number of parameters, and the sum of in and out features over the matrices for adapters,
    from the files' headers.
    """
    try:
        headers = [header for file in weights for header in read_safetensors_header(file)]
    except (UnisonoError, OSError):
        return None, None  # damaged: prepare reports it
    if not headers:
        return None, None
    matrices = [header for header in headers if len(header.shape) == 2 and not is_embedding(header.name)]
    return sum(_product(header.shape) for header in headers), sum(sum(header.shape) for header in matrices)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product

"""From what the config names to files on this machine: paths, globs, URLs (through fsspec), hub ids
(through `datasets`).
"""

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import DataError, Problem
from unisono.base.files import expand, fault_of, read_json, whole_file, write_json
from unisono.base.text import nearest, one_line, redact
from unisono.guard.facts import read_environment
from unisono.guard.facts.environment import check_hub_answers, hub_silence, read_hub
from unisono.trainer.config.data_sections import DataSection, SourceSection, sources_of
from unisono.trainer.data import RowFile
from unisono.trainer.data.readers import READERS, kind_of
from unisono.trainer.plan import STORAGE_PACKAGES

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class RowSource:
    """A source of rows, on this machine.

    Attributes:
        section: its section of the config.
        files: in reading order.
        role: train; or eval, if all its rows are for evaluation.
        key: its key in the config, for messages.
    """

    section: SourceSection
    files: list[RowFile]
    role: str = "train"
    key: str = "data.train"


def find_sources(data: DataSection, *, cache_dir: Path) -> list[RowSource]:
    """All training sources, then the evaluation source if there is one.

    Args:
        data: `data` of the config.
        cache_dir: the directory for downloads.

    Raises:
        DataError: with every source that is unavailable.
    """
    sources: list[RowSource] = []
    problems = [
        Problem(f"data.{role} has no source", f"data.{role}", fix="set it to a file")
        for role in ("train", "eval")
        if getattr(data, role) == []
    ]
    for key, section in sources_of(data):
        role = key.split(".")[1]
        try:
            sources.append(RowSource(section, _find(section, key, cache_dir, role=role), role, key))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    return sources


def _find(section: SourceSection, key: str, cache_dir: Path, *, role: str) -> list[RowFile]:
    local = find_local(section.path, key)
    is_url = local is None and _URL.match(section.path)
    for name in ("subset", "folder"):
        if getattr(section, name) is not None and (local is not None or is_url):
            raise DataError.of(
                f"{key}.{name} is set, and {section.path} is not a hub dataset",
                where=f"{key}.{name}",
                fix=f"remove {name}",
            )
    if local is not None:
        return local
    if is_url:
        return fetch_url(section.path, key, cache_dir)
    usual = ["train"] if role == "train" else ["validation", "test"]
    splits = usual if section.split is None else [section.split]
    return fetch_hub(section, key, cache_dir, splits=splits)


def find_local(named: str, key: str) -> list[RowFile] | None:
    """The files of a path, directory or glob on this machine; None for a URL or a hub id.

    Args:
        named: the value in the config.
        key: its config key, for messages.

    Raises:
        DataError: if there is no such file.
    """
    scheme = _URL.match(named)
    if scheme and scheme[1].lower() != "file":
        return None
    text = named.removeprefix("file://")
    path = expand(text)
    fault = fault_of(path, text)
    if fault is None:
        return [RowFile(path, text, kind_of(text))]
    if fault.is_directory and text:
        return _files_in(path, text, key)
    if fault.is_missing and _GLOB.search(text):
        return _find_glob(text, path, key)
    if fault.is_missing and _HUB_ID.match(named) and kind_of(named) not in READERS:
        return None
    raise DataError.of(fault.what, where=key, why=fault.why, fix=fault.fix)


_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Files of which each row names a picture beside it, as in `imagefolder` of Hugging Face."""


def names_pictures(source: RowSource) -> bool:
    """Whether the rows of a source name pictures in the directories of its files."""
    return all(file.path.name in _METADATA for file in source.files)


_SAME_KIND = {"jsonl": "json", "ndjson": "json"}


def _files_in(path: Path, text: str, key: str) -> list[RowFile]:
    """The files of a directory, sorted by name, all of one type; of one with pictures its metadata
    file. Hidden files are left out.

    Raises:
        DataError: if there are none, or of several types, or the directory has directories.
    """
    pattern = f"{text.rstrip('/')}/*.jsonl"
    try:
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError.of(
            f"the directory {text} cannot be read", where=key, why=str(error), fix="check its permissions"
        ) from error
    names = [name for name in names if name in _METADATA][:1] or names
    files = [RowFile(path / name, f"{text.rstrip('/')}/{name}", kind_of(name)) for name in names]
    for file in files:
        fault = fault_of(file.path, file.name)
        if fault is not None:
            raise DataError.of(
                f"the directory {text} cannot be used: {fault.what}",
                where=key,
                why="a directory of rows holds files only",
                fix=f"use a pattern for its files, e.g. {pattern}",
            )
    kinds = {_SAME_KIND.get(file.kind, file.kind): file for file in files}
    if len(kinds) == 1:
        return files
    why = f"it has {' and '.join(file.name for file in list(kinds.values())[:3])}" if kinds else "it is empty"
    raise DataError.of(
        f"the directory {text} does not hold files of one type",
        where=key,
        why=why,
        fix=f"use a pattern for its files, e.g. {pattern}",
    )


def _find_glob(text: str, path: Path, key: str) -> list[RowFile]:
    root = Path(path.anchor)
    pattern = str(path.relative_to(root)) if path.anchor else str(path)
    try:
        matches = sorted(root.glob(pattern))
    # pathlib raises NotImplementedError for patterns that it does not support, e.g. absolute ones,
    # and ValueError for `**` within a name.
    except (ValueError, NotImplementedError, OSError) as error:
        raise DataError.of(
            f"the pattern {text} cannot be used", where=key, why=str(error), fix="fix the pattern"
        ) from error
    faults = {match: fault_of(match, str(match)) for match in matches}
    usable = [match for match, fault in faults.items() if fault is None]
    if not usable:
        others = "; ".join(fault.what for fault in list(faults.values())[:3] if fault is not None)
        raise DataError.of(
            f"no file matches {text}",
            where=key,
            why=others or "relative patterns start at the working directory",
            fix="check the pattern",
        )
    return [RowFile(match, str(match), kind_of(match.name)) for match in usable]


# Metadata that identifies the version of a remote file, under the names that storages use.
_IDENTITY = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "md5",
    "checksum",
    "sha256",
    "created",
    "size",
)


def fetch_url(url: str, key: str, cache_dir: Path) -> list[RowFile]:
    """The files of a URL, which may contain `*`, downloaded if they are new.

    Args:
        url: with a scheme that fsspec supports.
        key: its config key, for messages.
        cache_dir: the directory for downloads.

    Raises:
        DataError: if the scheme is unknown or its package is missing, or the file cannot be read.
    """
    fs, path = open_storage(url, key)
    try:
        paths = sorted(fs.glob(path)) if "*" in path else [path]
        files = [_download(fs, name, _name(fs, url, name, several="*" in path), cache_dir) for name in paths]
    except FileNotFoundError:
        raise DataError.of(f"there is no {url}", where=key, fix="check the URL") from None
    except Exception as error:  # each storage package has its own errors; the message is passed on
        raise DataError.of(
            f"{url} cannot be read",
            where=key,
            why=f"{type(error).__name__}: {one_line(redact(str(error)), limit=300)}",
            fix="check the URL, the network and the credentials in the environment",
        ) from error
    if not files:
        raise DataError.of(f"no file matches {url}", where=key, fix="check the pattern")
    return files


def open_storage(url: str, key: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Args:
        url: with a scheme that fsspec supports.
        key: its config key, for messages.

    Raises:
        DataError: if the scheme is unknown or its package is missing, or the URL cannot be opened.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0].lower()
    entry = known_implementations.get(scheme)
    if entry is None:
        near = nearest(scheme, list(known_implementations))
        raise DataError.of(
            f"unknown scheme {scheme}://",
            where=key,
            why=f"fsspec, which reads {url}, does not support it",
            fix=f"did you mean {near}://?" if near else "use a path, s3://, gs://, https:// or hf://",
        )
    try:
        return url_to_fs(url)
    except ImportError as error:
        module = entry["class"].partition(".")[0]
        package = STORAGE_PACKAGES.get(scheme, module)
        raise DataError.of(
            f"{scheme}:// needs the package {package}",
            where=key,
            why=one_line(str(error)),
            fix=f"pip install {package}",
        ) from error
    except Exception as error:  # as above
        raise DataError.of(
            f"{url} cannot be opened",
            where=key,
            why=f"{type(error).__name__}: {one_line(redact(str(error)), limit=300)}",
            fix="check the URL",
        ) from error


def _name(fs: Any, url: str, path: str, *, several: bool) -> str:
    return fs.unstrip_protocol(path) if several else url


def _download(fs: Any, path: str, name: str, cache_dir: Path) -> RowFile:
    folder = cache_dir / "downloads" / _short(name)
    note, kept = folder / "version.json", folder / f"rows.{kind_of(name)}"
    info = fs.info(path)
    version = {"url": name} | {word: str(info[word]) for word in _IDENTITY if info.get(word) is not None}
    known = version.keys() - {"url", "size"}  # a size alone does not identify a version
    if not (known and kept.is_file() and _same(note, version)):
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as temporary:
            fs.get_file(path, str(temporary))
        write_json(note, version)
    return RowFile(kept, name, kind_of(name))


def _same(note: Path, version: dict[str, str]) -> bool:
    try:
        return read_json(note) == version
    except (OSError, ValueError):
        return False


def fetch_hub(section: SourceSection, key: str, cache_dir: Path, *, splits: list[str]) -> list[RowFile]:
    """The rows of a hub dataset as an Arrow file, downloaded once; later starts need neither
    network nor `datasets`.

    Args:
        section: its path is the hub id.
        key: its config key, for messages.
        cache_dir: the directory for downloads; delete the file there to download it again.
        splits: the first of these that the dataset has is used.

    Raises:
        DataError: if it cannot be downloaded.
    """
    part = {name: value for name in ("subset", "folder") if (value := getattr(section, name)) is not None}
    folder = cache_dir / "hub" / _short(f"{section.path} {splits}" + (f" {part}" if part else ""))
    kept, note = folder / "rows.arrow", folder / "source.json"
    if not (kept.is_file() and note.is_file()):
        _refuse_silent_hub(section.path, key)
        check_hub_answers()
        folder.mkdir(parents=True, exist_ok=True)
        split = _write_hub(section, key, kept, splits)
        fetched = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        write_json(note, {"id": section.path, **part, "split": split, "fetched": fetched})
    return [RowFile(kept, f"{section.path}:{read_json(note)['split']}", "arrow")]


def _refuse_silent_hub(path: str, key: str) -> None:
    """Without an answer of the hub, `datasets` would retry for half a minute; with its offline mode
    it looks only into its own cache.

    Raises:
        DataError: if the hub does not answer.
    """
    hub = read_hub(read_environment().hub_cache)
    silence = "" if hub.offline else hub_silence(hub)
    if silence:
        raise DataError.of(
            f"{path} is neither a file on this machine nor can it be downloaded",
            where=key,
            why=silence,
            fix=(
                "for a file give its path with its suffix; for a hub dataset check the network (a proxy is"
                " named by HTTPS_PROXY, a mirror by HF_ENDPOINT), or set HF_HUB_OFFLINE=1 to read what"
                " `datasets` has in its cache"
            ),
        )


def _write_hub(section: SourceSection, key: str, kept: Path, splits: list[str]) -> str:
    """Downloads a dataset and writes one split of it; gives the split's name."""
    import pyarrow as pa
    from datasets import load_dataset

    path, chosen, rows = section.path, "", None
    try:
        for split in splits:
            try:
                chosen, rows = split, load_dataset(path, section.subset, data_dir=section.folder, split=split)
                break
            except ValueError as error:  # raised by datasets for a missing split
                if split == splits[-1] or not re.search("split", str(error), re.IGNORECASE):
                    raise
    except Exception as error:  # datasets passes on errors of a dozen packages
        raise DataError.of(
            f"{path} is neither a file on this machine nor an accessible dataset of the hub",
            where=key,
            why=f"{type(error).__name__}: {one_line(redact(str(error)), limit=300)}",
            fix=(
                "check the spelling, the network and the source's `split` and `subset`; for a file, set its"
                " path with its suffix"
            ),
        ) from error
    assert rows is not None
    tables = rows.with_format("arrow")
    with whole_file(kept) as temporary, pa.ipc.new_file(str(temporary), tables[:0].schema) as file:
        for table in tables.iter(batch_size=1000):
            file.write_table(table)
    return chosen


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]

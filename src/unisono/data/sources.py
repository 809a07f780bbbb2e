"""From what the config names to files on this machine: paths, globs, URLs (through fsspec), hub ids (through `datasets`)."""

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.schema import DataSection, SourceSection
from unisono.data.readers import READERS, RowFile, kind_of
from unisono.errors import DataError, Problem
from unisono.facts.redaction import redact
from unisono.files import read_json, whole_file, write_json
from unisono.inputs import expand, fault_of
from unisono.text import nearest, one_line

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of rows, found on this machine.

    Attributes:
        section: what the config says about it.
        files: in the order in which they are read.
        role: train; or eval, where all its rows are for evaluation.
    """

    section: SourceSection
    files: list[RowFile]
    role: str = "train"


def find_sources(data: DataSection, *, cache_dir: Path) -> list[Source]:
    """All sources of training, then those of evaluation where it has its own.

    Args:
        data: the config's section.
        cache_dir: what is downloaded is kept below it.

    Raises:
        DataError: with every source that cannot be had.
    """
    entries = data.train if isinstance(data.train, list) else [data.train]
    wanted = [(_section(entry, data), "train", _key(data, i)) for i, entry in enumerate(entries)]
    if isinstance(data.eval, str):
        wanted.append((SourceSection(path=data.eval, format=data.format), "eval", "data.eval"))
    found: list[Source] = []
    problems: list[Problem] = []
    if not entries:
        problems.append(Problem("data.train names no source", "data.train", fix="name a file"))
    for section, role, key in wanted:
        try:
            found.append(Source(section, _find(section, key, cache_dir, role=role), role))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    return found


def _key(data: DataSection, index: int) -> str:
    return f"data.train.{index}" if isinstance(data.train, list) else "data.train"


def _section(entry: str | SourceSection, data: DataSection) -> SourceSection:
    if isinstance(entry, str):
        return SourceSection(path=entry, format=data.format)
    return entry if entry.format != "auto" else entry.model_copy(update={"format": data.format})


def _find(section: SourceSection, key: str, cache_dir: Path, *, role: str) -> list[RowFile]:
    local = find_local(section.path, key)
    if local is not None:
        return local
    if _URL.match(section.path):
        return fetch_url(section.path, key, cache_dir)

    splits = [section.split or "train"] if role == "train" else ["validation", "test"]
    return fetch_hub(section, key, cache_dir, splits=splits)


def find_local(named: str, key: str) -> list[RowFile] | None:
    """The files on this machine that a path or glob names; None for what is elsewhere: a URL, a hub id.

    Args:
        named: as the config has it.
        key: of the config, for messages.

    Raises:
        DataError: if there is nothing there.
    """
    scheme = _URL.match(named)
    if scheme and scheme[1].lower() != "file":
        return None
    text = named.removeprefix("file://")
    path = expand(text)
    fault = fault_of(path, text)
    if fault is None:
        return [RowFile(path, text, kind_of(text))]
    if fault.is_missing and _GLOB.search(text):
        return _find_glob(text, path, key)
    if fault.is_missing and _HUB_ID.match(named) and kind_of(named) not in READERS:
        return None
    fix = f"name its files, for example {text.rstrip('/')}/*.jsonl" if fault.is_directory else fault.fix
    raise DataError.of(fault.what, where=key, why=fault.why, fix=fix)


def _find_glob(text: str, path: Path, key: str) -> list[RowFile]:
    root = Path(path.anchor)
    pattern = str(path.relative_to(root)) if path.anchor else str(path)
    try:
        matches = sorted(root.glob(pattern))
    except (
        ValueError,
        NotImplementedError,
        OSError,
    ) as error:  # pathlib's for patterns that it does not know
        raise DataError.of(
            f"the pattern {text} cannot be used", where=key, why=str(error), fix="correct it"
        ) from error
    faults = {match: fault_of(match, str(match)) for match in matches}
    found = [match for match, fault in faults.items() if fault is None]
    if not found:
        others = "; ".join(fault.what for fault in list(faults.values())[:3] if fault is not None)
        raise DataError.of(
            f"no file matches {text}",
            where=key,
            why=others or "relative patterns start at the working directory",
            fix="check the pattern",
        )
    return [RowFile(match, str(match), kind_of(match.name)) for match in found]


# fsspec's own file systems that need another package; all others are named by their class.
_PACKAGES = {
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "github": "requests",
    "gist": "requests",
    "libarchive": "libarchive-c",
    "webhdfs": "requests",
    "jupyter": "requests",
    "git": "pygit2",
}
# What tells one version of a remote file from the next, under the names that storages use.
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
    """The files of a URL, which may have `*` in it, downloaded if they are new.

    Args:
        url: with a scheme that fsspec knows.
        key: of the config, for messages.
        cache_dir: downloads are kept below it.

    Raises:
        DataError: if the scheme is unknown or lacks its package, or the storage does not give the file.
    """
    fs, path = open_storage(url, key)
    try:
        paths = sorted(fs.glob(path)) if "*" in path else [path]
        files = [_download(fs, name, _name(fs, url, name, several="*" in path), cache_dir) for name in paths]
    except FileNotFoundError:
        raise DataError.of(f"there is no {url}", where=key, fix="check the URL") from None
    except Exception as error:  # each storage package has errors of its own; what it says is handed on
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
        url: with a scheme that fsspec knows.
        key: of the config, for messages.

    Raises:
        DataError: if the scheme is unknown or lacks its package, or the URL cannot be opened.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0].lower()
    entry = known_implementations.get(scheme)
    if entry is None:
        near = nearest(scheme, list(known_implementations))
        raise DataError.of(
            f"the scheme {scheme}:// is not known",
            where=key,
            why=f"{url} would be read through fsspec",
            fix=f"did you mean {near}://?" if near else "use a path, s3://, gs://, https:// or hf://",
        )
    try:
        return url_to_fs(url)
    except ImportError as error:
        module = entry["class"].partition(".")[0]
        package = _PACKAGES.get(scheme, module) if module == "fsspec" else module
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
    known = version.keys() - {"url", "size"}  # a size alone tells no version
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
    """The rows of a hub dataset as an Arrow file, downloaded once; afterwards neither network nor `datasets` is needed.

    Args:
        section: its path is the hub id.
        key: of the config, for messages.
        cache_dir: the file is kept below it; deleting it there downloads it again.
        splits: the first of them that the dataset has is taken.

    Raises:
        DataError: if the hub does not give it.
    """
    folder = cache_dir / "hub" / _short(f"{section.path} {splits}")
    kept, note = folder / "rows.arrow", folder / "source.json"
    if not (kept.is_file() and note.is_file()):
        folder.mkdir(parents=True, exist_ok=True)
        split = _write_hub(section.path, key, kept, splits)
        fetched = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        write_json(note, {"id": section.path, "split": split, "fetched": fetched})
    return [RowFile(kept, f"{section.path}:{read_json(note)['split']}", "arrow")]


def _write_hub(path: str, key: str, kept: Path, splits: list[str]) -> str:
    """Downloads a dataset and writes one split of it; gives the split's name."""
    import pyarrow as pa
    from datasets import load_dataset

    chosen, rows = "", None
    try:
        for split in splits:
            try:
                chosen, rows = split, load_dataset(path, split=split)
                break
            except ValueError as error:  # datasets' answer where there is no such split
                if split == splits[-1] or not re.search("split", str(error), re.IGNORECASE):
                    raise
    except Exception as error:  # datasets hands on errors of a dozen packages
        raise DataError.of(
            f"{path} is neither a file here nor a dataset that the hub gives",
            where=key,
            why=f"{type(error).__name__}: {one_line(redact(str(error)), limit=300)}",
            fix="check the spelling, the network and the source's `split`; for a file write its path with its suffix",
        ) from error
    assert rows is not None
    tables = rows.with_format("arrow")
    with whole_file(kept) as temporary, pa.ipc.new_file(str(temporary), tables[:0].schema) as file:
        for table in tables.iter(batch_size=1000):
            file.write_table(table)
    return chosen


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]

"""From what the config names to files on this machine: paths, globs, URLs, hub ids."""

import re
from dataclasses import dataclass
from pathlib import Path

from unisono.config.schema import DataSection, SourceSection
from unisono.data.readers import READERS, RowFile, kind_of
from unisono.errors import DataError, Problem
from unisono.inputs import expand, fault_of

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
        from unisono.data.remote import fetch_url

        return fetch_url(section.path, key, cache_dir)
    from unisono.data.remote import fetch_hub

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
            f"no file matches {text}", where=key, why=others or "relative patterns start at the working directory", fix="check the pattern",
        )  # fmt: skip
    return [RowFile(match, str(match), kind_of(match.name)) for match in found]

"""The task `contents`: digests of the files that a run on this node would read, which nodes compare
before anything imports torch.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.errors import UnisonoError
from unisono.base.events import Reporter
from unisono.base.files import open_plain, read_object, write_json
from unisono.base.text import one_line
from unisono.trainer.families import files_of
from unisono.trainer.model.directory import in_out, is_matrix
from unisono.trainer.model.files import read_safetensors_header
from unisono.trainer.plan.task_requests import ContentsRequest, InputDigests

_BLOCK = 1 << 23
_KEPT_FROM_BYTES = 1 << 24  # smaller ones are read in a hundredth of a second
_KEPT_FILES = 4_000
_SETTLED_S = 2.0
_THREADS = 4
_REPORTED_FROM_BYTES = 1 << 28
_REPORT_EVERY_S = 1.0


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
        digests = dict(zip(stats, pool.map(run.digest, stats, stats.values()), strict=True))
    _keep(cache, run)
    return digests


class _DigestRun:
    def __init__(self, kept: Mapping[str, object], on_progress: Callable[[int, int], None]) -> None:
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


def run(request: ContentsRequest, report: Reporter) -> InputDigests:
    """The files that a run on this node would read.

    It refuses nothing: missing files are listed in `note`, and are UNKNOWN in the comparison;
    `prepare` refuses them. Inputs that are not on this machine yet, e.g. rows of a URL or a model
    of the hub, are compared after `prepare`.

    Args:
        request: with `cache_dir`, where digests of large files are kept.
        report: receives progress if files are large.
    """
    listed = files_of(request.config).list_inputs(request.config)
    digests = digest_files(
        listed.everything(),
        cache=request.cache_dir / "digests.json",
        on_progress=DigestProgress(report, "contents").report,
    )
    for path, value in digests.items():
        if isinstance(value, OSError):
            listed.notes.append(f"{path} cannot be read: {value.strerror}")
    parameters, linear_in_out = _figures(listed.weights)
    return {
        "data_files": _digests(listed.data, digests),
        "tokenizer_files": _digests(listed.tokenizer, digests),
        "model_files": _digests(listed.model, digests),
        "code": {str(item["label"]): str(item["digest"]) for item in _digests(listed.code, digests)},
        "note": one_line("; ".join(listed.notes), limit=600),
        "parameters": parameters,
        "linear_in_out": linear_in_out,
    }


def _digests(
    listed: Iterable[tuple[str, Path]], digests: dict[Path, Digested | OSError]
) -> list[dict[str, str | int]]:
    return [
        {"label": label, "bytes": value.bytes, "digest": value.digest}
        for label, path in listed
        if isinstance(value := digests[path], Digested)
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
    in_outs = (in_out(header.shape) for header in headers if is_matrix(header))
    return sum(_product(header.shape) for header in headers), sum(in_outs)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product

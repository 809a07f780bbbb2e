"""Digests of files by their contents, many at a time; those of large files are kept, so that a second start costs nothing."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from unisono.events import Reporter
from unisono.files import open_plain, read_object, write_json

_BLOCK = 1 << 23
_KEPT_FROM_BYTES = 1 << 24  # smaller ones are read in a hundredth of a second
_KEPT_FILES = 4_000
_SETTLED_S = 2.0
_THREADS = 4
_TOLD_FROM_BYTES = 1 << 28
_TOLD_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Digested:
    """What a file holds: its size, and the xxh3-128 of its bytes in hex."""

    bytes: int
    digest: str


def digest_files(
    files: Sequence[Path], *, cache: Path, told: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[Path, Digested | OSError]:
    """Size and xxh3-128 of each file, or what the file system said in place of them.

    The digest of a large file is kept in `cache`, keyed by path, size, inode, and the times of its last change (mtime) and
    of the last change of its inode (ctime), which no program can set. What that trusts: a file for which all of these are as they
    were holds what it held. A disk that rots, a network file system that shows old attributes, and a clock that was
    set back are not seen by it; they are seen where the weights are read for the run (the digest of `prepare`).
    A file that was changed in the last two seconds is not kept: a second change could leave the same time.

    Args:
        files: regular files.
        cache: a JSON file; it is made, and what it holds is bounded.
        told: called with bytes done and bytes in all, from several threads, one at a time.
    """
    kept = read_object(cache).get("files")
    run = _Run(kept if isinstance(kept, dict) else {}, told)
    stats = {file: _stat(file) for file in dict.fromkeys(files)}
    run.total = sum(stat.st_size for stat in stats.values() if isinstance(stat, os.stat_result))
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(stats, pool.map(run.digest, stats, stats.values()), strict=True))
    _keep(cache, run)
    return found


class _Run:
    def __init__(self, kept: dict[str, Any], told: Callable[[int, int], None]) -> None:
        self.kept = kept
        self.new: dict[str, list[Any]] = {}
        self.total = 0
        self._done = 0
        self._told = told
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
            self._told(self._done, self.total)


def _stat(file: Path) -> os.stat_result | OSError:
    try:
        return file.stat()
    except OSError as error:
        return error


def _key(stat: os.stat_result) -> list[Any]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _keep(cache: Path, run: _Run) -> None:
    """Writes what was new; the files of this run stand last and are the last to be dropped."""
    if all(run.kept.get(name) == entry for name, entry in run.new.items()):
        return
    files = {name: entry for name, entry in run.kept.items() if name not in run.new} | run.new
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, {"schema": 1, "files": dict(list(files.items())[-_KEPT_FILES:])})
    except OSError:
        return  # a home that is full or cannot be written costs the next start some seconds, and this one nothing


class DigestProgress:
    """Tells how far the digests are, once a second, where there is much to read."""

    def __init__(self, report: Reporter, phase: str) -> None:
        self._report = report
        self._phase = phase
        self._next = time.monotonic() + _TOLD_EVERY_S

    def told(self, done: int, total: int) -> None:
        """For `digest_files`: bytes done and bytes in all."""
        if total < _TOLD_FROM_BYTES or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TOLD_EVERY_S
        self._report.phase(self._phase, "digests of the files", done=done, total=total)

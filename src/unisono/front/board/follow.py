"""Follows a run's files while they grow: whole new lines only, and whether a file was cut,
replaced, or its directory moved.
"""

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.files import MOST_LINE_BYTES, open_plain, parse_json, read_json, read_object
from unisono.base.messages import read_message
from unisono.base.text import one_line
from unisono.front.board.curves import Curves
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import Holder, watched_holder
from unisono.guard.rundir.merged_logs import Clocks, LogLine, LogSources, is_time
from unisono.guard.rundir.records import parse_metrics_line

_CHUNK_BYTES = 4 << 20
_MARK_BYTES = 64
_MOST_SPANS = 600
"""The latest phases of each rank."""
_MOST_SAMPLES = 600
_LOG_BYTES = 512 << 10
_MOST_LOG_LINES = 4_000
_MOST_READ = 20
Version = tuple[int, ...]

TRAINER_LOG, TRAINER_STATE = "trainer_log.jsonl", "trainer_state.json"
"""Files of LLaMA-Factory, and of Hugging Face's Trainer with TRL: runs of other programs show
curves and status.
"""


class Outside(OSError):  # noqa: N818 - where it leads
    """A file leads out of the run's directory."""


def inside(root: Path, path: Path) -> Path:
    """The path, if it stays below the root after all links.

    Raises:
        Outside: if it does not.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise Outside(None, "it is a link that leads out of the run's directory", str(path))
    return path


class Tail:
    """The new lines of a file since the last look.

    Args:
        last_bytes: the first look starts so far before the end; 0: at the beginning.

    Attributes:
        starts: how often the file was begun again: cut, replaced or rewritten.
    """

    def __init__(self, path: Path, root: Path, last_bytes: int = 0) -> None:
        self.path = path
        self.starts = 0
        self._last_bytes = last_bytes
        self._root = root
        self._place = 0
        self._inode: tuple[int, int] | None = None
        self._mark = b""
        self._stamp: Version | None = None

    def more(self) -> Iterator[bytes]:
        """Whole lines, with their ends.

        A torn last line waits for its end; one above 1 MiB is skipped.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        stamp = _stamp_of(self.path)
        if stamp == self._stamp:
            return
        if stamp is None:
            self._stamp = None
            self._begin_again(None)
            return
        file = open_plain(inside(self._root, self.path))
        with file:
            seen = os.fstat(file.fileno())
            if (seen.st_dev, seen.st_ino) != self._inode or not self._has_grown(file.fileno(), seen.st_size):
                self._begin_again((seen.st_dev, seen.st_ino))
            file.seek(self._place)
            if self._last_bytes and seen.st_size - self._place > self._last_bytes:
                file.seek(-self._last_bytes, os.SEEK_END)
                file.readline()  # of a line that began earlier
                self._place = file.tell()
            is_overlong = False
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) < MOST_LINE_BYTES:
                        break
                    is_overlong = True
                else:
                    if not is_overlong:
                        yield line
                    is_overlong = False
                self._place = file.tell()
            start = max(0, self._place - _MARK_BYTES)
            self._mark = os.pread(file.fileno(), self._place - start, start)
        self._stamp = stamp  # of before the reading: what comes meanwhile is found by the next look

    def _has_grown(self, fd: int, size: int) -> bool:
        """Whether what was read last is still there, before what is new."""
        start = self._place - len(self._mark)
        return size >= self._place and os.pread(fd, len(self._mark), start) == self._mark

    def _begin_again(self, inode: tuple[int, int] | None) -> None:
        if self._inode is not None or self._place:
            self.starts += 1
        self._inode, self._place, self._mark = inode, 0, b""


@dataclass
class RankTimes:
    """What the timeline says of one rank: its latest phases, all its seconds, and what it does now.

    Times are UTC by the head's clock.
    """

    spans: "deque[tuple[float, float, str, int]]"
    seconds: dict[str, float]
    phase: str = ""
    step: int = 0
    since: float | None = None
    seen: float = 0.0


class FollowedRun:
    """A run that is looked at again and again.

    Args:
        metrics_bytes: of a long metrics.jsonl, only so much of its end is read; 0: all.

    Attributes:
        name: as in addresses; unique among the runs of a board.
        moved_to: the present name of the directory that was here before, after `--fresh`.
        versions: a number for each region, larger after each change.
        problems: why files cannot be read, by region.
    """

    def __init__(self, name: str, root: Path, metrics_bytes: int = 0) -> None:
        self.name = name
        self.root = root
        self._metrics_bytes = metrics_bytes
        self.moved_to = ""
        self.versions: dict[str, int] = defaultdict(int)
        self.problems: dict[str, str] = {}
        self._inode = _inode_of(root)
        self._begin()

    def _begin(self) -> None:
        self.run = RunDir(self.root)
        self.curves = Curves()
        self.holder: Holder | None = None
        self.ranks: dict[int, RankTimes] = {}
        self.warning: tuple[float, str] = (0.0, "")  # when, and the text
        self._rank_files: dict[int, Path] = {}
        self.samples: deque[Mapping[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self.log: deque[LogLine] = deque(maxlen=_MOST_LOG_LINES)
        self.log_skipped: list[str] = []
        self._metrics = Tail(self._metrics_path(), self.root, self._metrics_bytes)
        self._events: dict[Path, Tail] = {}
        self._timelines: dict[Path, Tail] = {}
        self._log_sources: LogSources | None = None
        self._stamps: dict[str, object] = {}
        self._read: dict[Path, tuple[Version | None, Any]] = {}

    def _metrics_path(self) -> Path:
        other = self.root / TRAINER_LOG
        return other if other.exists() and not self.run.metrics.exists() else self.run.metrics

    def look(self, *, at_ranks: bool = True) -> set[str]:
        """Takes in what has changed; the names of regions that show something else now.

        Args:
            at_ranks: whether to look at the files of each rank, too, which may be hundreds.
        """
        changed, warning = self._look_at_place(), self.warning
        of_ranks = [
            ("ranks", self._look_at_timelines),
            ("samples", self._look_at_events),
            ("log", self._look_at_logs),
        ]
        for region, read in [("curves", self._look_at_metrics), *(of_ranks if at_ranks or changed else [])]:
            before = self.problems.pop(region, None)
            try:
                is_new = read()
            except (OSError, ValueError) as error:
                self.problems[region] = getattr(error, "strerror", None) or str(error)
                is_new = False
            if is_new or before != self.problems.get(region):
                changed.add(region)
        changed |= self._look_at_files()
        if "curves" in changed or self.warning != warning:
            changed.add("status")
        for region in changed:
            self.versions[region] += 1
        return changed

    def _look_at_place(self) -> set[str]:
        inode = _inode_of(self.root)
        if (
            inode is None or inode == self._inode
        ):  # None: moved in this moment, and the next run is still to come
            return set()
        old, self._inode = self._inode, inode
        self.moved_to = next((str(path) for path in _old_names(self.root) if _inode_of(path) == old), "")
        generation = self.curves.generation
        self._begin()
        self.curves.generation = generation + 1
        return {
            "status", "verdict", "curves", "rollouts", "ranks", "data", "checkpoints", "samples", "config", "log",
        }  # fmt: skip

    # ---- growing files

    def _look_at_metrics(self) -> bool:
        path = self._metrics_path()
        if not path.exists() and (state := trainer_state_of(self.root)) is not None:
            return self._look_at_trainer_state(state)
        if path != self._metrics.path:
            self._metrics = Tail(path, self.root, self._metrics_bytes)
            self.curves.clear()
        starts, lines = self._metrics.starts, self.curves.lines
        new = self._metrics.more()
        first = next(new, None)
        was_cut = self._metrics.starts != starts
        if was_cut:
            self.curves.clear()
        read = _read_trainer_log if path.name == TRAINER_LOG else parse_metrics_line
        for line in ([first] if first is not None else []) + list(new):
            value = read(line)
            if value is not None:
                self.curves.add(value)
        return was_cut or self.curves.lines != lines

    def _look_at_trainer_state(self, path: Path) -> bool:
        """Curves of Hugging Face's Trainer, whose state is written again at each checkpoint."""
        stamp = _stamp_of(path)
        if stamp == self._stamps.get(TRAINER_STATE):
            return False
        self._stamps[TRAINER_STATE] = stamp
        history = read_object(inside(self.root, path)).get("log_history")
        self.curves.clear()
        for value in history if isinstance(history, list) else []:
            if isinstance(value, dict) and type(value.get("step")) is int:
                self.curves.add(value)
        return True

    def _look_at_timelines(self) -> bool:
        changed = False
        folder = self.run.timeline(0).parent
        clocks: Clocks | None = None
        for path in sorted(folder.glob("timeline-*.jsonl")):
            tail = self._timelines.setdefault(path, Tail(path, self.root))
            starts = tail.starts
            for line in tail.more():
                if tail.starts != starts:  # it was thinned: all of it is read again
                    starts = tail.starts
                    self._forget_ranks(path)
                clocks = clocks or Clocks(self.run)
                changed = self._take_time(line, path, clocks) or changed
        return changed

    def _forget_ranks(self, path: Path) -> None:
        for rank in [rank for rank, file in self._rank_files.items() if file == path]:
            self.ranks.pop(rank, None)

    def _take_time(self, line: bytes, path: Path, clocks: Clocks) -> bool:
        try:
            entry = parse_json(line)
            rank, when, phase = int(entry["rank"]), entry["time"], str(entry["phase"])[:60]
            step, seconds = int(entry["step"]), entry["seconds"]
        except (ValueError, KeyError, TypeError):
            return False
        if not is_time(when) or not 0 <= rank < 1 << 16:
            return False
        if "warning" in entry:
            self.warning = max(self.warning, (when, str(entry["warning"])[:2_000]), key=lambda one: one[0])
            return True
        times = self.ranks.get(rank)
        if times is None:
            times = self.ranks[rank] = RankTimes(deque(maxlen=_MOST_SPANS), defaultdict(float))
        self._rank_files[rank] = path
        start = when - clocks.ahead_s(rank)
        if isinstance(seconds, dict):
            since = entry.get("since")
            times.since = since - clocks.ahead_s(rank) if is_time(since) else None
            for name, value in seconds.items():
                if name in ("data", "compute", "comm", "other") and is_time(value):
                    times.seconds[name] += value
            times.phase, times.step, times.seen = phase, step, max(times.seen, start)
        elif is_time(seconds):
            times.spans.append((start, float(seconds), phase, step))
            times.seen = max(times.seen, start + seconds)
        return True

    def _look_at_events(self) -> bool:
        changed = False
        for path in sorted(self.run.events(0).parent.glob("rank-*.jsonl")):
            tail = self._events.setdefault(path, Tail(path, self.root))
            starts = tail.starts
            for line in tail.more():
                if tail.starts != starts:
                    starts = tail.starts
                    self.samples.clear()
                if b'"sample"' not in line[:200]:
                    continue
                message = read_message(line.decode("utf-8", "replace"))
                if message is not None and message["kind"] == "sample":
                    self.samples.append(message)
                    changed = True
        return changed

    def _look_at_logs(self) -> bool:
        if self._log_sources is None:
            self._log_sources = self.log_sources(last_bytes=_LOG_BYTES)
        sources = self._log_sources
        folders = (self.run.log("HOST", 0).parent, self.run.events(0).parent)
        stamp = (*(_stamps_in(folder) for folder in folders), _stamp_of(self.run.verdict))
        if stamp == self._stamps.get("log"):
            return False
        self._stamps["log"] = stamp
        sources.find()
        before = len(self.log_skipped)
        new = list(sources.more(whole=True))
        self.log.extend(new)
        sources.report_skipped(self.log_skipped.append)
        del self.log_skipped[:-50]
        return bool(new) or len(self.log_skipped) != before

    def log_sources(self, *, last_bytes: int | None = None) -> LogSources:
        """The run's logs from the beginning, or from near their ends."""
        return LogSources(self.run, accepts=self.accepts, last_bytes=last_bytes)

    def read(self, path: Path) -> Any:
        """The JSON value of a file of the run, parsed once for each of its versions.

        Raises:
            OSError, ValueError: as `files.read_json`, or because it leads out of the run.
        """
        stamp = _stamp_of(path)
        known = self._read.get(path)
        if known is None or known[0] != stamp or stamp is None:
            known = self._read[path] = (stamp, read_json(inside(self.root, path)))
            while len(self._read) > _MOST_READ:
                self._read.pop(next(iter(self._read)))
        return known[1]

    def accepts(self, path: Path) -> bool:
        """Whether a file is in the run's directory after all links."""
        try:
            inside(self.root, path)
        except OSError:
            return False
        return True

    # ---- files that are replaced

    def _look_at_files(self) -> set[str]:
        run = self.run
        self.holder = watched_holder(run.lock) if self.accepts(run.lock) else None
        verified = run.checkpoints / "verified.json"
        seen = {
            "status": (self.holder, run.lock.exists(), _stamp_of(run.plan), _stamp_of(run.result)),
            "verdict": (_stamp_of(run.verdict), _stamp_of(run.verdicts)),
            "data": _stamp_of(run.data),
            "rollouts": _stamp_of(run.rollouts),  # files appear in it whole
            "checkpoints": (_stamp_of(run.checkpoints), _stamp_of(verified)),
            "config": (_stamp_of(run.plan), _stamp_of(run.config)),
        }
        changed = {name for name, stamp in seen.items() if self._stamps.get(name) != stamp}
        self._stamps |= seen
        return changed | ({"ranks"} if "verdict" in changed else set())


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _stamp_of(path: Path) -> Version | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def _stamps_in(folder: Path) -> tuple[tuple[str, int], ...]:
    """The files of a folder with their sizes."""
    try:
        with os.scandir(folder) as entries:
            return tuple((entry.name, entry.stat().st_size) for entry in entries)
    except OSError:
        return ()


def _old_names(root: Path) -> list[Path]:
    return sorted(root.parent.glob(f"{root.name}.old-*"))


def trainer_state_of(root: Path) -> Path | None:
    """The newest state of Hugging Face's Trainer in a directory: its own, or that of the last
    checkpoint.
    """
    steps = [
        (int(matched[1]), path / TRAINER_STATE)
        for path in root.glob("checkpoint-*")
        if (matched := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / TRAINER_STATE).is_file()
    ]
    state = root / TRAINER_STATE
    return state if state.is_file() else max(steps)[1] if steps else None


def _read_trainer_log(line: bytes) -> dict[str, object] | None:
    """A line of LLaMA-Factory's log in our keys."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("current_steps")) is not int:
        return None
    names = {"current_steps": "step", "learning_rate": "lr"}
    numbers: dict[str, object] = {names.get(str(key), str(key)): number for key, number in value.items()}
    return numbers if value["current_steps"] >= 0 else None


def is_run(path: Path) -> bool:
    """Whether a directory holds a run, of unisono or of another trainer."""
    run = RunDir(path)
    files = (run.plan, run.metrics, run.result, run.verdict, run.lock, path / TRAINER_LOG)
    return any(file.is_file() for file in files) or trainer_state_of(path) is not None


def _shows_a_run(path: Path) -> bool:
    """Whether a directory holds a run, or might: one that cannot be searched is shown, too."""
    try:
        return path.is_dir() and is_run(path)
    except OSError:
        return True


def find_runs(paths: list[Path]) -> list[tuple[str, Path]]:
    """The runs at some paths, with unique names; a directory of runs stands for those in it.

    A name is what is shown, and what leads to the run: the directory's, without control characters.
    """
    roots: list[Path] = []
    for path in paths:
        inner = sorted(item for item in path.iterdir() if _shows_a_run(item)) if not is_run(path) else []
        roots += inner or [path]
    roots = list(dict.fromkeys(roots))
    named: list[tuple[str, Path]] = []
    taken: set[str] = set()
    for root in roots:
        whole = Path(os.path.normpath(root.absolute()))  # a browser removes `..` from an address
        name = one_line(whole.name) or "run"
        if name in taken:
            name = one_line(f"{whole.parent.name}-{whole.name}")
        base, number = name, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        named.append((name, root))
    return named

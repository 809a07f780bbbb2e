"""Where the ranks of a node spend their time: the front samples their heartbeats and appends
events/timeline-NODE.jsonl.

    {"schema": 1, "time": …, "rank": 3, "phase": "comm", "step": 40, "seconds": 0.31}
    {"schema": 1, "time": …, "rank": 3, "phase": "comm", "step": 41,
     "seconds": {"data": 0.2, "compute": 7.9, "comm": 1.7, "other": 0.2}}

The first kind is a phase that lasted more than 0.1 s; time: its start. A line with a text
`warning`, its `cause` and `ranks`, and 0 seconds is a suspicion of a stall, which one without text
ends. The second kind is a summary, at least one every 10 s and rank: the seconds since the last
one, the current phase and, if that has lasted for longer than 0.1 s, `since`, its start. Times are
UTC seconds by the node's own clock. A file has at most 125 kB for each rank, and 1 MB for up to 8:
then its older half is thinned. Nothing here waits for a disk in the thread of the caller. A node
whose output_dir is not the head's sends the same lines to the head every 3 s, which keeps a copy of
the file.
"""

import contextlib
import errno
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, Self, TypedDict

from unisono.base.files import make_private_dir, parse_json, read_bytes, whole_file
from unisono.guard.facts.storage import responds
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.node_messages import TimelineLines
from unisono.guard.watch import PHASES
from unisono.guard.watch.views import BeatMemory, Glance

LEAST_S = 0.1
SUMMARY_S = 10.0
_SAMPLE_S = 0.1
_WRITE_S = 3.0
"""A write costs 1.5 ms of CPU, most of it for the process that tries the storage first."""
_ANSWER_S = 10.0
_CLOSE_S = 1.0
_MOST_NEWS = 1_000
"""Lines of a message to the head, about 100 bytes each; older ones stay with the node. 8 ranks have
at most 240 in 3 s.
"""
_LINE_CHARS = 1_000
_BYTES_OF_RANK = 125_000
_LEAST_BYTES = 1_000_000
_KEPT_SHARE = 0.25
"""Share of the phases in the older half that stay: the longest ones."""
_MOST_WARNED = 64
_SHARES = ("data", "compute", "comm", "other")
_SHARE_OF = {phase.name: phase.share for phase in PHASES}


class TimelineEntry(TypedDict):
    """A line of the file; above are its kinds. A line that was read has at least its rank: another
    version may have written it.
    """

    schema: NotRequired[int]
    time: NotRequired[float]
    rank: int
    phase: NotRequired[str]
    step: NotRequired[int]
    seconds: NotRequired[float | dict[str, float]]
    since: NotRequired[float]
    warning: NotRequired[str]
    cause: NotRequired[str]
    ranks: NotRequired[list[int]]


@dataclass
class RankTime:
    """The phases of one rank, from samples of its heartbeat.

    Pure: seconds of any clock go in, entries come out.

    Attributes:
        rank: its number.
        summary_at: when the next summary covers time from.
    """

    rank: int
    summary_at: float
    _phase: str = ""
    _visit: int = -1
    _began: float = 0.0
    _step: int = 0
    _shares: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    _ahead: dict[str, float] = field(default_factory=dict)

    def note(self, glance: Glance, now: float, *, at: float) -> list[TimelineEntry]:
        """Takes a sample; gives the phase that has ended, if it was long, and a summary, if one is
        due.

        Args:
            now: the time of the sample.
            at: the time of the heartbeat.
        """
        entries = []
        if (glance.phase, glance.visit) != (self._phase, self._visit):
            if self._phase and at - self._began > LEAST_S:
                entries.append(self._entry(self._began, at - self._began))
            self._phase, self._visit, self._began = glance.phase, glance.visit, at
        self._step = glance.step
        if now - self.summary_at >= SUMMARY_S:
            entries.append(self._summary(glance, now))
        return entries

    def end(self, glance: Glance | None, now: float) -> list[TimelineEntry]:
        """The current phase, which the end of the rank cuts, and a last summary."""
        entries = [self._summary(glance, now)] if glance is not None and now > self.summary_at else []
        if self._phase and now - self._began > LEAST_S:
            entries.append(self._entry(self._began, now - self._began))
        return entries

    def _entry(self, when: float, seconds: float) -> TimelineEntry:
        return {
            "schema": 1,
            "time": round(when, 3),
            "rank": self.rank,
            "phase": self._phase,
            "step": self._step,
            "seconds": round(seconds, 3),
        }

    def _summary(self, glance: Glance, now: float) -> TimelineEntry:
        """Seconds of finished phases come from the rank's own sums; those of the current one from
        the samples, and later sums are reduced by them.
        """
        passed = now - self.summary_at
        grown = [new - old for new, old in zip(glance.shares_s, self._shares, strict=True)]
        if min(grown) < 0:  # the rank was started again
            grown, self._ahead = list(glance.shares_s), {}
        seconds = {}
        for name, sum_s in zip(_SHARES, grown, strict=True):
            early = min(self._ahead.get(name, 0.0), sum_s)
            self._ahead[name] = self._ahead.get(name, 0.0) - early
            seconds[name] = sum_s - early
        current = _SHARE_OF.get(self._phase, "other")
        running = max(0.0, min(passed - sum(seconds.values()), now - self._began))
        seconds[current] += running
        self._ahead[current] = self._ahead.get(current, 0.0) + running
        seconds["other"] += max(0.0, passed - sum(seconds.values()))
        self._shares, self.summary_at = glance.shares_s, now
        entry = self._entry(now, 0.0)
        entry["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        if now - self._began > LEAST_S:
            entry["since"] = round(self._began, 3)
        return entry


class Timeline:
    """Appends the timeline of a node's ranks while it is open, by a thread of its own.

    A disk that fails or hangs ends it silently: nothing depends on it.
    """

    def __init__(
        self,
        run: RunDir,
        node_rank: int,
        beats: Callable[[], Mapping[int, BeatMemory]],
        *,
        is_sent: bool = False,
    ) -> None:
        """Opens nothing yet.

        Args:
            run: whose events/timeline-NODE.jsonl is written.
            node_rank: of this node.
            beats: gives those of the present ranks; called in the thread.
            is_sent: whether `take_news` is called, to send the lines to the head.
        """
        self._run_dir = run
        self._node_rank = node_rank
        self._beats = beats
        self._ranks: dict[int, RankTime] = {}
        self._files: dict[int, _File] = {}
        self._news: deque[bytes] | None = deque(maxlen=_MOST_NEWS) if is_sent else None
        self._told_at = time.monotonic()
        self._copied: deque[tuple[int, list[bytes], int]] = deque(maxlen=_MOST_NEWS)
        self._written_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def start(self) -> Self:
        """Begins to sample."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Writes what is left, if the disk answers within a second."""
        self._over.set()
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def warn(self, ranks: Sequence[int], text: str, cause: str) -> None:
        """Writes that ranks may have stalled, at the first of them, and why; an empty text ends an
        earlier warning.
        """
        entry: TimelineEntry = {
            "schema": 1,
            "time": round(time.time(), 3),
            "rank": min(ranks, default=0),
            "phase": "",
            "step": 0,
            "seconds": 0.0,
            "warning": text,
            "cause": cause,
            "ranks": list(ranks[:_MOST_WARNED]),
        }
        self._copied.append((self._node_rank, [_line(entry)], 0))
        self._written_at = 0.0  # it is written with the next sample

    def take_news(self) -> TimelineLines | None:
        """A message to the head with the latest lines, at most every 3 s and after `close`; None if
        there is nothing to send.
        """
        is_due = self._over.is_set() or time.monotonic() - self._told_at > _WRITE_S
        if not self._news or not is_due:
            return None
        self._told_at = time.monotonic()
        lines: list[str] = []
        with contextlib.suppress(IndexError):  # the thread adds to the other end
            while len(lines) < _MOST_NEWS:
                lines.append(self._news.popleft().decode())
        return TimelineLines(tuple(lines))

    def take(self, node_rank: int, news: TimelineLines, ranks: Collection[int]) -> None:
        """Keeps a copy of lines from another node.

        Args:
            node_rank: of that node.
            news: from its `take_news`.
            ranks: of that node; lines of others are dropped.
        """
        entries = (read_entry(line[:_LINE_CHARS].encode()) for line in news.lines[:_MOST_NEWS])
        lines = [_line(one) for one in entries if one and one["rank"] in ranks]
        self._copied.append((node_rank, lines, len(ranks)))

    def sample(self) -> None:
        """Looks at each rank once."""
        now, ns = time.time(), time.monotonic_ns()
        for rank, memory in self._present():
            glance = _glance_at(memory)
            if glance is None:
                continue
            at = now - (ns - glance.at_ns) / 1e9
            rank_time = self._ranks.get(rank)
            if rank_time is None:
                rank_time = self._ranks[rank] = RankTime(rank, min(at, now))
            self._add(rank_time.note(glance, now, at=at))

    def _add(self, entries: Iterable[TimelineEntry]) -> None:
        lines = [_line(entry) for entry in entries]
        self._file(self._node_rank).waiting += lines
        if self._news is not None:
            self._news += lines

    def _file(self, node_rank: int) -> "_File":
        if node_rank not in self._files:
            self._files[node_rank] = _File(self._run_dir.timeline(node_rank))
        return self._files[node_rank]

    def _present(self) -> list[tuple[int, BeatMemory]]:
        try:
            return list(self._beats().items())
        except RuntimeError:  # a rank came or went in this moment: the next sample sees it
            return []

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._closing_files():
            make_private_dir(self._run_dir.timeline(self._node_rank).parent)
            # Steps of a fixed length must not fall into step with the samples.
            while not self._over.wait(_SAMPLE_S * random.uniform(0.5, 1.0)):  # noqa: S311
                self.sample()
                if time.monotonic() - self._written_at > _WRITE_S:
                    self._write()
            now, present = time.time(), dict(self._present())
            for rank, rank_time in self._ranks.items():
                memory = present.get(rank)
                glance = _glance_at(memory) if memory is not None else None
                self._add(rank_time.end(glance, now))
            self._write()

    @contextlib.contextmanager
    def _closing_files(self) -> Iterator[None]:
        try:
            yield
        finally:
            for file in self._files.values():
                file.close()

    def _write(self) -> None:
        """Appends what waits.

        Raises:
            OSError: from the file system.
        """
        self._written_at = time.monotonic()  # first, as `warn` resets it while this waits for the storage
        while self._copied:
            node_rank, lines, ranks = self._copied.popleft()
            file = self._file(node_rank)
            file.waiting += lines
            file.ranks = max(file.ranks, ranks)
        self._file(self._node_rank).ranks = len(self._ranks)
        files = [file for file in self._files.values() if file.waiting]
        if not files:
            return
        # By a separate process: a thread that hangs in the kernel would keep this whole process
        # from ending.
        if not responds(self._run_dir.root, limit_s=_ANSWER_S):
            raise OSError(errno.EIO, "the storage does not answer", str(self._run_dir.root))
        for file in files:
            file.write()


class _File:
    """A timeline file.

    Attributes:
        waiting: lines that are not written yet.
        ranks: their number, for the size of the file.
    """

    def __init__(self, path: Path) -> None:
        self.waiting: list[bytes] = []
        self.ranks = 0
        self._path = path
        self._fd: int | None = None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def write(self) -> None:
        """Appends what waits, as whole lines, and thins a file that is too large.

        Raises:
            OSError: from the file system; a line that was written in part is removed.
        """
        try:
            fd = self._opened()
        except FileNotFoundError:
            # The run's directory was removed or replaced; whoever makes it again makes this one,
            # too.
            return
        data, self.waiting = b"".join(self.waiting), []
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # torn by a kill of an earlier front
            data = b"\n" + data
        written = os.write(fd, data)
        if written < len(data):
            os.ftruncate(fd, size)
        if size + written > max(_LEAST_BYTES, _BYTES_OF_RANK * self.ranks):
            thin_file(self._path)

    def _opened(self) -> int:
        """The file at the path; if that was removed with its directory, a new one with the same
        content.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        old, self._fd = self._fd, fd
        if old is not None:
            try:
                if os.fstat(fd).st_size == 0:
                    os.write(fd, os.pread(old, os.fstat(old).st_size, 0))
            finally:
                os.close(old)
        return fd


def _glance_at(memory: BeatMemory) -> Glance | None:
    try:
        return memory.glance()
    except ValueError:  # closed: the ranks are gone
        return None


def _line(entry: TimelineEntry) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def thin_file(path: Path) -> None:
    """Replaces the file by one with a thinner older half; whole or not at all.

    Raises:
        OSError: from the file system.
    """
    lines = read_bytes(path).splitlines()
    older = [entry for line in lines[: len(lines) // 2] if (entry := read_entry(line)) is not None]
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.writelines(_line(entry) for entry in thinned(older))
        file.writelines(line + b"\n" for line in lines[len(lines) // 2 :] if line)


def read_entry(line: bytes) -> TimelineEntry | None:
    """The entry of a line; None for a torn or foreign one."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    is_entry = isinstance(value, dict) and type(value.get("rank")) is int
    return value if is_entry else None


def thinned(entries: Iterable[TimelineEntry]) -> list[TimelineEntry]:
    """About a third of the entries, in order: the longest phases stay, and each two summaries of a
    rank become one.
    """
    phases: list[TimelineEntry] = []
    summaries: list[TimelineEntry] = []
    open_: dict[int, TimelineEntry] = {}
    for entry in entries:
        if not isinstance(entry.get("seconds"), dict):
            phases.append(entry)
        elif (first := open_.pop(entry["rank"], None)) is None:
            open_[entry["rank"]] = entry
        else:
            summaries.append(_joined(first, entry))
    phases.sort(key=lambda entry: -sum(_parts(entry).values()))
    kept = phases[: int(len(phases) * _KEPT_SHARE)]
    return sorted([*kept, *summaries, *open_.values()], key=lambda entry: float(entry.get("time") or 0.0))


def _joined(first: TimelineEntry, second: TimelineEntry) -> TimelineEntry:
    """A summary of the time of two."""
    one, other = _parts(first), _parts(second)
    sums = {name: round(one.get(name, 0.0) + other.get(name, 0.0), 3) for name in {**one, **other}}
    return {**second, "seconds": sums}


def _parts(entry: TimelineEntry) -> dict[str, float]:
    """Its seconds by share; of a phase, without a name."""
    seconds = entry.get("seconds") or 0.0
    return seconds if isinstance(seconds, dict) else {"": float(seconds)}

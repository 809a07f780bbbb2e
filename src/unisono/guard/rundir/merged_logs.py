"""Merges the output and the events of a run's ranks with its verdicts, in the order of the head's
clock.
"""

import contextlib
import heapq
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeGuard

from unisono.base.causes.signatures import match_line
from unisono.base.errors import UsageError
from unisono.base.files import MOST_LINE_BYTES, objects_of, open_plain, parse_json, read_object, read_text
from unisono.base.messages import Message, read_message
from unisono.base.text import one_line, show_bytes
from unisono.guard.rundir import RunDir, or_nearest_run

_NAME = "-rank-"
_NOBODY = -1  # in place of a rank: the run as a whole
_FOLLOW_S = 0.5
_NOT_SIGNS = ("progress", "finished")
_LAST_TIME = 1e11  # seconds since 1970: five thousand years; a larger number is damage
_NULS = "they hold nothing but NUL bytes"
_NO_TIME = "their time cannot be read"


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One line: `printed` by a rank, `told` as an event, or a `verdict` on the run.

    Attributes:
        time: UTC by the head's clock, seconds; of a printed line the moment at which the front saw
            the log grow past it; 0: not known.
        rank: -1: the run as a whole.
    """

    time: float
    rank: int
    order: int
    host: str = field(compare=False)
    source: Literal["printed", "told", "verdict"] = field(compare=False)
    text: str = field(compare=False)

    @property
    def label(self) -> str:
        """Its source; `*`: an event, `!`: a printed line with a known signature."""
        if self.rank == _NOBODY:
            return "the run *"
        mark = " *" if self.source == "told" else " !" if self.signatures else ""
        return f"rank {self.rank}{' ' + self.host if self.host else ''}{mark}"

    @property
    def signatures(self) -> list[str]:
        """Ids of the signatures that a printed line has, without those that only show progress."""
        matches = match_line(self.text) if self.source == "printed" else []
        return [signature.id for signature in matches if signature.kind not in _NOT_SIGNS]


def merged_logs(root: Path, *, on_skip: Callable[[str], None] = lambda _: None) -> Iterator[LogLine]:
    """All lines of all ranks, and the verdicts, in time; lines of one file stay in their order.

    Args:
        on_skip: gets a line for people for each file that cannot be read, and for lines that were
            left out.

    Raises:
        UsageError: if the directory is not a run, or has no logs.
    """
    sources = LogSources(RunDir(root))
    sources.find()
    if not sources.all:
        raise UsageError.of(
            f"{root} has no logs",
            where=str(root),
            why="there is neither logs/ nor events/ with anything in it"
            if root.exists()
            else "it does not exist",
            fix=or_nearest_run(root, "pass the output_dir of a run that has been started"),
        )
    yield from sources.more(whole=False)
    sources.report_skipped(on_skip)


def followed_logs(root: Path, *, on_skip: Callable[[str], None] = lambda _: None) -> Iterator[LogLine]:
    """The lines of merged_logs, then new ones until the run has ended. Late lines are given late.

    Raises:
        UsageError: if the directory is not a run, or has no logs.
    """
    sources = LogSources(RunDir(root))
    sources.find()
    if not sources.all and not sources.run.lock.is_file():
        yield from merged_logs(root)  # which refuses it
    while True:
        is_over = not sources.run.lock.is_file()
        sources.find()
        yield from sources.more(whole=not is_over)
        sources.report_skipped(on_skip)
        if is_over:
            break
        time.sleep(_FOLLOW_S)


class LogSources:
    """The files of a run, as they come."""

    def __init__(
        self,
        run: RunDir,
        *,
        accepts: Callable[[Path], bool] = lambda _: True,
        last_bytes: int | None = None,
    ) -> None:
        """Finds no file yet.

        Args:
            accepts: whether a file may be read.
            last_bytes: how much of the end of each file is read at first; None: all of it.
        """
        self.run = run
        self._accepts = accepts
        self._last_bytes = last_bytes
        self.all: dict[Path, _Printed | _EventFile] = {}
        self._verdicts = _Verdicts(run)
        self._reported: set[str] = set()

    def find(self) -> None:
        """Takes in files that are new."""
        clocks = Clocks(self.run)
        for kind, folder, pattern in (
            (_Printed, self.run.log("HOST", 0).parent, f"*{_NAME}*.log"),
            (_EventFile, self.run.events(0).parent, "rank-*.jsonl"),
        ):
            for path in sorted(folder.glob(pattern)):
                if path not in self.all and self._accepts(path):
                    self.all[path] = kind(path, clocks)
                    if self._last_bytes is not None:
                        self.all[path].begin_near_end(self._last_bytes)

    def more(self, *, whole: bool) -> Iterator[LogLine]:
        """New lines since the last call."""
        return heapq.merge(*(source.more(whole=whole) for source in self.all.values()), self._verdicts.more())

    def report_skipped(self, on_skip: Callable[[str], None]) -> None:
        """Reports each unreadable file once, and how many lines of the others were left out since
        the last call.
        """
        for path, source in self.all.items():
            name = path.relative_to(self.run.root)
            if source.refused and str(name) not in self._reported:
                self._reported.add(str(name))
                on_skip(f"{name} cannot be read: {source.refused}")
            for why, count in source.skipped.items():
                on_skip(f"{name}: {count} {'line was' if count == 1 else 'lines were'} skipped: {why}")
            source.skipped.clear()


class Clocks:
    """By how much the clocks of the nodes are ahead of the head's, as it was measured when they
    called it.
    """

    def __init__(self, run: RunDir) -> None:
        nodes = objects_of(read_object(run.agreement).get("nodes"))
        self._of_node = {str(node.get("node_rank")): _seconds(node.get("clock_offset_s")) for node in nodes}
        hosts = Counter(str(node.get("host")) for node in nodes)
        self._of_host = {
            host: _seconds(node.get("clock_offset_s"))
            for node in nodes
            if hosts[host := str(node.get("host"))] == 1
        }
        places = objects_of(read_object(run.plan).get("ranks"))
        self._node_of_rank = {str(place.get("rank")): str(place.get("node_rank")) for place in places}
        self._host_of_rank = {str(place.get("rank")): str(place.get("host")) for place in places}

    def ahead_s(self, rank: int, host: str = "") -> float:
        """How far the clock of a rank's node is ahead, in seconds; 0 where it was not measured.

        The name of the rank's log says the host.
        """
        host = host or self._host_of_rank.get(str(rank), "")
        if host in self._of_host:
            return self._of_host[host]
        return self._of_node.get(self._node_of_rank.get(str(rank), ""), 0.0)


class _OfRank:
    """A file of one rank, read from where the last reading ended.

    Attributes:
        refused: why it cannot be read; empty while it can be.
        skipped: lines that were left out since the last report, by reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._order = 0
        self._now = 0.0
        self.refused = ""
        self.skipped: Counter[str] = Counter()

    def begin_near_end(self, most_bytes: int) -> None:
        """Skips all but the last bytes, and the line that they begin in; before the first
        reading.
        """
        try:
            with open_plain(self._path) as file:
                size = file.seek(0, os.SEEK_END)
                if size > most_bytes:
                    file.seek(size - most_bytes)
                    file.readline(most_bytes)
                    self._place = file.tell()
        except OSError as error:
            self.refused = error.strerror or str(error)

    def _lines(self, *, whole: bool) -> Iterator[bytes]:
        """The lines that have come; one without an end in pieces, and with `whole` the last one
        only once it has ended.
        """
        try:
            with open_plain(self._path) as file:
                file.seek(self._place)
                while line := file.readline(MOST_LINE_BYTES):
                    if whole and not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                        return  # the rest of it is still to come
                    self._place += len(line)
                    self._order += 1
                    yield line
        except OSError as error:
            self.refused = error.strerror or str(error)


class _Printed(_OfRank):
    """A rank's log.

    Its lines carry no time; the file of sizes beside it says when it had grown so far.
    """

    def __init__(self, path: Path, clocks: Clocks) -> None:
        super().__init__(path)
        self._host, _, rank = path.stem.rpartition(_NAME)
        self._rank = _number(rank)
        self._ahead_s = clocks.ahead_s(self._rank, self._host)

    def more(self, *, whole: bool) -> Iterator[LogLine]:
        sizes = iter(_sizes(self._path.with_suffix(".times")))
        seen = next(sizes, None)
        for line in self._lines(whole=whole):
            content = line.strip(b"\r\n")
            # A crash or a full disk leaves a gigabyte of NULs.
            if content and content == bytes(len(content)):
                self.skipped[_NULS] += 1
                continue
            while seen is not None and seen[1] < self._place:
                seen = next(sizes, None)
            self._now = max(self._now, seen[0] - self._ahead_s if seen else self._now)
            # what a terminal would have kept of a progress bar
            text = content.rpartition(b"\r")[2].decode("utf-8", "replace")
            yield LogLine(self._now, self._rank, self._order, self._host, "printed", text)


class _EventFile(_OfRank):
    """The events of one rank."""

    def __init__(self, path: Path, clocks: Clocks) -> None:
        super().__init__(path)
        self._rank = _number(path.stem.rpartition("-")[2])
        self._ahead_s = clocks.ahead_s(self._rank)

    def more(self, *, whole: bool) -> Iterator[LogLine]:
        for line in self._lines(whole=whole):
            message = read_message(line.decode("utf-8", "replace"))
            if message is None:  # torn by a kill
                continue
            when = message.get("time")
            if when is None:  # not a wrong time, but none
                when = 0.0
            if not is_time(when):
                self.skipped[_NO_TIME] += 1
                continue
            self._now = max(self._now, float(when) - self._ahead_s)
            yield LogLine(self._now, self._rank, self._order, "", "told", _as_text(message))


class _Verdicts:
    """The verdicts of the run and its earlier starts, with the times of their files."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._last = 0.0
        self._last_text = ""

    def more(self) -> Iterator[LogLine]:
        lines: list[LogLine] = []
        for path in (*self._run.verdicts.glob("*.json"), self._run.verdict):
            body = read_object(path)
            at = 0.0
            with contextlib.suppress(OSError):  # moved to verdicts/ in this moment, by a start
                at = path.stat().st_mtime
            if body.get("cause") and at > self._last:
                text = one_line(f"verdict: {body.get('summary')} [{body['cause']}]")
                # The verdict was completed with more evidence.
                if path == self._run.verdict and text == self._last_text:
                    continue
                self._last_text = text
                lines.append(LogLine(at, _NOBODY, len(lines), "", "verdict", text))
        self._last = max((line.time for line in lines), default=self._last)
        yield from sorted(lines)


def _sizes(path: Path) -> list[tuple[float, int]]:
    """(time, bytes) as the front noted them; empty where there is no such file."""
    sizes = []
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            when, size = parse_json(line)
        except (ValueError, TypeError):
            continue  # torn by a kill
        if is_time(when) and isinstance(size, int):
            sizes.append((float(when), size))
    return sizes


def _as_text(message: Message) -> str:
    """`phase load_model: loading builtin:tiny`; of other events the kind, and each field with its
    value.
    """
    fields = {name: value for name, value in message.items() if name not in ("kind", "time", "traceback")}
    if message["kind"] == "phase":
        head = f"phase {fields.pop('phase', '')}"
        text = [str(fields.pop("text"))] if fields.get("text") else []
    else:
        head, text = str(message["kind"]), []
    return one_line(f"{head}: " + ", ".join([*text, *_pairs(fields)]))


def _pairs(fields: dict[str, object]) -> Iterator[str]:
    """`step 12`, and sizes with their unit; the fields of an object stand without its name."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _pairs(value)
        elif name.rpartition("_")[2] == "bytes" and type(value) is int:
            yield f"{name.removesuffix('bytes').removesuffix('_')} {show_bytes(value)}".strip()
        elif value not in (None, ""):
            yield f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def is_time(value: object) -> TypeGuard[float]:
    """Whether a number can be a time in seconds since 1970.

    JSON may hold 1e400, or a number of a thousand digits.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LAST_TIME


def _seconds(value: object) -> float:
    """0 where nothing was measured: the head's own clock, or one rank alone."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LAST_TIME else 0.0


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0

"""From paths to a diagnosis: where logs come from, how far they are read, and what they hold, one
log after the other.
"""

import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from unisono.base.errors import UsageError
from unisono.base.files import open_given
from unisono.guard.diagnosis.article_text import without_navigation
from unisono.guard.diagnosis.attribution import with_host
from unisono.guard.diagnosis.flight_recording import (
    MOST_BYTES,
    NotARecordingError,
    Recording,
    is_recording,
    read_recording,
)
from unisono.guard.diagnosis.flight_rules import judge_recordings, with_recordings
from unisono.guard.diagnosis.gather import gather
from unisono.guard.diagnosis.hypotheses import is_about_a_failure
from unisono.guard.diagnosis.judge import DiagnosisResult, judge, make_diagnosis
from unisono.guard.diagnosis.own_runs import diagnose_run, is_run, log_files
from unisono.guard.diagnosis.report_terms import Feature, find_features
from unisono.guard.diagnosis.report_text import MOST_BYTES as MOST_REPORT_BYTES
from unisono.guard.diagnosis.report_text import ReportText, read_report
from unisono.guard.diagnosis.scan import Scanned, scan
from unisono.guard.diagnosis.stated_versions import FEATURE, stated_versions
from unisono.guard.rundir import or_nearest_run

STDIN = "-"
MOST_FILES = 4096
"""Maximum number of files in a directory; more belong to a dataset, not a run."""
# fmt: off
_NOT_LOGS = frozenset(
    [".py", ".pyc", ".so", ".pt", ".pth", ".bin", ".safetensors", ".arrow", ".parquet", ".npy", ".npz",
     ".png", ".svg", ".jpg", ".zip", ".tar", ".whl", ".model", ".tiktoken", ".lock", ".distcp", ".idx"]
)
# fmt: on
_GZIP_MAGIC = b"\x1f\x8b"


class ReadingProgress(Protocol):
    """Shows how far logs are read."""

    def show(self, done: int) -> None:
        """So many bytes are read."""
        ...

    def close(self) -> None:
        """Nothing more is read."""
        ...


class _Unseen:
    def __init__(self, total: int) -> None:
        """Shows nothing of the `total` bytes."""

    def show(self, done: int) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


def diagnose_paths(
    paths: list[str],
    *,
    on_refused: Callable[[str], None],
    reading: Callable[[int], ReadingProgress] = _Unseen,
) -> DiagnosisResult:
    """The cause of a failed run, from logs of any tool, or from one directory of our own runs.

    Args:
        paths: logs, or directories of logs; - is stdin.
        on_refused: gets a line for each log that is not read, or only in part.
        reading: shows the progress, made with the number of bytes.

    Raises:
        UsageError: if there is no log that can be read.
    """
    root = Path(paths[0])
    if len(paths) == 1 and is_run(root):
        return diagnose_run(root, lambda: _of_logs(log_files(root), on_refused, reading))
    return _of_logs(paths, on_refused, reading)


def _of_logs(
    paths: list[str], on_refused: Callable[[str], None], reading: Callable[[int], ReadingProgress]
) -> DiagnosisResult:
    try:
        sources = find_sources(paths)
    except FileNotFoundError as error:
        raise UsageError.of(
            f"{error} does not exist",
            where=str(error),
            fix=or_nearest_run(Path(str(error)), "pass a log, or a directory with logs"),
        ) from None
    line = reading(sum(source.size for source in sources))
    try:
        read = read_all(sources, on_read=line.show)
    finally:
        line.close()
    for refused in read.refused:
        on_refused(f"not read: {refused}")
    if paths and not read.scanned and not read.recordings:
        raise UsageError.of(
            "there is no log that can be read",
            where=" ".join(paths),
            fix="pass a log, or a directory with logs",
        )
    for report in read.reports:
        if report.language == "other":
            on_refused(
                f"{report.name}: an unsupported language: only English and Chinese words and log lines were"
                " read"
            )
    return diagnose_logs(read.scanned, read.recordings, read.reports)


@dataclass(frozen=True, slots=True)
class Source:
    """A log.

    Attributes:
        name: for display: the shortest end of the path that is unique.
        path: the file; None: stdin.
    """

    name: str
    path: Path | None

    @property
    def size(self) -> int:
        """Bytes on the disk, 0 if unknown."""
        try:
            return self.path.stat().st_size if self.path else 0
        except OSError:
            return 0

    @property
    def is_pipe(self) -> bool:
        """Whether it is a named pipe, e.g. of a process substitution or mkfifo."""
        try:
            return self.path is not None and stat.S_ISFIFO(self.path.stat().st_mode)
        except OSError:
            return False

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """A stream of its decompressed bytes.

        Raises:
            OSError: if it cannot be read.
        """
        if self.path is None:
            yield sys.stdin.buffer
            return
        with open_given(self.path) as raw:
            if raw.peek(2)[:2] != _GZIP_MAGIC:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked  # type: ignore[misc]  # only read(n) is used


def find_sources(paths: list[str]) -> list[Source]:
    """The logs below these paths, in the order of their names.

    Raises:
        FileNotFoundError: if a path does not exist.
    """
    unique: dict[Path, None] = {}
    stdin = False
    for path in paths:
        if path == STDIN or _is_stdin(Path(path)):
            stdin = True
        else:
            unique.update(dict.fromkeys(_files(Path(path))))
    files = list(unique)
    sources = [Source(name, path) for name, path in zip(_short_names(files), files, strict=True)]
    return [*([Source("stdin", None)] if stdin else []), *sources]


def _is_stdin(path: Path) -> bool:
    """Whether a path that is not a regular file is stdin: /dev/stdin, /dev/tty."""
    try:
        status = path.stat()
        return not stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(0))
    except OSError:
        return False


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise FileNotFoundError(path)
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            one = Path(folder) / name
            if one.suffix.lower() not in _NOT_LOGS and one.is_file():
                count += 1
                if count > MOST_FILES:
                    return
                yield one


def _short_names(paths: list[Path]) -> list[str]:
    """For each path the shortest suffix that no other path ends with."""
    names = []
    for path in paths:
        parts = path.parts
        length = next(
            (
                length
                for length in range(1, len(parts) + 1)
                if sum(other.parts[-length:] == parts[-length:] for other in paths) == 1
            ),
            len(parts),
        )
        names.append("/".join(parts[-length:]).lstrip("/") or str(path))
    return names


LEAST_UNPACKED_BYTES = 1 << 30
MOST_RATIO = 200
"""Maximum compression ratio of a log; real ones are below 100."""
MOST_PIPED_BYTES = 1 << 34
"""Maximum size of a named pipe, e.g. `<(…)`. An endless one is not read forever; stdin is."""


@dataclass(slots=True)
class LimitedStream:
    """A stream with progress and a limit.

    Attributes:
        packed_bytes: its size on the disk; 0: unknown.
        on_read: called with the number of bytes read from the disk, and of decompressed bytes.
        is_pipe: whether it is a named pipe, which is read up to MOST_PIPED_BYTES.
        given_bytes: number of bytes returned.
        cut: whether it ended at the limit.
        damage: the error of a corrupt compressed file, at which it ended.
    """

    stream: BinaryIO
    packed_bytes: int
    on_read: Callable[[int, int], None]
    is_pipe: bool = False
    given_bytes: int = 0
    cut: bool = False
    damage: str = ""

    def read(self, size: int) -> bytes:
        """The next bytes; empty at the end or at the limit.

        Raises:
            OSError: if it cannot be read.
        """
        if self.is_pipe and self.given_bytes >= MOST_PIPED_BYTES:
            self.cut = True
            return b""
        packed = getattr(self.stream, "fileobj", None)  # of a gzip.GzipFile
        data = self.stream.read(size) if packed is None else self._unpacked(size)
        self.given_bytes += len(data)
        self.on_read(packed.tell() if packed is not None else self.given_bytes, self.given_bytes)
        return data

    def _unpacked(self, size: int) -> bytes:
        """Bytes up to the limit, or up to the corrupt part: GzipFile.read would discard them."""
        parts: list[bytes] = []
        missing = size
        while missing > 0 and not self.damage:
            if self.given_bytes + size - missing >= max(LEAST_UNPACKED_BYTES, MOST_RATIO * self.packed_bytes):
                self.cut = True
                break
            try:
                part = self.stream.read1(missing)  # type: ignore[attr-defined]
            except (OSError, EOFError, zlib.error) as error:
                self.damage = str(error)
                break
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


_HEAD_BYTES = 4096


@dataclass(slots=True)
class LogContents:
    """Contents of some logs.

    Attributes:
        reports: texts that people wrote among them; their log lines are in `scanned`.
        refused: a line for each file that could not be read, or not completely.
        bytes: number of bytes read.
    """

    scanned: list[Scanned] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    reports: list[ReportText] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    bytes: int = 0


def read_all(sources: Sequence[Source], *, on_read: Callable[[int], None] = lambda _: None) -> LogContents:
    """Reads all logs.

    Args:
        on_read: called from time to time with the number of bytes read from the disk, of all logs.
    """
    read, before = LogContents(), 0
    for source in sources:
        size = source.size
        watched = None
        try:
            with source.open() as stream:
                watched = LimitedStream(stream, size, _counted_from(before, on_read))
                watched.is_pipe = source.is_pipe
                _read_one(source, stream, watched, read)
        except (OSError, EOFError, zlib.error, NotARecordingError) as error:
            read.refused.append(f"{source.name}: {getattr(error, 'strerror', None) or error}")
        if watched:
            read.bytes += watched.given_bytes
            if watched.damage:
                read.refused.append(
                    f"{source.name}: damaged after {watched.given_bytes} bytes: {watched.damage}"
                )
            if watched.cut:
                of = "a pipe" if source.is_pipe else f"a compressed file of {size / 1e6:.1f} MB"
                read.refused.append(
                    f"{source.name}: only the first {watched.given_bytes / 1e9:.1f} GB were read, of {of}"
                )
        before += size
    return read


def _counted_from(before: int, on_read: Callable[[int], None]) -> Callable[[int, int], None]:
    return lambda packed, _: on_read(before + packed)


def diagnose_logs(
    scanned: Sequence[Scanned], recordings: Sequence[Recording] = (), reports: Sequence[ReportText] = ()
) -> DiagnosisResult:
    """The diagnosis of logs, flight recordings and reports."""
    names = frozenset(report.name for report in reports)
    only_reports = bool(reports) and not recordings and names.issuperset(one.name for one in scanned)
    features = {report.name: [*_quoted(report)] for report in reports}
    # A README beside logs says nothing of the run, and its log lines are examples.
    if not only_reports:
        features = {name: of_report for name, of_report in features.items() if is_about_a_failure(of_report)}
    facts = gather([one for one in scanned if one.name in features or one.name not in names], excerpts=names)
    findings = with_recordings(judge(facts), judge_recordings(recordings))
    return make_diagnosis(
        [with_host(finding, facts) for finding in findings],
        facts,
        [feature for of_report in features.values() for feature in of_report],
        language=reports[0].language if only_reports else "",
        reports=reports,
    )


def _quoted(report: ReportText) -> Iterator[Feature]:
    """The features of a report, with quotations in the very characters of the file."""
    for feature in find_features(report.name, report.passages):
        line = feature.where.rpartition(":")[2]
        text = feature.text.strip("…")
        yield replace(feature, text=report.verbatim(int(line), text)) if line.isdecimal() else feature
    for one in stated_versions(report.passages):
        if one.bug:
            yield Feature(FEATURE, f"{report.name}:{one.line}", one.text, "version")
            break


def _read_one(source: Source, stream: Any, watched: LimitedStream, read: LogContents) -> None:
    if is_recording(stream.peek(_HEAD_BYTES)):
        read.recordings.append(read_recording(source.name, watched.read(MOST_BYTES + 1)))
        return
    head = _head(watched)
    report = read_report(source.name, head)
    if report:
        report = replace(report, passages=tuple(without_navigation(report.passages)))
        read.reports.append(report)
        read.scanned.append(scan(source.name, io.BytesIO(report.log_text().encode())))
    else:
        # `scan` uses only read(n).
        read.scanned.append(scan(source.name, _Rewound(head, watched)))  # type: ignore[arg-type]


_BLOCK = 1 << 16


def _head(watched: LimitedStream) -> bytes:
    """The beginning of a log: all of it, if it is short enough for a report."""
    parts, size = [], 0
    while size <= MOST_REPORT_BYTES and (part := watched.read(_BLOCK)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


class _Rewound:
    """A stream whose beginning was read already."""

    def __init__(self, head: bytes, stream: LimitedStream) -> None:
        self._head, self._stream = io.BytesIO(head), stream

    def read(self, size: int) -> bytes:
        """The next bytes."""
        return self._head.read(size) or self._stream.read(size)

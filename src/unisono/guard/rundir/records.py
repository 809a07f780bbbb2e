"""The records of a run: metrics.jsonl, one line a step; and how a start ended, result.json and
verdict.json.

metrics.jsonl has one writer, which writes whole lines. On resume, the lines after the checkpoint
are removed.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from unisono.base.causes import Verdict
from unisono.base.files import (
    iterate_lines,
    make_private_dir,
    open_plain,
    parse_json,
    read_json,
    whole_file,
    write_json,
)
from unisono.guard.rundir import RunDir

_LINE_BYTES = 1 << 20
_NUMBERS = 8
_MOST_STEPS = 1 << 53
_CHUNK_BYTES = 1 << 20


class MetricsWriter:
    """Appends lines.

    A full disk delays lines but does not stop training: they are written once there is space again.

    One thread appends; `sync` may be called from a different one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = _open_metrics(path)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that could not be written yet."""
        return len(self._waiting)

    @property
    def link(self) -> Path:
        """Where the open file is now, as the kernel shows it: with ` (deleted)` at the end if it
        was removed.
        """
        return Path(f"/proc/self/fd/{self._fd}").readlink()

    def move_to(self, path: Path) -> None:
        """Continues at another path, with all lines, from the next `sync` on."""
        self._path = path

    def append(self, line: Mapping[str, object]) -> None:
        """Writes one object; floats round-trip exactly, and NaN becomes null."""
        data = (json.dumps(without_nan(line), allow_nan=False) + "\n").encode()
        with self._lock:
            self._waiting.append(data)
            self._flush()

    def sync(self) -> None:
        """Makes appended lines survive a power failure; called before a checkpoint that relies on
        them.

        Raises:
            OSError: if a line cannot be written, or the file cannot be synced.
        """
        with self._lock:
            if self._fd is None:
                return
            error = self._flush()
            self._follow_path()
            fd = self._fd
        if error is not None:
            raise error
        os.fsync(fd)  # without the lock: steps continue while the disk syncs

    def close(self) -> OSError | None:
        """Closes the file; returns the error if waiting lines are lost.

        A second call does nothing.
        """
        with self._lock:
            if self._fd is None:
                return None
            error = self._flush()
            # The directory was removed, and is not created again.
            with contextlib.suppress(OSError):
                self._follow_path()
            with contextlib.suppress(
                OSError
            ):  # of a network disk; lines before a checkpoint are already synced
                os.close(self._fd)
            self._fd = None
            return error

    def _follow_path(self) -> None:
        """If the file was removed or renamed, continues at the path in a new file with all lines of
        the old one.
        """
        assert self._fd is not None, "closed"
        ours = os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            there = self._path.stat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return
        with whole_file(self._path) as temporary, temporary.open("wb") as copy:
            offset = 0
            while chunk := os.pread(self._fd, _CHUNK_BYTES, offset):
                offset += copy.write(chunk)
        os.close(self._fd)
        self._fd = _open_metrics(self._path)

    def _flush(self) -> OSError | None:
        """Writes waiting lines; returns the error if some remain."""
        assert self._fd is not None, "closed"
        while self._waiting:
            written = 0
            try:
                while written < len(self._waiting[0]):
                    written += os.write(self._fd, self._waiting[0][written:])
            except OSError as error:
                return self._without_part(error, written)
            self._waiting.pop(0)
        return None

    def _without_part(self, error: OSError, written: int) -> OSError:
        """The error with its path, after removing a partially written line: the disk may be full in
        the middle of one.
        """
        assert self._fd is not None
        if written:
            try:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            except OSError:  # then the rest of the line follows later
                self._waiting[0] = self._waiting[0][written:]
        return OSError(error.errno, error.strerror, str(self._path))


def _open_metrics(path: Path) -> int:
    """Opens the file, also for reading, so that its lines can be copied if it is removed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return fd


@dataclass(frozen=True, slots=True)
class Truncation:
    """The lines removed from metrics.jsonl.

    Attributes:
        later: number of lines of later steps, including a truncated last line.
        damaged: number of lines before the end that were unreadable or out of order.
        numbers: line numbers of the first of those, from 1.
        aside: the original file, if there were such lines.
    """

    later: int = 0
    damaged: int = 0
    numbers: tuple[int, ...] = ()
    aside: Path | None = None

    def warning(self) -> dict[str, str] | None:
        """The fields of a `warning` message about damaged lines; None without any."""
        if self.aside is None:
            return None
        listed = ", ".join(map(str, self.numbers)) + (" …" if self.damaged > len(self.numbers) else "")
        what = f"line {listed} is" if self.damaged == 1 else f"{self.damaged} lines ({listed}) are"
        return {
            "code": "metrics_damaged",
            "text": f"metrics.jsonl: {what} damaged and skipped; the original file is {self.aside}",
            "where": f"{self.aside}:{self.numbers[0]}",
            "fix": (
                "check the disk if nobody edited the file; to get a line back, correct it there and insert it"
                " before the next start"
            ),
        }


def truncate_after(path: Path, step: int, *, evaluated: bool = True) -> Truncation:
    """Removes the lines of later steps and a truncated last line.

    Other invalid lines are removed only after the file was backed up.

    Args:
        step: the last to keep.
        evaluated: whether to keep that step's evaluation; False if it is created again.

    Raises:
        OSError: if there is no space for the shorter file beside the old one; the old one stays.
    """
    if not path.exists():
        return Truncation()
    with open_plain(path) as file:
        cut = _survey(file, step, evaluated=evaluated)
        if not cut.later and not cut.damaged:
            return cut
        if cut.damaged:
            cut = replace(cut, aside=_keep_copy(path))
        file.seek(0)
        with whole_file(path) as temporary, temporary.open("wb") as shorter:
            shorter.writelines(line for _, line in _numbered(file) if _stays(line, step, evaluated=evaluated))
    return cut


def _survey(file: IO[bytes], step: int, *, evaluated: bool) -> Truncation:
    """Counts the lines to remove.

    A line before one that is kept does not belong to later steps, whatever its content.
    """
    damaged = later = 0
    numbers: list[int] = []
    numbers_later: list[int] = []
    for number, line in _numbered(file):
        if _stays(line, step, evaluated=evaluated):
            damaged, later = damaged + later, 0
            numbers, numbers_later = [*numbers, *numbers_later][:_NUMBERS], []
        elif later or parse_metrics_line(line) is not None or not line.endswith(b"\n"):
            later += 1
            numbers_later = [*numbers_later, number][:_NUMBERS]
        else:
            damaged += 1
            numbers = [*numbers, number][:_NUMBERS]
    return Truncation(later, damaged, tuple(numbers))


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, from 1. An overlong line is given as an empty one."""
    number = 0
    while piece := file.readline(_LINE_BYTES):
        number += 1
        line = piece
        while not piece.endswith(b"\n") and (piece := file.readline(_LINE_BYTES)):
            line = b"\n"
        yield number, line


def _keep_copy(path: Path) -> Path:
    """Backs the file up as a hard link, or as a copy if the file system has no links."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        try:
            os.link(path, aside)
        except FileExistsError:
            continue
        except OSError:
            if aside.exists():
                continue
            with whole_file(aside) as temporary:
                shutil.copyfile(path, temporary)
        return aside
    raise AssertionError("unreachable: there is always one more number")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; none without a file."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines in order; truncated ones are skipped."""
    with contextlib.suppress(FileNotFoundError):
        for line in iterate_lines(path):
            value = parse_metrics_line(line)
            if value is not None:
                yield value


def best_evaluated(path: Path, steps: Collection[int], *, metric: str) -> tuple[int, dict[str, Any]] | None:
    """The step among `steps` with the lowest eval_loss, or the highest value of another metric, and
    its line; None if none was evaluated.
    """
    key, sign = best_key(metric)
    measured = {
        line["step"]: line
        for line in iterate_metrics(path)
        if isinstance(line.get(key), float) and line["step"] in steps
    }
    if not measured:
        return None
    step = min(measured, key=lambda step: (sign * measured[step][key], step))
    return step, measured[step]


def is_evaluation(line: Mapping[str, object]) -> bool:
    """Whether a line of the metrics is that of an evaluation, not of a step."""
    return any(name.startswith("eval_") for name in line)


def best_key(metric: str) -> tuple[str, int]:
    """The key of a metric in an evaluation's line, and 1 if lower values are better, -1 if higher
    ones are.
    """
    return ("eval_loss", 1) if metric == "eval_loss" else (f"eval_{metric}", -1)


def without_nan(value: Any) -> Any:
    """A JSON value with null for NaN and infinities, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _stays(line: bytes, step: int, *, evaluated: bool) -> bool:
    value = parse_metrics_line(line)
    if value is None or value["step"] > step:
        return False
    return evaluated or value["step"] < step or not is_evaluation(value)


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    return value if 0 <= value["step"] < _MOST_STEPS else None


# ---- how a start ended

Outcome = Literal[
    "completed",
    "refused",
    "disagreed",
    "stalled",
    "died",
    "unfit",
    "corrupt",
    "preempted",
    "interrupted",
    "failed",
]


_OUTCOMES: dict[int, Outcome] = {
    0: "completed",
    1: "failed",
    2: "refused",
    3: "disagreed",
    4: "stalled",
    5: "died",
    6: "unfit",
    7: "corrupt",
    75: "preempted",
    130: "interrupted",
}


def outcome_of(exit_code: int) -> Outcome:
    """The word of result.json for an exit code."""
    return _OUTCOMES.get(exit_code, "failed")


STOPPED_WITHOUT_A_STALL = {
    "nan_loss": "NaN loss",
    "replicas_diverged": "ranks diverged",
    "unequal_steps": "unequal steps",
    "collective_mismatch": "different collectives",
    "node_unreachable": "a node is unreachable",
}
"""Causes of exit code 4 with which no rank has stalled, and a short word for each."""


def shown_outcome(outcome: str, verdict: object) -> str:
    """The outcome for people, e.g. `completed`, or `stopped: NaN loss`, which is `stalled` in
    files: ended by a verdict while the ranks lived.

    Args:
        outcome: of a result.
        verdict: the object of its verdict; anything else has no say.
    """
    cause = verdict.get("cause") if isinstance(verdict, dict) else None
    why = STOPPED_WITHOUT_A_STALL.get(cause) if outcome == "stalled" and isinstance(cause, str) else None
    return f"stopped: {why}" if why else outcome


class Restart(BaseModel):
    """One automatic restart.

    Attributes:
        cost_s: from the verdict to the first step after it; null without one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    verdict: dict[str, object]
    from_step: int
    seconds: float
    cost_s: float | None = None


class ReadBackResult(BaseModel):
    """How the written files compare with the trained model.

    Attributes:
        compared: `logits`, of image models `predictions`, or `digests`.
        why: digests only.
        differs_by: relative to the spread of what was compared; None for digests.
        tolerance: what rounding explains.
        seconds: how long it took.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    compared: Literal["logits", "predictions", "digests"]
    why: str = ""
    differs_by: float | None = None
    tolerance: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a run came; its fields are those of `RunResult`."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    eval: Mapping[str, object] = field(default_factory=dict)
    tokens_per_second: float | None = None
    checkpoint: str | None = None
    weights: str | None = None
    read_back: ReadBackResult | None = None


class RunResult(BaseModel):
    """The object of result.json. Unknown fields of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", serialize_by_alias=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    run_id: str | None = ""
    """None where a start was refused before it had a run."""
    outcome: Outcome
    exit_code: int
    output_dir: str | None = ""
    step: int = 0
    tokens: int = 0
    """Input tokens since step 1, without padding."""
    loss: float | None = None
    eval: dict[str, object] = {}
    tokens_per_second: float | None = None
    checkpoint: str | None = None
    weights: str | None = None
    """adapter/ or model/, once the run is completed."""
    read_back: ReadBackResult | None = None
    """None where the written files were not loaded again."""
    verdict: dict[str, object] | None = None
    problems: list[dict[str, str]] = []
    """The problems of a refused start."""
    restarts: list[Restart] = []
    wall_time_s: float = 0.0
    dry_run: bool = False
    """Nothing was started. Not in result.json, which such a start does not write."""
    held_by: str = ""
    """On other nodes than the head: the node whose output_dir holds the run."""

    @property
    def is_completed(self) -> bool:
        """Whether the run reached its planned end."""
        return self.outcome == "completed"

    def to_json(self) -> dict[str, object]:
        """The object of result.json; NaN is null."""
        exclude = {name for name in ("problems", "dry_run", "held_by") if not getattr(self, name)}
        body: dict[str, object] = without_nan(self.model_dump(mode="python", exclude=exclude))
        return body

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Reads what to_json wrote.

        Raises:
            pydantic.ValidationError: if it is not a valid result.
        """
        return cls.model_validate(value)


def write_result(run: RunDir, result: RunResult) -> None:
    """Writes result.json atomically."""
    write_json(run.result, result.to_json(), mode=0o600)


def read_result(run: RunDir) -> RunResult | None:
    """How the last start ended; None if it has not ended, or the file is unreadable."""
    try:
        return RunResult.from_json(read_json(run.result))
    except (OSError, ValueError):
        return None


def set_verdict(run: RunDir, verdict: Verdict | None) -> None:
    """Writes verdict.json, or none with None; an earlier one moves to verdicts/."""
    if run.verdict.exists():
        make_private_dir(run.verdicts)
        run.verdict.rename(_next_number(run.verdicts))
    if verdict is not None:
        write_json(run.verdict, verdict.to_json(), mode=0o600)


def complete_verdict(run: RunDir, verdict: Verdict) -> None:
    """Updates verdict.json of this start with later findings."""
    write_json(run.verdict, verdict.to_json(), mode=0o600)


def _next_number(directory: Path) -> Path:
    """The next free path: 0001.json, or one above the highest number."""
    numbers = [int(path.stem) for path in directory.glob("*.json") if path.stem.isdecimal()]
    return directory / f"{max(numbers, default=0) + 1:04d}.json"

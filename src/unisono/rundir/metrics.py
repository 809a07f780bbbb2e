"""metrics.jsonl: one writer, a whole line a write; on resume, what came after the checkpoint is cut off."""

import errno
import json
import math
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from unisono.files import whole_file


class MetricsWriter:
    """Appends lines. A full disk delays lines, and ends no training: they are written once there is room again.

    One thread appends; `sync` is for another one, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that could not be written yet."""
        return len(self._waiting)

    def append(self, line: dict[str, Any]) -> None:
        """Writes one object; floats read back to the same bits, and what is not a number becomes null."""
        data = (json.dumps(without_nan(line), allow_nan=False) + "\n").encode()
        with self._lock:
            self._waiting.append(data)
            self._flush()

    def sync(self) -> None:
        """Makes what was appended survive a power cut; before a checkpoint that counts on it.

        Raises:
            OSError: if a line cannot be written, or the file cannot be synced.
        """
        with self._lock:
            error = self._flush() if self._fd is not None else None
        if error is not None:
            raise error
        if self._fd is not None:  # not under the lock: steps go on while the disk takes its time
            os.fsync(self._fd)

    def close(self) -> None:
        """Ends the file. Closing twice is once."""
        with self._lock:
            if self._fd is not None:
                self._flush()
                os.close(self._fd)
                self._fd = None

    def _flush(self) -> OSError | None:
        """Writes what waits; gives why some of it still does."""
        assert self._fd is not None, "closed"
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                return error
            if written < len(line):  # the disk was full in the middle of the line
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._waiting.pop(0)
        return None


def cut_after(path: Path, step: int, *, evaluated: bool = True) -> int:
    """Removes the lines of later steps and what is no whole line, a torn last one above all. Gives how many went.

    Args:
        path: of the file.
        step: the last that stays.
        evaluated: whether that step's evaluation stays, too; False where it is yet to be made.

    Raises:
        OSError: if there is no room for the shorter file beside the old one; the old one stays.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        gone = sum(not _stays(line, step, evaluated=evaluated) for line in file)
        if not gone:
            return 0
        file.seek(0)
        with whole_file(path) as temporary, temporary.open("wb") as shorter:
            shorter.writelines(line for line in file if _stays(line, step, evaluated=evaluated))
    return gone


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; none if there is no file."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines, one after the other; torn ones are passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            value = _parse(line)
            if value is not None:
                yield value


def best_evaluated(path: Path, steps: Collection[int]) -> tuple[int, float] | None:
    """The step of the lowest eval_loss among `steps`, and that loss; None if none of them was evaluated."""
    measured = [
        (line["eval_loss"], line["step"])
        for line in iterate_metrics(path)
        if isinstance(line.get("eval_loss"), float) and line["step"] in steps
    ]
    if not measured:
        return None
    loss, step = min(measured)
    return step, loss


def without_nan(value: Any) -> Any:
    """The same JSON value with null where a float is not a number or is infinite, for which JSON has no word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _stays(line: bytes, step: int, *, evaluated: bool) -> bool:
    value = _parse(line)
    if value is None or value["step"] > step:
        return False
    return evaluated or value["step"] < step or "eval_loss" not in value


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line that was written to its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None

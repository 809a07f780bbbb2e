"""Runs that were started from the page: a queue, one at a time.

A run is an ordinary `unisono train` with its own front. It outlives this server, which finds it
again by its process and its record.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.files import objects_of, parse_json, read_object, write_json, write_text
from unisono.front.studio.commands import COMMAND
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import watched_holder

_TAIL_BYTES = 64 << 10
_MOST_KEPT = 200


@dataclass
class RecordedStart:
    """One start of a run.

    Attributes:
        id: of this start; also the name of its config and its log.
        words: of the command, after `unisono`.
        output_dir: absolute.
        state: queued, running, ended or cancelled.
        launcher: the name of its owner's options; empty: this machine.
        pid: of the front.
        born: when the kernel started it, in clock ticks since boot: a pid is used again.
        result: the last line of its output, once it has ended: outcome, problems.
    """

    id: str
    words: list[str]
    output_dir: str
    state: str = "queued"
    launcher: str = ""
    pid: int = 0
    born: int = 0
    asked: float = field(default_factory=time.time)
    result: dict[str, Any] = field(default_factory=dict)


class RunQueue:
    """The starts, in order. All methods are called in one thread."""

    def __init__(self, folder: Path, state: Path) -> None:
        """Reads what an earlier server recorded.

        Args:
            folder: the working directory of runs.
            state: the directory of records, configs and logs.
        """
        self._folder = folder
        self._state = state
        self._file = state / "queue.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = _read_starts(self._file)

    def add(
        self, name: str, text: str, *, output_dir: Path, options: list[str], launcher: str = ""
    ) -> RecordedStart:
        """Queues a new run.

        Args:
            name: what its config is named after.
            text: the config.
            output_dir: absolute.
            options: of `unisono train`, and overrides.
            launcher: the name of those among them that say where it runs.
        """
        start_id = self._new_id(name)
        path = self._state / "configs" / f"{start_id}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return self._queue(start_id, path, output_dir, options, launcher)

    def add_again(
        self, config: Path, *, output_dir: Path, options: list[str], launcher: str = ""
    ) -> RecordedStart:
        """Queues a run that exists already: to be resumed, extended, or begun afresh."""
        return self._queue(self._new_id(output_dir.name), config, output_dir, options, launcher)

    def launcher_of(self, output_dir: Path) -> str:
        """The launcher with which a run was started last."""
        starts = [one for one in self.starts if one.output_dir == str(output_dir)]
        return starts[-1].launcher if starts else ""

    def _queue(
        self, start_id: str, config: Path, output_dir: Path, options: list[str], launcher: str
    ) -> RecordedStart:
        if any(
            one.output_dir == str(output_dir) and one.state in ("queued", "running") for one in self.starts
        ):
            raise UsageError.of(
                f"{output_dir.name} is queued or running already",
                fix="stop it first, or choose another output_dir",
            )
        shown = str(config.relative_to(self._folder)) if config.is_relative_to(self._folder) else str(config)
        start = RecordedStart(start_id, ["train", shown, *options], str(output_dir), launcher=launcher)
        self.starts.append(start)
        self.look()
        return start

    def look(self) -> None:
        """Notes which have ended, and begins the next one if none is running."""
        before = [asdict(one) for one in self.starts]
        for start in self.starts:
            if start.state == "running" and not self._lives(start):
                start.state, start.result = "ended", _last_result(self._log(start))
        if not any(one.state == "running" for one in self.starts):
            following = next((one for one in self.starts if one.state == "queued"), None)
            if following is not None:
                self._begin(following)
        if [asdict(one) for one in self.starts] != before:
            self._save()

    def stop(self, output_dir: Path) -> str:
        """Ends a run with a checkpoint, or takes it from the queue; what was done.

        Raises:
            UsageError: if it is neither running on this machine nor queued.
        """
        for start in self.starts:
            if start.output_dir == str(output_dir) and start.state == "queued":
                start.state = "cancelled"
                self._save()
                return "cancelled"
        pid = self._pid_of(output_dir)
        if pid is None:
            raise UsageError.of(f"{output_dir.name} is not running on this machine", fix="reload the page")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        return "stopping"

    def cancel(self, start_id: str) -> None:
        """Takes a start from the queue by its id.

        Raises:
            UsageError: if it is not queued.
        """
        start = next((one for one in self.starts if one.id == start_id and one.state == "queued"), None)
        if start is None:
            raise UsageError.of("this start is not in the queue", fix="reload the page")
        start.state = "cancelled"
        self._save()

    def _pid_of(self, output_dir: Path) -> int | None:
        """The front of a run: one that was started here, or whoever holds the run's lock."""
        for start in self.starts:
            if start.output_dir == str(output_dir) and start.state == "running" and self._lives(start):
                return start.pid
        holder = watched_holder(RunDir(output_dir).lock)
        return holder.pid if holder is not None and holder.host == os.uname().nodename else None

    def _begin(self, start: RecordedStart) -> None:
        log = self._log(start)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*COMMAND, *start.words, "--json"],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._children[start.id] = process
        start.state, start.pid, start.born = "running", process.pid, _born(process.pid) or 0

    def _lives(self, start: RecordedStart) -> bool:
        child = self._children.get(start.id)
        if child is not None:
            return child.poll() is None
        return start.pid > 0 and _born(start.pid) == start.born

    def _log(self, start: RecordedStart) -> Path:
        return self._state / "logs" / f"{start.id}.jsonl"

    def _new_id(self, name: str) -> str:
        base = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:60] or "run"
        taken, number = {one.id for one in self.starts}, 1
        while f"{base}-{number}" in taken or (self._state / "configs" / f"{base}-{number}.yaml").exists():
            number += 1
        return f"{base}-{number}"

    def _save(self) -> None:
        ended = [one for one in self.starts if one.state not in ("queued", "running")]
        self.starts = [one for one in self.starts if one not in ended[:-_MOST_KEPT]]
        write_json(self._file, {"schema": 1, "starts": [asdict(one) for one in self.starts]}, mode=0o600)


def _read_starts(path: Path) -> list[RecordedStart]:
    try:
        records = objects_of(read_object(path).get("starts"))
    except (OSError, ValueError):
        return []
    names = {one.name for one in fields(RecordedStart)}
    return [
        RecordedStart(**record) for record in records if {"id", "words", "output_dir"} <= {*record} <= names
    ]


def _born(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if it has ended."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if parts[0] in (b"Z", b"X") else int(parts[19])


def _last_result(log: Path) -> dict[str, Any]:
    """The outcome and the problems in the last line of a run's output."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            value = parse_json(line)
            if isinstance(value, dict) and value.get("kind") == "result":
                return {name: value.get(name) for name in ("outcome", "exit_code", "problems")}
    tail = b"\n".join(lines[-20:]).decode(errors="replace")
    return {"outcome": "failed", "exit_code": None, "problems": [{"what": tail}] if tail else []}

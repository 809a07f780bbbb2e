"""Longer commands that the page starts and waits for: exports, evaluations, answers and uploads,
one at a time, with their progress.
"""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.text import one_line, plain
from unisono.front.studio.commands import COMMAND
from unisono.front.studio.problems import shown_problems
from unisono.guard.facts.environment import all_variables

_MOST_BYTES = 4 << 20
_MOST_TASKS = 50


@dataclass
class PageTask:
    """A command in its process.

    Attributes:
        kind: export, evaluate, answer or push.
        run: the name of the run, and the step of its checkpoint.
        words: of the command, after `unisono`.
        out: what it writes, if anything.
        group: of tasks whose answers are compared.
        environment: variables of the command, e.g. a token, which nothing shows or keeps.
        id: a number, as text.
        said: its latest line of progress.
        answer: the object that it printed.
    """

    kind: str
    run: str
    words: list[str]
    out: Path | None = None
    group: str = ""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    id: str = ""
    state: str = "queued"
    said: str = ""
    answer: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What the page shows."""
        return {
            "id": self.id,
            "kind": self.kind,
            "run": self.run,
            "group": self.group,
            "state": self.state,
            "said": self.said,
            "command": " ".join(["unisono", *self.words]),
            "out": None if self.out is None else str(self.out),
            "answer": self.answer if self.state == "done" else {},
            "problems": shown_problems(self.answer.get("problems") or []),
        }


class Tasks:
    """The tasks of this server, newest last."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: the working directory of the commands.
        """
        self._folder = folder
        self._free = asyncio.Lock()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self.tasks: dict[str, PageTask] = {}
        self._number = 0

    def start(self, task: PageTask) -> PageTask:
        """Starts a command as soon as the one before it has ended."""
        self._number += 1
        task.id = str(self._number)
        self.tasks[task.id] = task
        for old in [one.id for one in self.tasks.values() if one.state in ("done", "failed")][:-_MOST_TASKS]:
            del self.tasks[old]
        self._waiting[task.id] = waiting = asyncio.create_task(self._run(task))
        waiting.add_done_callback(lambda _: self._waiting.pop(task.id, None))
        return task

    def stop(self, task_id: str) -> None:
        """Ends a task, or takes it from the queue.

        Raises:
            UsageError: if it has ended.
        """
        if process := self._processes.get(task_id):
            _end(process)
        elif waiting := self._waiting.get(task_id):
            waiting.cancel()
            self.tasks[task_id].state = "failed"
            self.tasks[task_id].environment.clear()
        else:
            raise UsageError.of("this task is not running", fix="reload the page")

    def close(self) -> None:
        """Ends all tasks."""
        for waiting in list(self._waiting.values()):
            waiting.cancel()
        for process in self._processes.values():
            _end(process)

    async def _run(self, task: PageTask) -> None:
        async with self._free:
            task.state, environment, task.environment = "running", task.environment, {}
            process = await asyncio.create_subprocess_exec(
                *COMMAND, task.words[0], "--json", *task.words[1:], cwd=self._folder, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_MOST_BYTES,
                start_new_session=True, env=all_variables() | environment,
            )  # fmt: skip
            self._processes[task.id] = process
            try:
                output, _ = await asyncio.gather(_read(process.stdout), self._follow(task, process.stderr))
                await process.wait()
            finally:
                del self._processes[task.id]
            task.answer = _last_object(output)
            task.state = "done" if process.returncode == 0 else "failed"

    async def _follow(self, task: PageTask, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        with contextlib.suppress(ValueError):  # a line beyond the limit
            while line := await stream.readline():
                task.said = one_line(plain(line.decode(errors="replace")).strip(), limit=300) or task.said


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    data = b""
    while chunk := await stream.read(1 << 16):
        data = (data + chunk)[-_MOST_BYTES:]
    return data


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def _last_object(output: bytes) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}

"""One started front: what it says and when, and its certain end."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.front_server import Place, start
from unisono.base.causes import Verdict

LIMIT_S = 400.0  # of a loaded machine


@dataclass(frozen=True)
class Line:
    """A line that a front wrote, and when (seconds of the monotonic clock)."""

    at: float
    stream: str
    text: str


@dataclass(frozen=True)
class Named:
    """What a job was ended for, and when the last of its nodes had said so; bench/faults.py makes
    its table of these.

    Attributes:
        verdict: the one that all told.
        seconds: from the fault (the start of the last front, or a blow to a living run) to the
            words on every node.
        ended_s: to the end of the last front.
    """

    verdict: Verdict
    seconds: float
    ended_s: float


def stands(group: int) -> str:
    """What each thread of a process group waits for in the kernel, and where Python is; for a test
    that fails.
    """
    reported = []
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if os.getpgid(pid) != group:
                continue
            reported.append(
                f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:200]}"
            )
            for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                reported.append(
                    f"  {task.name} {(task / 'comm').read_text().strip()} {state}"
                    f" {(task / 'wchan').read_text()}"
                )
            words = ("py-spy", "dump", "--nonblocking", "--pid", str(pid))
            if shutil.which(words[0]):
                reported.append(
                    subprocess.run(words, capture_output=True, text=True, check=False, timeout=20).stdout
                )
    return "\n".join(reported)


class Front:
    """One front on one node. It speaks JSON (`json`) or to people."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        node: int,
        host: str,
        cwd: Path,
        environment: dict[str, str],
        json: bool,
        place: Place | None = None,
        executed: Sequence[str] = (),
    ) -> None:
        """Starts it.

        Args:
            words: its command line.
            node: the node's rank.
            host: the node's name.
            cwd: the working directory.
            environment: all of it.
            json: whether it speaks JSON.
            place: where a forked front is to be.
            executed: the command line that starts it there by exec, where it cannot be forked;
                `words` if empty.
        """
        self.node = node
        self.host = host
        self.json = json
        self.lines: list[Line] = []
        self.started = time.monotonic()
        self.ended: float | None = None
        self.named: Named | None = None
        self._news = threading.Condition()
        self._process = start(
            list(words), place=place, executed=executed, cwd=cwd, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        streams = (("out", self._process.stdout), ("err", self._process.stderr))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        for text in stream:
            with self._news:
                self.lines.append(Line(time.monotonic(), name, text.rstrip("\n")))
                self._news.notify_all()
        stream.close()
        with self._news:
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def label(self) -> str:
        """How verdicts call this node."""
        return f"node {self.node} ({self.host})"

    def text(self, stream: str = "") -> str:
        """All that it wrote, or what it wrote to `out` or `err`."""
        return "\n".join(line.text for line in list(self.lines) if stream in ("", line.stream))

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """The JSON lines of one kind."""
        lines = [line.text for line in list(self.lines) if line.stream == "out" and line.text.startswith("{")]
        return [message for message in map(json.loads, lines) if message.get("kind") == kind]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts that it told, as JSON."""
        return [
            Verdict.from_json(
                {name: value for name, value in message.items() if name not in ("kind", "time")}
            )
            for message in self.messages("verdict")
        ]

    @property
    def result(self) -> dict[str, Any]:
        """The last JSON line."""
        return self.messages("result")[-1]

    def printed_at(self, text: str) -> float | None:
        """When a line first had `text` in it."""
        return next((line.at for line in list(self.lines) if text in line.text), None)

    def wait_for(self, text: str, *, limit_s: float = LIMIT_S) -> float:
        """Waits until a line has `text` in it; gives its time."""
        return self.wait_until(lambda: self.printed_at(text), limit_s=limit_s, what=text)

    def wait_until(
        self, seen: Callable[[], float | None], *, limit_s: float = LIMIT_S, what: str = "it"
    ) -> float:
        """Waits until a question to its lines has an answer."""
        limit = time.monotonic() + limit_s
        with self._news:
            while (found := seen()) is None:
                over = self._process.poll() is not None and not any(t.is_alive() for t in self._readers)
                late = not self._news.wait(0.2) and time.monotonic() > limit
                if over or late:
                    raise AssertionError(f"{self.label} never said {what!r}; it said:\n{self.text()}")
        return found

    def wait(self, *, limit_s: float = LIMIT_S) -> int:
        """Waits for its end; gives the exit code."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            where = stands(self._process.pid)
            self.kill()
            raise AssertionError(
                f"{self.label} did not end in {limit_s:.0f} s; it said:\n{self.text()}\nit stands in\n{where}"
            ) from None
        self.ended = self.ended or time.monotonic()
        for reader in self._readers:
            reader.join(10)
        return code

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the front alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it with its group, whatever it does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # one that waits for a disk that hangs ends with it
                self._process.wait(30)

    def close(self) -> None:
        """Ends it, and waits until all that it wrote is read; its children must be gone."""
        self.kill()
        for reader in self._readers:
            reader.join(10)


def together(fronts: Sequence[Front], *, limit_s: float = LIMIT_S) -> list[int]:
    """Waits for the end of all; gives their exit codes."""
    limit = time.monotonic() + limit_s
    return [front.wait(limit_s=max(1.0, limit - time.monotonic())) for front in fronts]

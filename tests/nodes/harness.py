"""Starts real fronts on several nodes, listens to them, and sees that nothing of them stays."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tests.nodes.ground import Ground, Own
from unisono.causes import Verdict

ENTRY = Path(__file__).parent / "front.py"
LIMIT_S = 150.0
_STRANGERS = re.compile(
    r"^(CUDA_|NCCL_|GLOO_|TORCH|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|NNODES$|NODE_RANK$|NPROC_|UNISONO_|SLURM_|OMP_|PET_)"
)


@dataclass(frozen=True)
class Line:
    """A line that a front wrote, and when (seconds of the monotonic clock)."""

    at: float
    stream: str
    text: str


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
    ) -> None:
        self.node = node
        self.host = host
        self.json = json
        self.lines: list[Line] = []
        self.started = time.monotonic()
        self.ended: float | None = None
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            list(words), cwd=cwd, env=environment, text=True, errors="replace", start_new_session=True,
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

    def said(self, text: str) -> float | None:
        """When a line first had `text` in it."""
        return next((line.at for line in list(self.lines) if text in line.text), None)

    def wait_for(self, text: str, *, limit_s: float = LIMIT_S) -> float:
        """Waits until a line has `text` in it; gives its time."""
        return self.wait_until(lambda: self.said(text), limit_s=limit_s, what=text)

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
            self.kill()
            raise AssertionError(
                f"{self.label} did not end in {limit_s:.0f} s; it said:\n{self.text()}"
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


class Job:
    """One job: a folder for each node with its own config, and the fronts that were started.

    Attributes:
        out: the output_dir that all nodes name.
        token: the shared secret that they are given.
    """

    def __init__(
        self, ground: Ground, folder: Path, *, model: Path, rows: Path, caches: Path, nodes: int
    ) -> None:
        self.ground = ground
        self.folder = folder
        self.nodes = nodes
        self.out = folder / "out"
        self.token = secrets.token_hex(32)
        self.port = ground.head_port()
        self.fronts: list[Front] = []
        self._caches = caches
        self._mark = secrets.token_hex(8)
        for node in range(nodes):
            self.home(node).mkdir()
        self.config(model={"path": str(model)}, data={"train": str(rows)})

    def home(self, node: int) -> Path:
        """The folder in which a node's command is given."""
        return self.folder / f"node{node}"

    def config(self, *nodes: int, **sections: Any) -> None:
        """Lays sections over the config of some nodes, or of all."""
        for node in nodes or range(self.nodes):
            path = self.home(node) / "c.yaml"
            body = json.loads(path.read_text()) if path.exists() else self._default()
            for name, value in sections.items():
                old = body.get(name)
                body[name] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
            path.write_text(json.dumps(body))

    def _default(self) -> dict[str, Any]:
        return {
            "model": {"dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
            "data": {"max_length": 64}, "optim": {"lr": 1e-2}, "duration": "4 steps", "batch": {"global": 8},
            "checkpoint": {"every": "2 steps"}, "device": "cpu", "output_dir": str(self.out),
        }  # fmt: skip

    @property
    def head(self) -> str:
        return f"{self.ground.address(0)}:{self.port}"

    def start(
        self, node: int, *words: str, env: dict[str, str] | None = None, answers: dict[str, Any] | None = None,
        own: Own | None = None, json: bool | None = None, place: int | None = None, topology: bool = True,
    ) -> Front:  # fmt: skip
        """Starts a node's front.

        Args:
            node: its rank, and the folder of its config.
            words: of the command line, after those that every node has.
            env: variables; an empty value takes one away.
            answers: recorded ones, for devices and the like; see front.py.
            own: what it sees in place of the machine's own files and mounts.
            json: whether it speaks JSON; otherwise even nodes do.
            place: where it runs, if not where a node of its rank does.
            topology: whether --nodes, --node-rank and --head are given.
        """
        place = node if place is None else place
        json = node % 2 == 0 if json is None else json
        given = (
            ["--nodes", str(self.nodes), "--node-rank", str(node), "--head", self.head] if topology else []
        )
        command = [
            *self._program(node, answers),
            "train",
            "c.yaml",
            *given,
            *words,
            *(["--json"] if json else []),
        ]
        front = Front(
            self.ground.command(place, command, own or Own()), node=node, host=self.ground.host(place), cwd=self.home(node),
            environment=self._environment(place, env or {}), json=json,
        )  # fmt: skip
        self.fronts.append(front)
        return front

    def start_all(self, *words: str, **named: Any) -> list[Front]:
        """Starts all nodes with the same words."""
        return [self.start(node, *words, **named) for node in range(self.nodes)]

    def _program(self, node: int, answers: dict[str, Any] | None) -> list[str]:
        if answers is None:
            return [sys.executable, "-m", "unisono"]
        path = self.home(node) / f"answers-{len(self.fronts)}.json"
        path.write_text(json.dumps(answers))
        return [sys.executable, str(ENTRY), str(path)]

    def _environment(self, place: int, changes: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _STRANGERS.match(name)}
        cache = self._caches / f"place{place}"
        own = {
            "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache / "cache"), "XDG_CONFIG_HOME": str(cache / "settings"),
            "HF_HUB_OFFLINE": "1", "UNISONO_TOKEN": self.token, "TEST_JOB": self._mark,
        }  # fmt: skip
        return {name: value for name, value in (kept | own | changes).items() if value}

    def processes(self) -> list[psutil.Process]:
        """All living processes of this job, by a mark in their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("TEST_JOB") == self._mark
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks (`-m unisono.worker`), by rank."""
        found = {}
        for process in self.processes():
            try:
                if "unisono.worker" in process.cmdline():
                    found[int(process.environ().get("RANK", "0"))] = process
            except (psutil.Error, OSError):
                continue
        return found

    def wait_gone(self, *, limit_s: float = 30.0) -> None:
        """Waits until no process of the job lives."""
        self.until(lambda: not self.processes(), limit_s=limit_s, what="the job's processes end")

    def until(self, condition: Callable[[], bool], *, limit_s: float = LIMIT_S, what: str = "it") -> None:
        """Waits for an event, with a limit."""
        limit = time.monotonic() + limit_s
        while not condition():
            told = "\n".join(f"--- {front.label}\n{front.text()}" for front in self.fronts)
            assert time.monotonic() < limit, f"never happened: {what}\n{told}"
            time.sleep(0.05)

    def read(self, name: str) -> Any:
        """A JSON file of the output_dir."""
        return json.loads((self.out / name).read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The steps of metrics.jsonl."""
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]

    def waits_for_step(self, step: int) -> None:
        """Waits until a step is in metrics.jsonl."""

        def done() -> bool:
            path = self.out / "metrics.jsonl"
            assert any(front.exit_code is None for front in self.fronts), self.told()
            return path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines())

        self.until(done, what=f"step {step}")

    def told(self) -> str:
        """All that all fronts said, for a failed test."""
        return "\n".join(f"--- {front.label}: {front.exit_code}\n{front.text()}" for front in self.fronts)

    def close(self) -> None:
        """Ends what still runs."""
        for front in self.fronts:
            front.kill()
        for process in self.processes():
            process.kill()
        for front in self.fronts:
            front.close()


def same_words(fronts: Sequence[Front]) -> Verdict:
    """The one fatal verdict that all of these fronts told, in the same words; those that speak to people show its lines."""
    told = [verdict for front in fronts for verdict in front.verdicts if verdict.severity == "fatal"]
    assert told, "no verdict in JSON:\n" + "\n".join(
        f"--- {f.label}: {f.exit_code}\n{f.text()}" for f in fronts
    )
    timeless = {verdict.model_copy(update={"named_after_s": None}).model_dump_json() for verdict in told}
    assert len(timeless) == 1, timeless
    lines = [line for line in told[0].lines() if not line.startswith("SINCE WHEN")]
    for front in fronts:
        if front.json:
            assert len([verdict for verdict in front.verdicts if verdict.severity == "fatal"]) == 1, (
                front.text()
            )
        else:
            missing = [line for line in lines if line not in front.text()]
            assert not missing, f"{front.label} did not say {missing}; it said:\n{front.text()}"
            assert front.text().count(lines[0]) == 1, f"{front.label} said it more than once:\n{front.text()}"
    return told[0]


def refused(
    fronts: Sequence[Front], cause: str, *, hosts: Sequence[str] = (), within_s: float = 40.0, code: int = 3
) -> Verdict:
    """Waits for the end of a job that must not start; asserts exit code, cause, culprits, equal words and the time it took.

    The time is from the start of the last front, so Python's own start is in it.
    """
    codes = together(fronts)
    told = "\n".join(f"--- {front.label}: {front.exit_code}\n{front.text()}" for front in fronts)
    assert codes == [code] * len(fronts), told
    verdict = same_words(fronts)
    assert verdict.cause == cause, told
    assert sorted(verdict.hosts) == sorted(hosts), told
    assert all("Traceback" not in front.text() for front in fronts), told
    last = max(front.started for front in fronts)
    took = max(front.ended or 0.0 for front in fronts) - last
    assert took < within_s, f"{took:.1f} s\n{told}"
    return verdict

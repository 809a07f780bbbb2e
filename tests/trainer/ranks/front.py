"""A small front for tests: starts real ranks on loopback, collects their reports, gives the word,
keeps what they say.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import front_server
from unisono.guard.supervise.child_process import child_environment
from unisono.trainer.plan import RunPlan

Messages = list[dict[str, Any]]
LIMIT_S = 400.0
WORKER = (sys.executable, "-m", "unisono.worker")
SEVERAL = (sys.executable, "-m", "tests.trainer.ranks.several_runs")
ROOT = Path(__file__).parents[3]


@dataclass
class RankProcess:
    """One started rank, and what it has said in each of its runs."""

    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    runs: list[Messages] = field(default_factory=lambda: [[]])
    rest: bytes = b""

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(message) + "\n").encode())
        self.process.stdin.flush()


@dataclass
class Ended:
    """What a start of ranks came to: for each rank its messages and its exit code."""

    messages: list[Messages]
    codes: list[int]
    logs: list[Path]
    seconds: float

    def last(self, rank: int) -> dict[str, Any]:
        return self.messages[rank][-1]

    def of_kind(self, rank: int, kind: str) -> Messages:
        return [message for message in self.messages[rank] if message["kind"] == kind]

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [self.of_kind(rank, "rank_report")[0]["report"] for rank in range(len(self.messages))]


class Front:
    """Starts ranks and listens to them until all have ended; kills what outlives the limit."""

    def __init__(
        self,
        plans: list[RunPlan],
        folder: Path,
        *,
        on_message: Callable[[int, dict[str, Any], list[RankProcess]], None] | None = None,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        options: Sequence[str] = (),
    ) -> None:
        """`options` are those of `several_runs`."""
        self.world = plans[0].world_size
        self._on_message = on_message
        self._runs = len(plans)
        files = []
        for number, plan in enumerate(plans):
            files.append(folder / f"plan-{number}.json")
            files[-1].write_text(json.dumps(plan.to_json()))
        program = WORKER if len(plans) == 1 else SEVERAL
        self.ranks = [
            self._start([*program, *map(str, files), *options], rank, folder, environment(rank))
            for rank in range(self.world)
        ]

    def listen(self) -> list[Ended]:
        """What came of each run; of a single one, with its exit codes."""
        began = time.monotonic()
        selector = selectors.DefaultSelector()
        for number, rank in enumerate(self.ranks):
            selector.register(rank.pipe, selectors.EVENT_READ, number)
        try:
            while selector.get_map() and time.monotonic() < began + LIMIT_S:
                for key, _ in selector.select(1.0):
                    if not self._read(key.data):
                        selector.unregister(key.fd)
            late = bool(selector.get_map())
        finally:
            for rank in self.ranks:
                if rank.process.poll() is None and selector.get_map():
                    rank.process.kill()
                rank.process.wait(20)
                os.close(rank.pipe)
                assert rank.process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    rank.process.stdin.close()
            selector.close()
        logs = [rank.log for rank in self.ranks]
        assert not late, "\n".join(log.read_text()[-3000:] for log in logs)
        seconds = time.monotonic() - began
        codes = [rank.process.returncode for rank in self.ranks]
        return [
            Ended([rank.runs[run] for rank in self.ranks], codes, logs, seconds)
            for run in range(min(len(rank.runs) for rank in self.ranks))
        ]

    def _start(self, command: list[str], rank: int, folder: Path, more: dict[str, str]) -> RankProcess:
        read_end, write_end = os.pipe()
        log = folder / f"rank-{rank}.log"
        environment = child_environment(threads=1) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world),
            "GLOO_SOCKET_IFNAME": "lo",
        } | more  # fmt: skip
        with log.open("wb") as output:
            process = front_server.start_rank(
                [*command, "--report-fd", str(write_end), "--front-pid", str(os.getpid())], env=environment, cwd=ROOT,
                pass_fds=(write_end,), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        return RankProcess(process, read_end, log)

    def _read(self, number: int) -> bool:
        """Takes what has come from one rank; False at its end."""
        rank = self.ranks[number]
        data = os.read(rank.pipe, 1 << 16)
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        for line in lines:
            self._take(number, json.loads(line))
        return bool(data)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        rank = self.ranks[number]
        rank.runs[-1].append(message)
        if self._on_message is not None:
            self._on_message(number, message, self.ranks)
        if message["kind"] == "rank_report":
            self._consider(len(rank.runs))
        if message["kind"] == "shard_written":
            self.ranks[0].send({**message, "rank": number})
        if message["kind"] in ("result", "refused", "crashed") and len(rank.runs) < self._runs:
            rank.runs.append([])

    def _consider(self, run: int) -> None:
        """Gives the word when all ranks have reported."""
        found = [m["report"] for r in self.ranks if len(r.runs) >= run for m in r.runs[run - 1] if m["kind"] == "rank_report"]  # fmt: skip
        if len(found) < self.world:
            return
        (port,) = [report["store_port"] for report in found if report["store_port"]]
        for rank in self.ranks:
            rank.send({"kind": "go", "store": ["127.0.0.1", port]})


def kill_on_step(rank: int, step: int, number: signal.Signals) -> Callable[..., None]:
    """Sends a signal to a rank when it says that it has done a step."""

    def on_message(sender: int, message: dict[str, Any], ranks: list[RankProcess]) -> None:
        if sender == rank and message["kind"] == "step" and message["step"] == step:
            ranks[rank].process.send_signal(number)

    return on_message

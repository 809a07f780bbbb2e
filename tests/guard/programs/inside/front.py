"""A small front for a guarded program: it reads what the program's processes leave at the border,
answers what they bring, and judges.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import front_server
from tests.ports import free_port
from unisono.base.causes import Verdict
from unisono.base.messages import FinalMessage
from unisono.guard.integrations.border import (
    Answer,
    EventsOf,
    Guard,
    Registration,
    ReportedFacts,
    answer_facts,
    memory_of,
    registrations,
    reported_facts,
    start_of,
)
from unisono.guard.integrations.inside import injected
from unisono.guard.integrations.worker_stacks import workers_below
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.rank_monitor import RankMonitor, StallMonitor
from unisono.guard.watch.views import BeatMemory, Collective, WorkerProcess

LIMIT_S = 300.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=1 << 30, bfloat16=False)


@dataclass
class _Job:
    """Two or more ranks of one node."""

    world_size: int
    total_steps: int = 0
    own_code: None = None

    @property
    def ranks(self) -> list[RankPlace]:
        return [
            RankPlace(rank=rank, node_rank=0, local_rank=rank, host="here", device=_CPU) for rank in range(self.world_size)
        ]  # fmt: skip

    @property
    def nodes(self) -> list[NodePlace]:
        return [
            NodePlace(node_rank=0, host="here", nproc=self.world_size, address="127.0.0.1", nproc_origin="")
        ]

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        return self.ranks if node_rank == 0 else []


@dataclass
class _Ranks:
    """Who has registered, as what watches ranks wants them."""

    job: _Job
    folder: Path
    run: RunDir
    beats: dict[int, BeatMemory] = field(default_factory=dict)
    known: dict[int, Registration] = field(default_factory=dict)
    events: dict[int, list[Any]] = field(default_factory=dict)
    _readers: dict[int, EventsOf] = field(default_factory=dict)

    @property
    def places(self) -> Sequence[RankPlace]:
        return self.job.ranks

    @property
    def all_ended(self) -> bool:
        return all(self.pid(rank) is None for rank in self.known)

    def pid(self, rank: int) -> int | None:
        known = self.known.get(rank)
        return known.pid if known is not None and start_of(known.pid) == known.started else None

    def workers(self, rank: int) -> Sequence[WorkerProcess]:
        pid = self.pid(rank)
        return workers_below(pid) if pid is not None else []

    def final_message(self, rank: int) -> FinalMessage | None:
        words = [e for e in self.events.get(rank, ()) if e["kind"] in ("result", "refused", "crashed")]
        return words[-1] if words else None

    def poll(self) -> None:
        for one in registrations(self.folder):
            before, self.known[one.rank] = self.known.get(one.rank), one
            if before is None:
                self.beats[one.rank] = memory_of(self.folder, one.pid)
                self._readers[one.rank] = EventsOf(self.folder, one.pid)
        for rank, reader in self._readers.items():
            self.events.setdefault(rank, []).extend(reader.new())


@dataclass
class Played:
    """A guarded program, while it runs and after.

    Attributes:
        messages: what the front would show.
        brought: what the ranks have brought to agreements.
        verdict: that ended it; None where it ended by itself.
    """

    process: subprocess.Popen[str]
    guard: Guard
    ranks: _Ranks
    watching: StallMonitor
    log: Path
    messages: list[Any]
    brought: list[ReportedFacts] = field(default_factory=list)
    verdict: Verdict | None = None

    def poll(self) -> None:
        """One look, as a front looks."""
        self.ranks.poll()
        self._answer()
        if self.verdict is None:
            self.verdict = self.watching.look()
        time.sleep(0.05)

    def until(self, condition: Any) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit, (self.printed, self.messages, self.ranks.events)
            self.poll()

    def until_ended(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        self.poll()
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def events_of(self, kind: str, rank: int = 0) -> list[Any]:
        return [event for event in self.ranks.events.get(rank, ()) if event["kind"] == kind]

    def notes(self, rank: int = 0) -> list[str]:
        return [str(event["text"]) for event in self.events_of("note", rank)]

    def stack(self, rank: int) -> tuple[str, ...]:
        """Where a rank was when it was last looked at."""
        look = self.watching.run_view.looks.get(rank)
        return look.stack if look is not None else ()

    def begun(self, rank: int) -> Collective | None:
        """The collective in which a rank was when it was last looked at."""
        look = self.watching.run_view.looks.get(rank)
        return look.begun if look is not None else None

    def _answer(self) -> None:
        """Compares what was brought when all have brought it: what is not equal is refused."""
        waiting: dict[str, list[ReportedFacts]] = {}
        for one in reported_facts(self.guard.folder):
            waiting.setdefault(one.name, []).append(one)
        for group in waiting.values():
            if len(group) < group[0].world_size:
                continue
            self.brought += group
            differ = sorted(
                {key for one in group for key in one.facts if one.facts[key] != group[0].facts.get(key)}
            )
            text = f"{', '.join(differ)} differ" if differ else ""
            for one in group:
                answer_facts(self.guard.folder, one, Answer(not differ, text))

    @property
    def named(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(m["code"], tuple(m["verdict"]["ranks"])) for m in self.messages if m["kind"] == "warning"]


def play(
    folder: Path,
    command: Sequence[str],
    *,
    world_size: int = 2,
    env: Mapping[str, str] | None = None,
    forked: bool = True,
) -> Played:
    """Starts a program under guard, forked from a process that has imported torch unless that is
    not wanted; see `end`.
    """
    guard = Guard(folder / "guard", "one", os.getpid(), host="here")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_PORT": str(free_port()),
    }
    environment |= env or {}
    environment = injected(environment, guard.write())
    log = folder / "program.log"
    with log.open("w") as output:
        process = (front_server.start_program if forked else subprocess.Popen)(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    job = _Job(world_size)
    ranks = _Ranks(job, guard.folder, RunDir(folder / "run"))
    messages: list[Any] = []
    watching = StallMonitor(job, RankMonitor(ranks, 0), None, messages.append)
    return Played(process, guard, ranks, watching, log, messages)


def end(played: Played) -> None:
    """Ends the program and its ranks, also those that are stopped."""
    for pid in [played.process.pid, *(one.pid for one in played.ranks.known.values())]:
        with contextlib.suppress(OSError):
            if pid == played.process.pid:
                os.killpg(pid, 9)
            elif start_of(pid) == next(o.started for o in played.ranks.known.values() if o.pid == pid):
                os.kill(pid, 9)
    played.process.wait(20)
    for memory in played.ranks.beats.values():
        memory.close()
    shutil.rmtree(played.guard.folder, ignore_errors=True)

"""Attempts of the ladder: child processes that run a collective with the real back-end, their logs, and the check on this machine."""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from unisono.doctor.check import CheckFunction, Finding, Surroundings, found
from unisono.doctor.device_selection import TransportKind, expected_transport
from unisono.doctor.ladder import (
    LADDER,
    OWN,
    SETTABLE,
    AttemptOutcome,
    Settings,
    climb,
    ladder_finding,
    rungs,
)
from unisono.doctor.nccl_log import nccl_rows, read_nccl_log
from unisono.doctor.network_rules import leads_out, usable_interfaces
from unisono.errors import UnisonoError
from unisono.events import Message
from unisono.facts import read_environment
from unisono.facts.accelerators import DevicesDetails
from unisono.facts.machine import read_processors
from unisono.files import make_private_dir
from unisono.plan import DeviceChoice
from unisono.supervise.child_process import DEBUG_COMM, Programs, child_environment, misleading_variables
from unisono.supervise.task_process import TaskProcess
from unisono.text import one_line

_NAME = re.compile(r"doctor-[0-9A-Za-z-]{1,60}")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def logs_name(mark: str) -> str:
    """Of a folder for all attempts of this look.

    Args:
        mark: what another look of the same second has not: a process number, or what the nodes of a job have drawn.
    """
    return (
        f"doctor-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_NOT_IN_NAMES.sub('', mark.lower())[:12]}"
    )


@dataclass
class AttemptLogs:
    """A folder with one for each attempt, and in that a file for each rank: made when it is needed, so that what cannot be kept costs no attempt.

    Attributes:
        folder: `runs/doctor-…`, where the command was typed.
        trouble: why nothing is kept; empty: it is.
        elsewhere: the same of other nodes, by their names; only of those that have such a trouble.
    """

    folder: Path
    trouble: str = ""
    elsewhere: dict[str, str] = field(default_factory=dict)
    _attempts: int = 0

    @classmethod
    def of(cls, name: object) -> Self | None:
        """For a name that the head has given; None: it has given none, or what is none."""
        return cls(Path("runs") / name) if isinstance(name, str) and _NAME.fullmatch(name) else None

    def attempt(self, name: str) -> Path | None:
        """The next attempt's folder, as `runs/doctor-…/02-interface-pinned-to-lo`; None: it cannot be made."""
        self._attempts += 1
        path = self.folder / f"{self._attempts:02d}-{_NOT_IN_NAMES.sub('-', name.lower()).strip('-')[:60]}"
        try:
            make_private_dir(self.folder)
            make_private_dir(path)
        except OSError as error:
            self.trouble = f"{path}: {error.strerror or error}"
            return None
        return path

    def said(self) -> str:
        """For the finding: where it is kept, or why not."""
        here = f" is not kept: {self.trouble}" if self.trouble else f": {self.folder}/"
        there = (f"; on {node} it is not kept: {trouble}" for node, trouble in sorted(self.elsewhere.items()))
        return f"what the libraries said{here}{''.join(there)}"


STARTING_S = 120.0
"""For a machine under load to import torch; the deadline counts from there."""
ENDING_S = 10.0
LARGE_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}
ROUNDS = 3
_OTHER_RANKS_S = 2.0
_POLL_S = 0.02
# With DETAIL torch checks each collective by another one, and the ladder would measure that, too.
_VERBOSE = DEBUG_COMM | {"TORCH_DISTRIBUTED_DEBUG": "INFO"}
_NCCL_LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,NET,TUNING"}


@dataclass(frozen=True)
class AttemptRank:
    """One rank of an attempt.

    Attributes:
        rank: its number.
        device: its accelerator, or a CPU.
        name: for people.
    """

    rank: int
    device: DeviceChoice
    name: str


@dataclass
class AttemptRanks:
    """This node's ranks of one attempt. As a context manager it leaves no process and no file behind.

    Attributes:
        children: who they are.
        world_size: of all nodes together.
        backend: `nccl` or `gloo`.
        settings: laid over this process's environment.
        store_host: where rank 0's store listens.
        deadline_s: of the collective, once all are ready.
        programs: what is started as task.
        interface: what OWN stands for; empty: there is none.
        base: variables laid below `settings`, which the user's own beat.
        names: of all ranks, for people.
        store_ports: on which rank 0's store listens, if one is free; else the system chooses.
        record: a folder in which what they and their libraries say is kept; None: that goes with them.
    """

    children: Sequence[AttemptRank]
    world_size: int
    backend: str
    settings: Settings
    store_host: str
    deadline_s: float
    programs: Programs
    interface: str = ""
    base: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ()
    store_ports: Sequence[int] = ()
    record: Path | None = None

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        temporary = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-"))
        self._folder = self.record or Path(temporary)
        try:
            self._tasks = [self._stack.enter_context(self._start(child)) for child in self.children]
        except BaseException:  # none is left behind; raised again
            self._stack.close()
            raise
        self._streams = [task.messages(silence_s=STARTING_S + self.deadline_s) for task in self._tasks]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, child: AttemptRank) -> TaskProcess:
        request = {
            "rank": child.rank,
            "world_size": self.world_size,
            "backend": self.backend,
            "store_host": self.store_host,
            "device_index": 0 if child.device.kind == "cuda" else None,
            "deadline_s": self.deadline_s,
            "rounds": ROUNDS,
            "large_bytes": LARGE_BYTES[self.backend],
            "store_ports": list(self.store_ports),
            "names": list(self.names) or [f"rank {rank}" for rank in range(self.world_size)],
        }
        return TaskProcess(
            "collective",
            request,
            has_input=True,
            programs=self.programs,
            environment=self._environment(child),
            printed=self.record / f"rank-{child.rank:05d}.log" if self.record else None,
        )

    def _environment(self, child: AttemptRank) -> dict[str, str]:
        leftovers = misleading_variables(read_environment().leftovers, world_size=2)
        made = {**self.base, **child_environment(threads=1, without=leftovers, device=child.device)}
        for name, value in self.settings.items():
            if value is None and name in self.base:
                made[name] = self.base[name]
            elif value is None:
                made.pop(name, None)
            elif name in SETTABLE and (OWN not in value or self.interface):
                made[name] = value.replace(OWN, self.interface)
        if self.backend == "nccl":
            made |= _NCCL_LOG_SETTINGS | {"NCCL_DEBUG_FILE": str(self._folder.absolute() / "nccl.%h.%p")}
        if self.record is not None:
            made = _VERBOSE | made
        return made

    def ready(self) -> tuple[int, str]:
        """Waits until all have loaded torch: the port of rank 0's store (0: it is on another node), and what went wrong."""
        port = 0
        try:
            for stream in self._streams:
                port = _until_ready(stream) or port
        except UnisonoError as error:
            return 0, error_text(error)
        return port, ""

    def run(self, host: str, port: int) -> AttemptOutcome:
        """Lets them add, and gives the worst of what they say.

        Once one has failed the others would wait for it up to the deadline: they get two seconds to say something better.
        """
        try:
            for task in self._tasks:
                task.send({"store": [host, port]})
            found = self._results(time.monotonic() + self.deadline_s + ENDING_S)
        except UnisonoError as error:
            return AttemptOutcome(ok=False, text=error_text(error), rows=self.rows())
        worst = min(found, key=lambda one: (bool(one.get("ok")), one.get("bytes_per_second") or 0.0))
        return outcome_of(worst, self.rows())

    def _results(self, limit: float) -> list[Message]:
        found: list[Message] = []
        waiting = list(self._tasks)
        while waiting and time.monotonic() < limit:
            for task in list(waiting):
                results = [message for message in task.news() if message["kind"] == "result"]
                if results:
                    found += results
                    waiting.remove(task)
                    limit = (
                        limit
                        if results[0].get("ok") is True
                        else min(limit, time.monotonic() + _OTHER_RANKS_S)
                    )
            time.sleep(_POLL_S)
        missing: Message = {"ok": False, "text": f"nothing came of it within {self.deadline_s:g} s"}
        return [*found, missing] if waiting and all(one.get("ok") for one in found) else found

    def rows(self) -> tuple[str, ...]:
        """Which transports NCCL took, by its own words."""
        if self.backend != "nccl":
            return ()
        lines: list[str] = []
        for file in sorted(self._folder.glob("nccl.*")):
            lines += file.read_text(errors="replace").splitlines()
        return tuple(nccl_rows(read_nccl_log(lines)))


def outcome_of(message: Mapping[str, Any], rows: Sequence[str] = ()) -> AttemptOutcome:
    """What a rank, or a node, says came of it; foreign values are not believed."""
    rate, small = message.get("bytes_per_second"), message.get("small_s")
    return AttemptOutcome(
        ok=message.get("ok") is True,
        text=one_line(str(message.get("text") or "it ended without a result"), limit=300),
        bytes_per_second=float(rate) if isinstance(rate, int | float) else None,
        small_s=float(small) if isinstance(small, int | float) else None,
        rows=tuple(one_line(str(row), limit=300) for row in rows),
    )


def error_text(error: UnisonoError) -> str:
    """An error, in one line."""
    return one_line("; ".join(f"{problem.what} {problem.why}" for problem in error.problems), limit=400)


def _until_ready(stream: Iterator[Message]) -> int:
    port = 0
    for message in stream:
        if message["kind"] == "store":
            port = int(message["port"])
        if message.get("phase") == "collective.store":
            return port
    raise UnisonoError.of("a rank ended before it could take part")


def attempt_here(
    places: Sequence[DeviceChoice],
    settings: Settings,
    *,
    backend: str,
    deadline_s: float,
    programs: Programs,
    tell: Callable[[str], None] = lambda _: None,
    record: Path | None = None,
) -> AttemptOutcome:
    """One collective over this machine's ranks.

    Args:
        places: of each rank.
        settings: for the children alone.
        backend: `nccl` or `gloo`.
        deadline_s: from when all are ready.
        programs: what is started as task.
        tell: hears how long it took to start.
        record: a folder in which what they and their libraries say is kept.
    """
    began = time.monotonic()
    children = [AttemptRank(rank, place, f"rank {rank}") for rank, place in enumerate(places)]
    try:
        with AttemptRanks(
            children, len(children), backend, settings, "127.0.0.1", deadline_s, programs, record=record
        ) as ranks:
            port, trouble = ranks.ready()
            if trouble:
                return AttemptOutcome(ok=False, text=trouble)
            tell(f"{len(children)} processes are ready after {time.monotonic() - began:.0f} s")
            return ranks.run("127.0.0.1", port)
    except UnisonoError as error:
        return AttemptOutcome(ok=False, text=error_text(error))


DEADLINE_S = 15.0
_ENOUGH_BY_TRANSPORT: dict[TransportKind, float] = {
    "nvlink": 20e9,
    "p2p": 2e9,
    "shm": 0.5e9,
    "net": 0.1e9,
    "broken": 0.1e9,
}
"""Bytes per second of a sum of 64 MiB that the expected transport should give at the least: about a tenth of what is usual."""
_ENOUGH_ON_CPU = 2e6  # on one machine, whose cores may all be busy; of nodes see unisono.doctor.node_trials


def check_ladder(around: Surroundings) -> list[Finding]:
    """Only with --ladder, and over the ranks of this machine; several nodes climb together (see `nodes`)."""
    if not around.request.ladder or around.here.topology.nodes > 1:
        return []
    places = around.here.devices
    if len(places) < 2:
        return [found(LADDER, "pass", "one rank: it talks to nobody", fix=["--nproc 2 tries two"])]
    backend = "nccl" if places[0].kind == "cuda" else "gloo"
    interfaces = [one.name for one in usable_interfaces(around.report.interfaces) if leads_out(one)]
    loopback = [one.name for one in usable_interfaces(around.report.interfaces) if one.loopback]
    steps = rungs(
        backend, interfaces=[*loopback, *interfaces], set_by_hand=sorted(around.environment.variables)
    )

    record = AttemptLogs(Path("runs") / logs_name(str(os.getpid()))) if around.request.debug_comm else None

    def attempt(settings: Settings, name: str) -> AttemptOutcome:
        return attempt_here(
            places,
            settings,
            backend=backend,
            deadline_s=DEADLINE_S,
            programs=around.request.programs,
            record=record.attempt(name) if record else None,
        )

    enough = (
        enough_rate(around.probes.details(), [device.index for device in around.report.chosen])
        if backend == "nccl"
        else _ENOUGH_ON_CPU
    )
    return [with_logs(ladder_finding(climb(steps, attempt, enough=enough)), record)]


def with_logs(finding: Finding, record: AttemptLogs | None) -> Finding:
    """With the line that says where everything is that the libraries said."""
    if record is None:
        return finding
    return replace(finding, evidence=(*finding.evidence, record.said()))


def enough_rate(details: DevicesDetails, chosen: Sequence[int]) -> float:
    """What the worst way between two of these devices should give, in bytes per second."""
    vendor = read_processors().vendor
    pairs = [(a, b) for place, a in enumerate(chosen) for b in chosen[place + 1 :]]
    return min(
        (_ENOUGH_BY_TRANSPORT[expected_transport(details, *pair, vendor=vendor).kind] for pair in pairs),
        default=_ENOUGH_BY_TRANSPORT["shm"],
    )


CATALOGUE = (LADDER,)
CHECKS: tuple[CheckFunction, ...] = (check_ladder,)

"""Attempts of the ladder: child processes that run a collective with the real backend, their logs,
and the check on this machine.
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, cast

from unisono.base.errors import UnisonoError
from unisono.base.files import make_private_dir
from unisono.base.messages import Message
from unisono.base.text import one_line
from unisono.front.checks.check import CheckFunction, Finding, Surroundings, found
from unisono.front.checks.device_selection import TransportKind, expected_transport
from unisono.front.checks.ladder import (
    LADDER,
    OWN,
    SETTABLE,
    AttemptOutcome,
    Settings,
    climb,
    ladder_finding,
    nccl_rows,
    read_nccl_log,
    rungs,
)
from unisono.front.checks.network_rules import leads_out, usable_interfaces
from unisono.guard.facts import read_environment
from unisono.guard.facts.machine import DevicesDetails, read_processors
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.supervise.child_process import (
    DEBUG_COMM,
    Programs,
    child_environment,
    misleading_variables,
)
from unisono.guard.supervise.task_process import TaskProcess
from unisono.guard.supervise.task_requests import CollectiveResult

_NAME = re.compile(r"doctor-[0-9A-Za-z-]{1,60}")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def logs_name(mark: str) -> str:
    """Name of the folder for all attempts of this doctor run.

    Args:
        mark: distinguishes doctor runs of the same second: a process id, or the nonce of the job's
            nodes.
    """
    return (
        f"doctor-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_NOT_IN_NAMES.sub('', mark.lower())[:12]}"
    )


@dataclass
class AttemptLogs:
    """Folders of logs: one per attempt with a file per rank.

    Created when needed; if that fails, the attempt still runs.

    Attributes:
        folder: `runs/doctor-…`, in the working directory.
        problem: why logs are not kept; empty: they are.
        elsewhere: the same for other nodes with such an error, by name.
    """

    folder: Path
    problem: str = ""
    elsewhere: dict[str, str] = field(default_factory=dict)
    _attempts: int = 0

    @classmethod
    def of(cls, name: object) -> Self | None:
        """Logs in the folder that the head names; None: no name, or not a valid one."""
        return cls(Path("runs") / name) if isinstance(name, str) and _NAME.fullmatch(name) else None

    def attempt(self, name: str) -> Path | None:
        """The next attempt's folder, e.g. `runs/doctor-…/02-interface-pinned-to-lo`; None: it
        cannot be created.
        """
        self._attempts += 1
        path = self.folder / f"{self._attempts:02d}-{_NOT_IN_NAMES.sub('-', name.lower()).strip('-')[:60]}"
        try:
            make_private_dir(self.folder)
            make_private_dir(path)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"
            return None
        return path

    def location_text(self) -> str:
        """A line for the finding: where the logs are, or why they are not kept."""
        logs = f" are not kept: {self.problem}" if self.problem else f": {self.folder}/"
        there = (
            f"; on {node} they are not kept: {problem}" for node, problem in sorted(self.elsewhere.items())
        )
        return f"logs of the libraries{logs}{''.join(there)}"


STARTING_S = 120.0
"""Time for a busy machine to import torch; the deadline counts from there."""
ENDING_S = 10.0
LARGE_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}
ROUNDS = 3
_OTHER_RANKS_S = 2.0
_POLL_S = 0.02
# With DETAIL torch checks each collective with a second one, which the ladder would measure, too.
_VERBOSE = DEBUG_COMM | {"TORCH_DISTRIBUTED_DEBUG": "INFO"}
_NCCL_LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,NET,TUNING"}


@dataclass(frozen=True)
class AttemptRank:
    """One rank of an attempt.

    Attributes:
        device: an accelerator or the CPU.
    """

    rank: int
    device: DeviceChoice
    name: str


@dataclass
class AttemptRanks:
    """This node's ranks of one attempt.

    A context manager: on exit no process and no temporary file is left.

    Attributes:
        world_size: of all nodes together.
        backend: `nccl` or `gloo`.
        store_host: address of rank 0's store.
        deadline_s: of the collective, once all are ready.
        interface: replaces OWN; empty: none.
        base: defaults below the user's own variables and `settings`.
        names: of all ranks, for people.
        store_ports: candidates for rank 0's store; if none is free the system chooses.
        record: a folder for the logs of ranks and libraries; None: they are not kept.
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
        """Waits until all ranks have loaded torch.

        Gives the port of rank 0's store (0: it is on a different node), and the error.
        """
        port = 0
        try:
            for stream in self._streams:
                port = _until_ready(stream) or port
        except UnisonoError as error:
            return 0, error_text(error)
        return port, ""

    def run(self, host: str, port: int) -> AttemptOutcome:
        """Runs the collective; gives the worst outcome.

        After one rank has failed, the others would wait for it until the deadline: they get two
        seconds to report more.
        """
        try:
            for task in self._tasks:
                task.send({"store": [host, port]})
            results = self._results(time.monotonic() + self.deadline_s + ENDING_S)
        except UnisonoError as error:
            return AttemptOutcome(ok=False, text=error_text(error), rows=self.rows())
        worst = min(results, key=lambda one: (bool(one.get("ok")), one.get("bytes_per_second") or 0.0))
        return outcome_of(worst, self.rows())

    def _results(self, limit: float) -> list[CollectiveResult]:
        received: list[CollectiveResult] = []
        waiting = list(self._tasks)
        while waiting and time.monotonic() < limit:
            for task in list(waiting):
                results = [one for one in task.new_messages() if one["kind"] == "result"]
                if results:
                    received += (done := [cast("CollectiveResult", one) for one in results])
                    waiting.remove(task)
                    is_ok = done[0].get("ok") is True
                    limit = limit if is_ok else min(limit, time.monotonic() + _OTHER_RANKS_S)
            time.sleep(_POLL_S)
        text = f"no result within {self.deadline_s:g} s"
        missing = cast("CollectiveResult", {"ok": False, "text": text})
        return [*received, missing] if waiting and all(one.get("ok") for one in received) else received

    def rows(self) -> tuple[str, ...]:
        """Transports that NCCL used, from its log."""
        if self.backend != "nccl":
            return ()
        lines: list[str] = []
        for file in sorted(self._folder.glob("nccl.*")):
            lines += file.read_text(errors="replace").splitlines()
        return tuple(nccl_rows(read_nccl_log(lines)))


def outcome_of(message: Mapping[str, object], rows: Sequence[str] = ()) -> AttemptOutcome:
    """The outcome that a rank or node reports; invalid values are ignored."""
    rate, small = message.get("bytes_per_second"), message.get("small_s")
    return AttemptOutcome(
        ok=message.get("ok") is True,
        text=one_line(str(message.get("text") or "ended without a result"), limit=300),
        bytes_per_second=float(rate) if isinstance(rate, int | float) else None,
        small_s=float(small) if isinstance(small, int | float) else None,
        rows=tuple(one_line(str(row), limit=300) for row in rows),
    )


def error_text(error: UnisonoError) -> str:
    """An error in one line."""
    return one_line("; ".join(f"{problem.what} {problem.why}" for problem in error.problems), limit=400)


def _until_ready(stream: Iterator[Message]) -> int:
    port = 0
    for message in stream:
        if message["kind"] == "store":
            port = int(message["port"])
        if message["kind"] == "phase" and message.get("phase") == "collective.store":
            return port
    raise UnisonoError.of("a rank ended before the collective")


def attempt_local(
    places: Sequence[DeviceChoice],
    settings: Settings,
    *,
    backend: str,
    deadline_s: float,
    programs: Programs,
    record: Path | None = None,
) -> AttemptOutcome:
    """One collective over this machine's ranks.

    Args:
        places: of each rank.
        backend: `nccl` or `gloo`.
        deadline_s: counts from when all are ready.
    """
    children = [AttemptRank(rank, place, f"rank {rank}") for rank, place in enumerate(places)]
    try:
        with AttemptRanks(
            children, len(children), backend, settings, "127.0.0.1", deadline_s, programs, record=record
        ) as ranks:
            port, problem = ranks.ready()
            if problem:
                return AttemptOutcome(ok=False, text=problem)
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
"""Minimum bytes per second of an all-reduce of 64 MiB by expected transport: about a tenth of
normal.
"""
_ENOUGH_ON_CPU = (
    2e6  # on one machine, whose cores may all be busy; of nodes see unisono.front.checks.node_trials
)


def check_ladder(around: Surroundings) -> list[Finding]:
    """The ladder over this machine's ranks, with --ladder; for several nodes see `node_trials`."""
    if not around.request.ladder or around.local_node.topology.nodes > 1:
        return []
    places = around.local_node.devices
    if len(places) < 2:
        return [found(LADDER, "pass", "one rank: no communication", fix=["use --nproc 2 to test two ranks"])]
    backend = "nccl" if places[0].kind == "cuda" else "gloo"
    interfaces = [one.name for one in usable_interfaces(around.report.interfaces) if leads_out(one)]
    loopback = [one.name for one in usable_interfaces(around.report.interfaces) if one.loopback]
    steps = rungs(
        backend, interfaces=[*loopback, *interfaces], set_by_hand=sorted(around.environment.variables)
    )

    record = AttemptLogs(Path("runs") / logs_name(str(os.getpid()))) if around.request.debug_comm else None

    def attempt(settings: Settings, name: str) -> AttemptOutcome:
        return attempt_local(
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
    """The finding, with a line on the libraries' logs."""
    if record is None:
        return finding
    return replace(finding, evidence=(*finding.evidence, record.location_text()))


def enough_rate(details: DevicesDetails, chosen: Sequence[int]) -> float:
    """Minimum bytes per second of the worst link between two of these devices."""
    vendor = read_processors().vendor
    pairs = [(a, b) for position, a in enumerate(chosen) for b in chosen[position + 1 :]]
    return min(
        (_ENOUGH_BY_TRANSPORT[expected_transport(details, *pair, vendor=vendor).kind] for pair in pairs),
        default=_ENOUGH_BY_TRANSPORT["shm"],
    )


CATALOGUE = (LADDER,)
CHECKS: tuple[CheckFunction, ...] = (check_ladder,)

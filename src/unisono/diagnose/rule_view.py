"""Questions about a run that several rules share: whether an error was survived, whether it is a victim's, which rank has it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.diagnose.run_facts import Event, Exit, RunFacts, Traceback

SURVIVED_STEPS = 3
"""Signs of progress of the same rank after an error, from which on the error was not its end."""
_NEAR_LINES = 16
"""Maximum number of lines of a message below its exception."""

# fmt: off
WRAPPERS = frozenset({
    "ChildFailedError", "CalledProcessError", "TrainingFailedError", "WorkerGroupError", "ControllerError", "SystemExit", "ProcessRaisedException", "ProcessExitedException",
    "RayTaskError", "SignalException", "TuneError", "ChildProcessError", "RayActorError", "ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "ExecutionError", "KeyboardInterrupt",
    "GetTimeoutError", "RaySystemError", "TaskCancelledError", "ObjectLostError", "OwnerDiedError", "NodeDiedError", "LocalRayletDiedError", "WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError",
    "SIGTERMException", "CheckpointException",
})
# fmt: on
"""Exceptions that only forward an error from elsewhere."""

_VICTIM = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket (?:Timeout|closed)|recvValue failed|sendBytes failed|failed to recv, got 0 bytes|"
    r"ncclRemoteError|NCCL communicator (?:was )?abort|remote process exited|Timed out waiting \d{1,10}ms for|wait timeout after \d{1,10}ms|Application timeout caused pair closure|"
    r"Watchdog caught collective|Timeout at NCCL work|watchdog timeout|timed out in Gloo|Stop_waiting response|Gloo connectFullMesh failed|"
    r"collective operation timeout|Some NCCL operations have failed|was aborted on rank|Connection timed out.{0,80}store|failed to pass monitoredBarrier|"
    r"Connection was likely closed|Read error \[|writev \[|Write error \[|store->(?:get|wait)|Failed to (?:recv|send) within|ncclUniqueId.{0,80}store|DistStoreError|"
    r"Please check the log of (?:rank|other)|A call failed possibly due to a network error|NCCL operation .{0,60}(?:timed out|timeout)|process group (?:has been|was) aborted|"
    r"Rendezvous(?:Closed|GracefulExit)Error|[Bb]arrier timed out|Horovod(?:InternalError| has been shut down)|Notify register .{0,80}times? out|ACL stream synchronize failed|Getting socket times out|[Ss]tream synchronize timeout|"
    r"[Cc]oordination service|\b(?:UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): |HCCL.{0,60}timeout|Ranks? \d{1,6} (?:didn't|did not) (?:reach|join)|No route to host.{0,40}store|ProcessGroup(?:NCCL|Gloo)?.{0,40} abort"
)
_LEVEL = re.compile(
    r"(?:^|[\s\[|(:])(?:WARNING|(?<!NCCL )WARN|Warning|UserWarning|FutureWarning|RuntimeWarning|DeprecationWarning|INFO|DEBUG)\b|^\[?[WID]\d{3,4} \d\d:|Retrying|retrying|will retry|[Ff]ailed to load .{0,200}: "
)


@dataclass(frozen=True)
class View:
    """A run, as rules look at it."""

    facts: RunFacts

    @cached_property
    def progress(self) -> list[Event]:
        """Lines that show progress of training."""
        return [
            event
            for event in self.facts.events
            if event.signature in ("bar", "step", "log_row", "trainer_step")
        ]

    @cached_property
    def finishes(self) -> list[Event]:
        """Lines that say that the work is done."""
        return [event for event in self.facts.events if event.kind == "finished"]

    @cached_property
    def beginnings(self) -> list[Event]:
        """Lines with which a start begins."""
        return self.facts.of("omp_banner", "lf_tasks", "launched", "training_began", "deepspeed_cmd")

    @cached_property
    def consequences(self) -> list[Event]:
        """Lines of victims, in order."""
        return [event for event in self.facts.events if event.kind == "consequence"]

    @cached_property
    def tracebacks(self) -> list[Traceback]:
        """Tracebacks that ended something: neither reported and ignored, nor a launcher's."""
        return [trace for trace in self.facts.tracebacks if not trace.ignored and trace.type not in WRAPPERS]

    @cached_property
    def attempt_began(self) -> dict[str, int]:
        """For each log the place of the last restart by its launcher."""
        return {event.source: event.order for event in self.facts.of("worker_group_restarts")}

    def is_victim(self, trace: Traceback) -> bool:
        """Whether an exception only reports that another rank is gone or absent."""
        text = f"{trace.type}: {trace.event.text} {trace.message}"
        return bool(_VICTIM.search(text[:3000]))

    def is_victims(self, event: Event) -> bool:
        """The same for a line."""
        return event.kind == "consequence" or bool(_VICTIM.search(event.text))

    def is_quiet(self, event: Event) -> bool:
        """Whether a line calls itself a warning or less."""
        return bool(_LEVEL.search(event.text[:200]))

    def survived(self, event: Event) -> bool:
        """Whether the rank continued to train, or the launcher started again, after the line."""
        if event.order < self.attempt_began.get(event.source, -1):
            return True
        if "slurmstepd" in event.text:  # the scheduler has the last word; lines still come for a while
            return any(one.source == event.source and one.order > event.order for one in self.beginnings)
        later = [
            one
            for one in self.progress
            if one.source == event.source
            and one.order > event.order
            and one.line > event.line
            and one.rank in (None, event.rank)
        ]
        steps = {(one.signature, one.number("step"), one.line) for one in later if one.signature != "log_row"}
        return len({line for _, _, line in steps}) >= SURVIVED_STEPS and len(later) >= SURVIVED_STEPS

    def is_reported(self, event: Event) -> bool:
        """Whether a line belongs to an exception that Python only reports before it continues."""
        return any(
            trace.event.source == event.source
            and trace.event.rank == event.rank
            and trace.began <= event.order <= trace.event.order
            for trace in self._reported
        )

    @cached_property
    def _reported(self) -> list[Traceback]:
        return [trace for trace in self.facts.tracebacks if trace.ignored and not trace.threaded]

    def silent(self) -> tuple[int, ...]:
        """The only rank that neither waited nor lost a peer while all others did; else None."""
        spoke = {
            event.rank
            for event in self.consequences
            if event.signature not in ("torchrun_ended", "cancelled")
        }
        spoke |= {trace.event.rank for trace in self.tracebacks}
        rest = set(self.facts.ranks) - spoke
        return tuple(rest) if len(rest) == 1 and len(self.facts.ranks) > 2 else ()

    def near(self, trace: Traceback) -> list[Event]:
        """The events within a traceback, its chain, and the lines of its message."""
        return [
            event
            for event in self.facts.events
            if event.source == trace.event.source
            and trace.began <= event.order
            and event.line <= trace.event.line + _NEAR_LINES
            and event.rank == trace.event.rank
        ]

    @cached_property
    def failing_exits(self) -> list[Exit]:
        """Ends that were not asked for by the launcher itself."""
        return [one for one in self.facts.exits if one.code not in (0, -15)]

    def table_rank(self) -> int | None:
        """The one rank that ended by its own exception, as the launchers' tables tell; None: not exactly one."""
        by_itself = {one.rank for one in self.facts.exits if one.code > 0 and one.rank is not None}
        return next(iter(by_itself)) if len(by_itself) == 1 else None

    @property
    def distributed(self) -> bool:
        """Whether more than one rank took part, as far as the logs tell."""
        return (
            (self.facts.world_size or 0) > 1
            or len(self.facts.ranks) > 1
            or any(self.facts.ranks)
            or len(self.facts.collectives) > 0
        )


def ranks_of(events: Iterable[Event]) -> tuple[int, ...]:
    """The ranks that these lines are of, ascending."""
    return tuple(sorted({event.rank for event in events if event.rank is not None}))


def hosts_of(events: Iterable[Event]) -> tuple[str, ...]:
    """The hosts, in order."""
    return tuple(dict.fromkeys(event.who.host for event in events if event.who.host))


def first_of_each(events: Sequence[Event], *, limit: int = 8) -> tuple[Event, ...]:
    """The first line of each signature of each rank, in order."""
    found: dict[tuple[str, int | None, str], Event] = {}
    for event in events:
        found.setdefault((event.signature, event.rank, event.source), event)
    return tuple(found.values())[:limit]

"""Facts of a run after its logs were read, the input of the rules; the questions about them that
several rules share; and Hypothesis, the result of a rule.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

EventKind = Literal["warning", "error", "consequence", "progress", "finished", "death", "fact"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The rank, process and host that a line names. None: it does not name one.

    Attributes:
        host: the host's name or address, as written.
        node_rank: the number of the host.
    """

    rank: int | None = None
    host: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    node_rank: int | None = None


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A relevant line of a log.

    Attributes:
        source: the name of the log, as it is shown.
        line: its number, from 1; only line feeds count, as in an editor.
        order: a number that increases along the source, with a different one for each piece of a
            line.
        signature: the id of the line's signature, or of the part of diagnose that made the event.
        cause: the id of the cause that it indicates; None: no particular one.
        text: the line without its prefixes, control characters and secrets.
        who: the rank and host that it names.
        time: seconds since 1970 by the host's clock read as if it were UTC; None: the line has
            none.
        fields: what was read from it: numbers and names, as text.
    """

    source: str
    line: int
    order: int
    signature: str
    kind: EventKind
    cause: str | None
    text: str
    who: Origin = NO_ORIGIN
    time: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """The rank that it names."""
        return self.who.rank

    @property
    def where(self) -> str:
        """The position as `file:line`."""
        return f"{self.source}:{self.line}"

    def number(self, name: str) -> int | None:
        """The field as an integer, or None if it is absent or not an integer."""
        text = self.fields.get(name) or ""
        return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else None


Ending = Literal["finished", "exception", "signal", "exit", "terminated", "unknown"]


@dataclass(frozen=True, slots=True)
class Traceback:
    """A Python traceback, of one process.

    Attributes:
        event: its last line: the exception.
        began: the line of its header, as an order within the source.
        message: what follows the class, also over several lines.
        frame: the innermost frame as `file:line in function`; empty: unknown.
        user_frame: the innermost frame that is not of an installed package.
        user_file: its file, alone; user_line: its line.
        linked: "" for the last of a chain; else how the next one follows: "cause" or "handling".
        earlier: the exceptions before it in its chain, the nearest first.
        ignored: whether Python only reports it and continues ("Exception ignored in", a thread).
        threaded: whether it ended a thread, not its process.
        tabled: whether it is in a row of torchrun's table.
    """

    event: LogEvent
    began: int
    type: str
    message: str
    frame: str = ""
    user_frame: str = ""
    user_file: str = ""
    user_line: int | None = None
    functions: tuple[str, ...] = ()
    linked: Literal["", "cause", "handling"] = ""
    earlier: tuple["Traceback", ...] = ()
    ignored: bool = False
    threaded: bool = False
    tabled: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """The exit of a process as a launcher reports it.

    Attributes:
        code: the exit code; negative: minus the signal's number.
        rank: the global rank, if reported.
        first: whether the launcher reports it as the first failure.
        time: in seconds; None: unknown.
    """

    event: LogEvent
    code: int
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    first: bool = False
    time: float | None = None


@dataclass(frozen=True, slots=True)
class TimedOutCollective:
    """A collective that timed out, as reported by a rank's watchdog.

    Attributes:
        group: the process group, as written.
        seq: the sequence number; None: old wordings have none.
        op: ALLREDUCE, _ALLGATHER_BASE, …
        numel_in: elements that go in; numel_out: those that come out.
        enqueued: the last work that was enqueued; completed: the last that was done.
    """

    event: LogEvent
    rank: int | None
    group: str = ""
    seq: int | None = None
    op: str = ""
    numel_in: int | None = None
    numel_out: int | None = None
    timeout_ms: int | None = None
    enqueued: int | None = None
    completed: int | None = None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts of one rank.

    Attributes:
        host: where it ran.
        own_source: the name of the log that only this rank writes; "" if ranks share logs.
        first: the first event of it; last: the last one.
        progress: the last line that shows work.
        step: the last step; steps: of how many.
        finished: the line that says that it finished.
        exit: as reported by the launcher.
    """

    rank: int
    host: str | None = None
    local_rank: int | None = None
    pids: tuple[int, ...] = ()
    own_source: str = ""
    first: LogEvent | None = None
    last: LogEvent | None = None
    progress: LogEvent | None = None
    step: int | None = None
    steps: int | None = None
    finished: LogEvent | None = None
    ending: Ending = "unknown"
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of one log.

    Attributes:
        lines: their number; bytes: its size.
        rank: the only rank that writes it; host: the host that it comes from.
        head: its first lines as events; tail: its last ones, the last one last.
        cut_head: whether its beginning is missing.
        restarts: the number of restarts by a launcher.
        node_rank: the node that it comes from, by name or contents.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    rank: int | None = None
    host: str | None = None
    head: tuple[LogEvent, ...] = ()
    tail: tuple[LogEvent, ...] = ()
    cut_head: bool = False
    restarts: int = 0
    node_rank: int | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run.

    Attributes:
        sources: its logs, by name.
        events: all events, source by source, in order.
        ranks: what is known of each rank.
        world_size: the number of ranks, if reported or certain by counting.
        nodes: the number of hosts.
        framework: of the training program: llamafactory, trl, transformers, lightning, deepspeed,
            ray, accelerate, recipes, torchrun, "".
        tracebacks: of all ranks, the last of each chain.
        exits: as reported by launchers.
        collectives: as reported by watchdogs.
        step: the last step in any log; steps: the total.
        earlier_runs: the lines of earlier runs in the same logs, as text.
    """

    sources: dict[str, SourceFacts] = field(default_factory=dict)
    events: tuple[LogEvent, ...] = ()
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    world_size: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    framework: str = ""
    tracebacks: tuple[Traceback, ...] = ()
    exits: tuple[Exit, ...] = ()
    collectives: tuple[TimedOutCollective, ...] = ()
    step: int | None = None
    steps: int | None = None
    earlier_runs: tuple[str, ...] = ()

    def of(self, *signatures: str) -> list[LogEvent]:
        """The events with one of these signatures."""
        return [event for event in self.events if event.signature in signatures]

    def pointing_to(self, *causes: str) -> list[LogEvent]:
        """The events that indicate one of these causes."""
        return [event for event in self.events if event.cause in causes]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One possible cause.

    Attributes:
        why: one sentence: what happened, with names and numbers.
        evidence: the lines that show it, the decisive one first.
        ranks: the culprits, never the victims; empty if unknown.
        confidence: 0 to 1; 1: the log states the cause.
        followed: its consequences in order of time.
        missing: information that would help: which log, which variable to set next time.
        facts: particulars for the remedy, for example the name of a module.
        step: the training step at which it happened, if known.
        phase: of the run, if known.
    """

    cause: str
    why: str
    evidence: tuple[LogEvent, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    confidence: float = 1.0
    followed: tuple[LogEvent, ...] = ()
    missing: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    phase: str | None = None


SURVIVED_STEPS = 3
"""Signs of progress of the same rank after an error, from which on the error was not its end."""
_ROW_BELOW = 3
"""Lines below a tool's word that it skips a step in which the row of that step stands."""
_NEAR_LINES = 16
"""Maximum number of lines of a message below its exception."""

# fmt: off
WRAPPERS = frozenset({
    "ChildFailedError", "CalledProcessError", "TrainingFailedError", "WorkerGroupError", "ControllerError",
    "SystemExit", "ProcessRaisedException", "ProcessExitedException",
    "RayTaskError", "SignalException", "TuneError", "ChildProcessError", "RayActorError", "ActorDiedError",
    "ActorUnavailableError", "WorkerCrashedError", "ExecutionError", "KeyboardInterrupt",
    "GetTimeoutError", "RaySystemError", "TaskCancelledError", "ObjectLostError", "OwnerDiedError",
    "NodeDiedError", "LocalRayletDiedError", "WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError",
    "SIGTERMException", "CheckpointException",
})
# fmt: on
"""Exceptions that only forward an error from elsewhere."""

_VICTIM = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket (?:Timeout|closed)|recvValue failed|sendBytes"
    r" failed|failed to recv, got 0 bytes|"
    r"ncclRemoteError|NCCL communicator (?:was )?abort|remote process exited|Timed out waiting \d{1,10}ms"
    r" for|wait timeout after \d{1,10}ms|Application timeout caused pair closure|"
    r"Watchdog caught collective|Timeout at NCCL work|watchdog timeout|timed out in Gloo|Stop_waiting"
    r" response|Gloo connectFullMesh failed|"
    r"collective operation timeout|Some NCCL operations have failed|was aborted on rank|Connection timed"
    r" out.{0,80}store|failed to pass monitoredBarrier|"
    r"Connection was likely closed|Read error \[|writev \[|Write error \[|store->(?:get|wait)|Failed to"
    r" (?:recv|send) within|ncclUniqueId.{0,80}store|DistStoreError|"
    r"Please check the log of (?:rank|other)|A call failed possibly due to a network error|NCCL operation"
    r" .{0,60}(?:timed out|timeout)|process group (?:has been|was) aborted|"
    r"Rendezvous(?:Closed|GracefulExit)Error|[Bb]arrier timed out|Horovod(?:InternalError| has been shut"
    r" down)|Notify register .{0,80}times? out|ACL stream synchronize failed|Getting socket times"
    r" out|[Ss]tream synchronize timeout|"
    r"[Cc]oordination service|\b(?:UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED):"
    r" |HCCL.{0,60}timeout|Ranks? \d{1,6} (?:didn't|did not) (?:reach|join)|No route to"
    r" host.{0,40}store|ProcessGroup(?:NCCL|Gloo)?.{0,40} abort"
)
_LEVEL = re.compile(
    r"(?:^|[\s\[|(:])(?:WARNING|(?<!NCCL"
    r" )WARN|Warning|UserWarning|FutureWarning|RuntimeWarning|DeprecationWarning|INFO|DEBUG)\b|^\[?[WID]\d{3,4}"
    r" \d\d:|Retrying|retrying|will retry|[Ff]ailed to load .{0,200}: "
)


@dataclass(frozen=True)
class View:
    """A run, as rules look at it."""

    facts: RunFacts

    @cached_property
    def progress(self) -> list[LogEvent]:
        """Lines that show progress of training."""
        return [
            event
            for event in self.facts.events
            if event.signature in ("bar", "step", "log_row", "trainer_step")
        ]

    @cached_property
    def finishes(self) -> list[LogEvent]:
        """Lines that say that the work is done."""
        return [event for event in self.facts.events if event.kind == "finished"]

    @cached_property
    def beginnings(self) -> list[LogEvent]:
        """Lines with which a start begins."""
        return self.facts.of("omp_banner", "lf_tasks", "launched", "training_began", "deepspeed_cmd")

    @cached_property
    def consequences(self) -> list[LogEvent]:
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

    def is_victims(self, event: LogEvent) -> bool:
        """Whether a line only reports that another rank is gone or absent."""
        return event.kind == "consequence" or bool(_VICTIM.search(event.text))

    def is_quiet(self, event: LogEvent) -> bool:
        """Whether a line calls itself a warning or less."""
        return bool(_LEVEL.search(event.text[:200]))

    def is_skipped(self, event: LogEvent) -> bool:
        """Whether a line is the row of a step that the tool itself calls skipped, as float16 skips
        a few.
        """
        return event.signature == "loss_is_nan" and (event.source, event.line) in self._skipped_rows

    @cached_property
    def _skipped_rows(self) -> set[tuple[str, int]]:
        words = self.facts.of("step_skipped", "loss_scale_falls")
        return {(event.source, event.line + below) for event in words for below in range(_ROW_BELOW)}

    def survived(self, event: LogEvent) -> bool:
        """Whether the rank continued to train, or the launcher started again, after the line."""
        if event.order < self.attempt_began.get(event.source, -1):
            return True
        # The scheduler has the last word; lines still come for a while.
        if "slurmstepd" in event.text:
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

    def is_reported(self, event: LogEvent) -> bool:
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
        quiet = set(self.facts.ranks) - spoke
        return tuple(quiet) if len(quiet) == 1 and len(self.facts.ranks) > 2 else ()

    def near(self, trace: Traceback) -> list[LogEvent]:
        """The events within a traceback, its chain, and the lines of its message."""
        events = self._of_rank_in_log.get((trace.event.source, trace.event.rank), [])
        first = bisect_left(events, trace.began, key=lambda event: event.order)
        last = bisect_right(events, trace.event.line + _NEAR_LINES, lo=first, key=lambda event: event.line)
        return events[first:last]

    @cached_property
    def _of_rank_in_log(self) -> dict[tuple[str, int | None], list[LogEvent]]:
        """The events of each rank in each log, in its order."""
        grouped: dict[tuple[str, int | None], list[LogEvent]] = {}
        for event in sorted(self.facts.events, key=lambda event: event.order):
            grouped.setdefault((event.source, event.rank), []).append(event)
        return grouped

    @cached_property
    def failing_exits(self) -> list[Exit]:
        """Ends that were not asked for by the launcher itself."""
        return [one for one in self.facts.exits if one.code not in (0, -15)]

    def table_rank(self) -> int | None:
        """The one rank that ended by its own exception, as the launchers' tables tell; None: not
        exactly one.
        """
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


def ranks_of(events: Iterable[LogEvent]) -> tuple[int, ...]:
    """The ranks that these lines are of, ascending."""
    return tuple(sorted({event.rank for event in events if event.rank is not None}))


def hosts_of(events: Iterable[LogEvent]) -> tuple[str, ...]:
    """The hosts, in order."""
    return tuple(dict.fromkeys(event.who.host for event in events if event.who.host))


def first_of_each(events: Sequence[LogEvent], *, limit: int = 8) -> tuple[LogEvent, ...]:
    """The first line of each signature of each rank, in order."""
    firsts: dict[tuple[str, int | None, str], LogEvent] = {}
    for event in events:
        firsts.setdefault((event.signature, event.rank, event.source), event)
    return tuple(firsts.values())[:limit]

"""Facts of a run after its logs were read, the input of the rules; and Hypothesis, the result of a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["warning", "error", "consequence", "progress", "finished", "death", "fact"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The rank, process and host that a line names. None: it does not name one.

    Attributes:
        rank: the global rank.
        host: the host's name or address, as written.
        local_rank: the rank on its host.
        pid: the process.
        node_rank: the number of the host.
    """

    rank: int | None = None
    host: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    node_rank: int | None = None


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class Event:
    """A relevant line of a log.

    Attributes:
        source: the name of the log, as it is shown.
        line: its number, from 1; only line feeds count, as in an editor.
        order: a number that increases along the source, with a different one for each piece of a line.
        signature: the id of the line's signature, or of the part of diagnose that made the event.
        kind: of line.
        cause: the id of the cause that it indicates; None: no particular one.
        text: the line without its prefixes, control characters and secrets.
        who: the rank and host that it names.
        time: seconds since 1970 by the host's clock read as if it were UTC; None: the line has none.
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
        """As `file:line`."""
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
        type: the exception's class without its module.
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

    event: Event
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
        event: the decisive line.
        code: the exit code; negative: minus the signal's number.
        rank: the global rank, if reported.
        local_rank: the rank on its host.
        host: the host.
        pid: the process.
        first: whether the launcher reports it as the first failure.
        time: in seconds; None: unknown.
    """

    event: Event
    code: int
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    first: bool = False
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that timed out, as reported by a rank's watchdog.

    Attributes:
        event: the line.
        rank: that waited.
        group: the process group, as written.
        seq: the sequence number; None: old wordings have none.
        op: ALLREDUCE, _ALLGATHER_BASE, …
        numel_in: elements that go in; numel_out: those that come out.
        timeout_ms: how long it waited.
        enqueued: the last work that was enqueued; completed: the last that was done.
    """

    event: Event
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
        rank: its number.
        host: where it ran.
        local_rank: its number there.
        pids: its processes.
        own_source: the name of the log that only this rank writes; "" if ranks share logs.
        first: the first event of it; last: the last one.
        progress: the last line that shows work.
        step: the last step; steps: of how many.
        finished: the line that says that it finished.
        ending: how it ended.
        exit: as reported by the launcher.
    """

    rank: int
    host: str | None = None
    local_rank: int | None = None
    pids: tuple[int, ...] = ()
    own_source: str = ""
    first: Event | None = None
    last: Event | None = None
    progress: Event | None = None
    step: int | None = None
    steps: int | None = None
    finished: Event | None = None
    ending: Ending = "unknown"
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of one log.

    Attributes:
        name: as it is shown.
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
    head: tuple[Event, ...] = ()
    tail: tuple[Event, ...] = ()
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
        hosts: their names.
        framework: of the training program: llamafactory, trl, transformers, lightning, deepspeed, ray, accelerate, recipes, torchrun, "".
        tracebacks: of all ranks, the last of each chain.
        exits: as reported by launchers.
        collectives: as reported by watchdogs.
        step: the last step in any log; steps: the total.
        earlier_runs: the lines of earlier runs in the same logs, as text.
    """

    sources: dict[str, SourceFacts] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    world_size: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    framework: str = ""
    tracebacks: tuple[Traceback, ...] = ()
    exits: tuple[Exit, ...] = ()
    collectives: tuple[Collective, ...] = ()
    step: int | None = None
    steps: int | None = None
    earlier_runs: tuple[str, ...] = ()

    def of(self, *signatures: str) -> list[Event]:
        """The events with one of these signatures."""
        return [event for event in self.events if event.signature in signatures]

    def pointing_to(self, *causes: str) -> list[Event]:
        """The events that indicate one of these causes."""
        return [event for event in self.events if event.cause in causes]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One possible cause.

    Attributes:
        cause: an id of the catalogue.
        why: one sentence: what happened, with names and numbers.
        evidence: the lines that show it, the decisive one first.
        ranks: the culprits, never the victims; empty if unknown.
        hosts: the same for hosts.
        confidence: 0 to 1; 1: the log states the cause.
        followed: its consequences in order of time.
        missing: information that would help: which log, which variable to set next time.
        facts: particulars for the remedy, for example the name of a module.
        step: the training step at which it happened, if known.
        phase: of the run, if known.
    """

    cause: str
    why: str
    evidence: tuple[Event, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    confidence: float = 1.0
    followed: tuple[Event, ...] = ()
    missing: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    phase: str | None = None

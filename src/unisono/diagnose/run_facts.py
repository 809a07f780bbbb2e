"""What is known of a run after its logs were read, the input of the rules; and a Hypothesis, what a rule makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal["warning", "error", "consequence", "progress", "finished", "death", "fact"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom a line speaks of, as far as it says so itself. None: it does not say.

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
    """A line that means something.

    Attributes:
        source: the name of the log, as it is shown.
        line: its number, from 1; only line feeds count, as in an editor.
        order: a number that grows along the source; pieces of one line have numbers of their own.
        signature: the id of the signature that the line has, or of the part of diagnose that made the event.
        kind: what kind of line it is.
        cause: an id of the catalogue that it points to; None: to none in particular.
        text: the line without its prefixes, control characters and secrets.
        who: whom it speaks of.
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
        """The rank that it speaks of."""
        return self.who.rank

    @property
    def where(self) -> str:
        """As `file:line`."""
        return f"{self.source}:{self.line}"

    def number(self, name: str) -> int | None:
        """The field as a whole number, or None where it is absent or is none."""
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
        ignored: Python only reports it and goes on ("Exception ignored in", a thread).
        threaded: it ended a thread, not its process.
        tabled: it stands in a row of torchrun's table.
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
    """How a launcher says that a process ended.

    Attributes:
        event: the decisive line.
        code: the exit code; negative: minus the signal's number.
        rank: the global rank, where it is told.
        local_rank: the rank on its host.
        host: the host.
        pid: the process.
        first: the launcher calls it the first failure that it saw.
        time: when, in seconds; None: untold.
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
    """A collective that a rank waited for in vain, as its watchdog tells.

    Attributes:
        event: the line.
        rank: who waited.
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
    """What is known of one rank.

    Attributes:
        rank: its number.
        host: where it ran.
        local_rank: its number there.
        pids: its processes.
        own_source: the log that is this rank's alone, by its name; "" where ranks share logs.
        first: the first event of it; last: the last one.
        progress: the last line that shows work.
        step: the last step; steps: of how many.
        finished: the line that says that it finished.
        ending: how it ended.
        exit: what the launcher says of its end.
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
    """What is known of one log.

    Attributes:
        name: as it is shown.
        lines: how many it has; bytes: how long it is.
        rank: the rank whose log it is alone; host: the host whose log it is.
        head: its first lines as events; tail: its last ones, the last one last.
        cut_head: it begins in the middle of something.
        restarts: how often a launcher began anew in it.
        node_rank: the node whose log it is, by name or contents.
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
        world_size: how many ranks there are, where it is told or can be counted with certainty.
        nodes: how many hosts.
        hosts: their names.
        framework: who trains: llamafactory, trl, transformers, lightning, deepspeed, ray, accelerate, recipes, torchrun, "".
        tracebacks: of all ranks, the last of each chain.
        exits: what launchers say of ends.
        collectives: what watchdogs say.
        step: the last step that anybody showed; steps: of how many.
        earlier_runs: where earlier runs in the same logs began and ended, as text.
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
        """The events that point to one of these causes."""
        return [event for event in self.events if event.cause in causes]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One possible cause.

    Attributes:
        cause: an id of the catalogue.
        why: one sentence: what happened, with names and numbers.
        evidence: the lines that show it, the decisive one first.
        ranks: the culprits, never the victims; empty where nobody can be named.
        hosts: the same for hosts.
        confidence: 0 to 1; 1: the log says it in so many words.
        followed: what came of it, in time: the chain after the first cause.
        missing: what would say more: whose log, which variable to set next time.
        facts: particulars for the remedy, for example the name of a module.
        step: the training step at which it happened, where it is known.
        phase: what the run was doing, where it is known.
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

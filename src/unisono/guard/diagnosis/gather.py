"""From what the logs hold to what is known of the run: ranks, hosts, sizes, ends, collectives."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.guard.diagnosis.attribution import Attribution, with_ranks
from unisono.guard.diagnosis.process_ends import find_exits
from unisono.guard.diagnosis.run_facts import (
    Ending,
    Exit,
    LogEvent,
    RankFacts,
    RunFacts,
    TimedOutCollective,
    Traceback,
)
from unisono.guard.diagnosis.scan import Scanned

# fmt: off
_STATED_WORLD = ("process_rank", "processes", "rank_of_world", "lightning_member", "nccl_rank",
                 "ray_distributed", "ray_rank", "world_size", "lightning_started", "deepspeed_world")
# fmt: on
_OWN_STATEMENTS = ("process_rank", "rank_of_world", "lightning_member")
"""A rank says its number, in the log of its host."""
_MOST_RANKS = 1 << 16
_FINISHED = ("finished",)


def gather(scanned: Sequence[Scanned], *, excerpts: Container[str] = ()) -> RunFacts:
    """The facts of the last run in these logs.

    Args:
        excerpts: names of those that are lines of a report: their order is not that of time.
    """
    ordered, earlier = last_run([one for one in scanned if one.name not in excerpts])
    kept = [*ordered, *(one for one in scanned if one.name in excerpts)]
    logs = with_ranks(kept)
    attribution = Attribution(logs)
    placed = [attribution.events(log) for log in logs]
    events = tuple(event for group in placed for event in group)
    tracebacks = tuple(trace for log in logs for trace in attribution.traces(log))
    exits = tuple(attribution.exit(one) for group in placed for one in find_exits(group))
    world = _world_size(events, exits, logs)
    step, steps = _steps(events)
    return RunFacts(
        sources={log.name: attribution.source(log) for log in logs},
        events=events,
        ranks=_ranks(logs, events, tracebacks, exits),
        world_size=world,
        nodes=_nodes(events, logs),
        hosts=_hosts(events, exits),
        framework=find_framework(events),
        tracebacks=tracebacks,
        exits=exits,
        collectives=tuple(_collectives(events)),
        step=step,
        steps=steps,
        earlier_runs=tuple(str(one) for one in earlier),
    )


def _world_size(events: Iterable[LogEvent], exits: Sequence[Exit], logs: Sequence[Scanned]) -> int | None:
    reported = Counter(
        world
        for event in events
        if event.signature in _STATED_WORLD and (world := event.number("world")) and world <= _MOST_RANKS
    )
    if reported:
        return reported.most_common(1)[0][0]
    tasks = [event for log in logs for event in log.events if event.signature == "lf_tasks"]
    nodes = max(
        (
            event.number("nodes") or 1
            for log in logs
            for event in log.events
            if event.signature in ("lf_nodes", "deepspeed_nodes", "nnodes")
        ),
        default=1,
    )
    counts = {event.number("count") or 0 for event in tasks} or {
        event.number("count") or 0
        for log in logs
        for event in log.events
        if event.signature in ("nproc", "deepspeed_nodes")
    }
    if len(counts) == 1 and (count := next(iter(counts))):
        return count * nodes
    started = {event.number("local_rank") for event in events if event.signature == "spawned"}
    if nodes == 1 and len(started) > 1 and started == set(range(len(started))):
        return len(started)
    ranks = {log.who.rank for log in logs if log.who.rank is not None}
    if len(ranks) > 1 and ranks == set(range(len(ranks))):
        return len(ranks)
    listed = {one.rank for one in exits if one.rank is not None and one.event.signature == "table_exit"}
    return len(listed) if len(listed) > 1 and listed == set(range(len(listed))) else None


def _nodes(events: Iterable[LogEvent], logs: Sequence[Scanned]) -> int | None:
    reported = Counter(
        number
        for event in events
        if event.signature in ("lf_nodes", "deepspeed_nodes", "nnodes") and (number := event.number("nodes"))
    )
    if reported:
        return reported.most_common(1)[0][0]
    named = {
        who.node_rank
        for who in (*(log.who for log in logs), *(event.who for event in events))
        if who.node_rank is not None
    }
    return len(named) if len(named) > 1 else None


def _hosts(events: Iterable[LogEvent], exits: Iterable[Exit]) -> tuple[str, ...]:
    named = [event.who.host for event in events if event.who.host] + [one.host for one in exits if one.host]
    return tuple(dict.fromkeys(named))


def _steps(events: Sequence[LogEvent]) -> tuple[int | None, int | None]:
    """The last step in a log and the total, from the progress bar with the most steps that is not a
    loading bar.
    """
    loading = {
        (event.source, event.order)
        for event in events
        if event.signature in ("loading", "preparing", "preparing_data", "saving", "evaluating")
    }
    best: tuple[int, int | None] | None = None
    for event in events:
        if event.signature not in ("bar", "step") or (event.source, event.order) in loading:
            continue
        step = event.number("step")
        if step is not None:
            best = (step, event.number("steps") or (best[1] if best else None))
    return best or (None, None)


def _ranks(
    logs: Sequence[Scanned],
    events: Sequence[LogEvent],
    tracebacks: Sequence[Traceback],
    exits: Sequence[Exit],
) -> dict[int, RankFacts]:
    by_rank: dict[int, list[LogEvent]] = defaultdict(list)
    for event in events:
        if event.rank is not None and event.rank < _MOST_RANKS:
            by_rank[event.rank].append(event)
        named = event.number("rank")
        if (
            named is not None
            and named < _MOST_RANKS
            and event.signature in (*_STATED_WORLD, "ray_member", "length", "rank_has", "rank_done")
        ):
            by_rank[named].append(event)
    seen = [event.rank for log in logs for event in (*log.head, *log.tail)]
    for rank in [*(one.rank for one in exits), *seen]:
        if rank is not None and rank < _MOST_RANKS:
            by_rank.setdefault(rank, [])
    sources = {log.who.rank: log.name for log in logs if log.who.rank is not None}
    for rank in sources:
        by_rank.setdefault(rank, [])
    failed = {trace.event.rank for trace in tracebacks if not trace.ignored}
    return {
        rank: _rank(
            rank,
            rank_events,
            sources.get(rank, ""),
            [one for one in exits if one.rank == rank],
            rank in failed,
        )
        for rank, rank_events in sorted(by_rank.items())
    }


def _rank(rank: int, events: list[LogEvent], source: str, exits: list[Exit], failed: bool) -> RankFacts:  # noqa: FBT001
    rank_events = [event for event in events if event.rank == rank]
    progress = [event for event in rank_events if event.kind == "progress"]
    done = [event for event in events if event.kind in _FINISHED or event.signature == "rank_done"]
    reported = next((one for one in exits if one.code not in (0, -15)), exits[0] if exits else None)
    steps = [
        (step, event.number("steps")) for event in progress if (step := event.number("step")) is not None
    ]
    return RankFacts(
        rank=rank,
        host=next((one.host for one in exits if one.host), None)
        or next(
            (
                event.fields["ip"]
                for event in events
                if event.signature == "ray_member" and event.number("rank") == rank
            ),
            None,
        )
        or next((event.who.host for event in rank_events if event.who.host), None)
        or next(
            (
                event.who.host
                for event in events
                if event.signature in _OWN_STATEMENTS and event.who.host and event.number("rank") == rank
            ),
            None,
        ),
        local_rank=next((one.local_rank for one in exits if one.local_rank is not None), None),
        pids=tuple(dict.fromkeys(one.pid for one in exits if one.pid is not None)),
        own_source=source,
        first=rank_events[0] if rank_events else None,
        last=rank_events[-1] if rank_events else None,
        progress=progress[-1] if progress else None,
        step=steps[-1][0] if steps else None,
        steps=steps[-1][1] if steps else None,
        finished=done[-1] if done else None,
        ending=_ending(reported, failed=failed, finished=bool(done)),
        exit=reported,
    )


def _ending(reported: Exit | None, *, failed: bool, finished: bool) -> Ending:
    if failed:
        return "exception"
    if reported is not None and reported.code:
        return "terminated" if reported.code == -15 else "signal" if reported.code < 0 else "exit"
    return "finished" if finished else "unknown"


def _collectives(events: Iterable[LogEvent]) -> Iterable[TimedOutCollective]:
    """One for each rank and group: the first that it waited for."""
    collectives: dict[tuple[int | None, str], TimedOutCollective] = {}
    for event in events:
        if event.signature not in ("watchdog", "watchdog_status"):
            continue
        group = _group(event.text)
        near = next(
            (
                key
                for key in collectives
                if key[0] == event.rank and (key[1] == group or not key[1] or not group)
            ),
            None,
        )
        one = collectives.get(near) if near else None
        if one is None:
            one = TimedOutCollective(event, event.rank, group)
        fresh = {
            "seq": event.number("seq") or event.number("at"),
            "op": event.fields.get("op"),
            "numel_in": event.number("numel_in"),
            "numel_out": event.number("numel_out"),
            "timeout_ms": event.number("timeout"),
            "enqueued": event.number("enqueued"),
            "completed": event.number("completed"),
        }
        fields = {
            name: value
            for name, value in fresh.items()
            if value is not None and getattr(one, name) in (None, "")
        }
        key = near or (event.rank, group)
        collectives[key] = replace(one, **fields, group=one.group or group)  # type: ignore[arg-type]
    return collectives.values()


def _group(text: str) -> str:
    """The process group in a watchdog's line."""
    import re

    match = re.search(r"\[PG (?:ID )?(\w{1,12})(?: PG GUID ([\w()]{1,60}))? Rank", text)
    return match[2] or match[1] if match else ""


# fmt: off
BY_PRIORITY = (
    "llamafactory", "axolotl", "kohya", "recipes", "torchtune", "megatron", "trl", "lightning", "ray",
    "transformers", "deepspeed", "accelerate", "torchrun",
)
# fmt: on
"""Frameworks whose settings a user would change, those that wrap others first."""


def find_framework(events: Iterable[LogEvent]) -> str:
    """One of BY_PRIORITY, or "" if unknown."""
    frameworks = {name for event in events if event.signature == "made_by" for name in event.fields}
    return next((name for name in BY_PRIORITY if name in frameworks), "")


_BEGINS = frozenset({"omp_banner", "lf_tasks", "launched", "deepspeed_cmd", "ray_began"})
_ENDS = frozenset(
    {
        "table_first",
        "exit_line",
        "deepspeed_return",
        "trainer_finished",
        "lightning_finished",
        "worker_group_finished",
        "preempted",
        "srun_exit",
    }
)
_OVERLAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier run in the same log.

    Attributes:
        first: its first line; last: its last line.
    """

    source: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.source}:{self.first}-{self.last}"


def last_run(scanned: Sequence[Scanned]) -> tuple[list[Scanned], list[Earlier]]:
    """The last run of each log, and the earlier ones."""
    kept, earlier = [], []
    for one in scanned:
        begins = _beginnings(one)
        for first, after in zip([_START, *begins], begins, strict=False):
            earlier.append(Earlier(one.name, first.line, max(first.line, after.line - 1)))
        kept.append(_from(one, begins[-1].order) if begins else one)
    return kept, earlier


_START = LogEvent(source="", line=1, order=0, signature="line", kind="fact", cause=None, text="")


def _beginnings(one: Scanned) -> list[LogEvent]:
    """The events with which further runs begin."""
    beginnings: list[LogEvent] = []
    begin, ended, restarts = 0, False, False
    for index, event in enumerate(one.events):
        if event.signature in _ENDS or _is_plain_end(event):
            ended, restarts = True, False
        elif event.signature == "worker_group_restarts":
            restarts = True
        elif event.signature in _BEGINS and ended and not restarts:
            if not _same_run(one.events[begin:index], one.events[index:]):
                beginnings.append(event)
                begin = index
            ended = False
    return beginnings


def _is_plain_end(event: LogEvent) -> bool:
    """An exception without a rank: the launcher's, or that of a program with one rank."""
    return event.signature == "exception" and event.rank is None


def _same_run(before: list[LogEvent], after: list[LogEvent]) -> bool:
    """Whether two parts are logs of two nodes of one run: different nodes, different ranks, or the
    same time.
    """
    for name, signature in (("node", "lf_nodes"), ("node", "deepspeed_nodes")):
        one, other = (
            {e.fields.get(name) for e in part if e.signature == signature} for part in (before, after)
        )
        if one and other:
            return not one & other
    one_ranks, other_ranks = (
        {e.fields["rank"] for e in part if e.signature in ("process_rank", "rank_of_world")}
        for part in (before, after)
    )
    if one_ranks and other_ranks:
        return not one_ranks & other_ranks
    began = next((e.time for e in after if e.time is not None), None)
    last = max((e.time for e in before if e.time is not None), default=None)
    return began is not None and last is not None and began < last - _OVERLAP_S


def _from(one: Scanned, order: int) -> Scanned:
    return replace(
        one,
        events=[event for event in one.events if event.order >= order],
        tracebacks=[trace for trace in one.tracebacks if trace.began >= order],
        head=[event for event in one.head if event.order >= order],
        tail=[event for event in one.tail if event.order >= order],
    )

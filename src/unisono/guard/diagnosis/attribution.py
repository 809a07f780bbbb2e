"""Which rank and host an event belongs to where its line does not say so, and which host a
hypothesis names.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from unisono.guard.diagnosis.line_prefixes import split_prefix
from unisono.guard.diagnosis.run_facts import (
    Exit,
    Hypothesis,
    LogEvent,
    Origin,
    RunFacts,
    SourceFacts,
    Traceback,
)
from unisono.guard.diagnosis.scan import Scanned

_MESSAGE_LINES = 14
_TABLE_BYTES = 3000
"""Maximum distance from the rank in a row of torchrun's table to the traceback in it."""
_SNIPPET_BYTES = 240
"""Maximum distance from Ray's line with the rank of an error to the traceback."""
_ROWS = frozenset({"table_rank", "table_first", "ray_snippet"})
_MOST_SPANS = 200
"""The number of a log's last tracebacks whose lines are searched."""
_LAUNCHED = frozenset(
    {"omp_banner", "lf_tasks", "deepspeed_nodes", "spawned", "ray_member", "srun_exit", "table_first"}
)
"""Lines of launchers: such a log is not written by one rank alone."""
_KERNELS = frozenset({"killed_pid", "xid_pid", "segfault_pid"})
"""Lines of the kernel that name a process."""
_STATED_WORLD = frozenset(
    {
        "process_rank",
        "processes",
        "rank_of_world",
        "lightning_member",
        "nccl_rank",
        "ray_distributed",
        "ray_rank",
        "world_size",
        "lightning_started",
        "deepspeed_world",
    }
)
_NO_RANKS = re.compile(
    r"(?:^|[^a-z])(?:attempt|restart|run|try|trial|seed|fold|exp|version|part)[_.-]?#|#/", re.IGNORECASE
)
"""Names of attempts and of sweeps: runs of their own, or one folder for each."""
_NUMBER = re.compile(r"\d+")


def with_ranks(logs: Sequence[Scanned]) -> list[Scanned]:
    """The logs, with the rank of each that is one rank's alone though its name does not say so in
    words.
    """
    ranks = _numbered(logs) or _each_of_one(logs)
    return [
        replace(log, who=replace(log.who, rank=ranks[log.name])) if log.name in ranks else log for log in logs
    ]


class Attribution:
    """The rank and host of an event whose line does not name them."""

    def __init__(self, logs: Sequence[Scanned]) -> None:
        """From what all logs tell of processes, nodes and hosts."""
        self._logs = {log.name: log for log in logs}
        self._pids = _pid_ranks(logs)
        self._members = _member_hosts(logs)
        self._nodes = {log.name: _node_of(log) for log in logs}
        self._hosts = {log.name: _host_of(log) for log in logs}
        self._per_node = _per_node(logs)
        self._rows = {log.name: [event for event in log.events if event.signature in _ROWS] for log in logs}
        self._one_node = len({node for node in self._nodes.values() if node is not None}) <= 1 and not any(
            (event.number("nodes") or 1) > 1
            for log in logs
            for event in log.events
            if event.signature in ("lf_nodes", "deepspeed_nodes", "nnodes")
        )

    def source(self, log: Scanned) -> SourceFacts:
        """Facts of a whole log."""
        return SourceFacts(
            name=log.name,
            lines=log.lines,
            bytes=log.bytes,
            rank=log.who.rank,
            host=self._hosts[log.name],
            head=tuple(log.head),
            tail=tuple(log.tail),
            cut_head=_is_cut(log),
            restarts=sum(event.signature == "worker_group_restarts" for event in log.events),
            node_rank=self._nodes[log.name],
        )

    def events(self, log: Scanned) -> list[LogEvent]:
        """The events of a log; those within a traceback belong to its process."""
        reported = [(trace, self._reported_origin(trace, log)) for trace in log.tracebacks[-_MOST_SPANS:]]
        spans = [
            (trace, who)
            for trace, who in reported
            if trace.tabled or who.pid is not None or who != trace.event.who
        ]
        processes = {event.line: event.number("pid") for event in log.events if event.signature in _KERNELS}
        attributed = []
        for event in log.events:
            who = next((who for trace, who in spans if _is_within(event, trace)), event.who)
            if who.pid is None and processes.get(event.line) in self._pids:
                who = replace(who, pid=processes[event.line])
            attributed.append(self._placed(event, who))
        return attributed

    def traces(self, log: Scanned) -> list[Traceback]:
        """The tracebacks of a log."""
        return [self._trace(trace, self._reported_origin(trace, log)) for trace in log.tracebacks]

    def exit(self, one: Exit) -> Exit:
        """The exit with its rank and its host."""
        rank = one.rank
        if rank is None and one.pid is not None:
            rank = self._pids.get(one.pid)
        if rank is None and one.local_rank is not None:
            rank = self._global(one.local_rank, one.event.source)
        return replace(one, rank=rank, host=one.host or self._hosts.get(one.event.source))

    def _reported_origin(self, trace: Traceback, log: Scanned) -> Origin:
        """The origin of a traceback, from the table that it is in, or from the line of the process
        that reports it.
        """
        who = trace.event.who
        if who.rank is not None or who.local_rank is not None or who.pid in self._pids:
            return who
        rows, reach = self._rows[log.name], _TABLE_BYTES if trace.tabled else _SNIPPET_BYTES
        index = bisect_left(rows, trace.began, key=lambda event: event.order)
        above = rows[index - 1] if index else None
        signature = "table_rank" if trace.tabled else "ray_snippet"
        near = above is not None and above.signature == signature and above.order > trace.began - reach
        return replace(who, rank=above.number("rank")) if above is not None and near else who

    def _trace(self, trace: Traceback, who: Origin) -> Traceback:
        return replace(
            trace,
            event=self._placed(trace.event, who),
            earlier=tuple(
                self._trace(one, one.event.who if one.event.who != trace.event.who else who)
                for one in trace.earlier
            ),
        )

    def _placed(self, event: LogEvent, who: Origin) -> LogEvent:
        who = self._completed(who, event.source)
        return event if who == event.who else replace(event, who=who)

    def _completed(self, who: Origin, source: str) -> Origin:
        rank = who.rank
        log = self._logs[source]
        if rank is None and who.pid is not None:
            rank = self._pids.get(who.pid)
        if rank is None and who.local_rank is not None:
            rank = self._global(who.local_rank, source)
        if rank is None and log.who.rank is not None:
            rank = log.who.rank
        if rank is None and log.who.local_rank is not None:
            rank = self._global(log.who.local_rank, source)
        host = (
            who.host
            or (self._members.get(who.pid) if who.pid is not None else None)
            or self._hosts.get(source)
        )
        return who if rank == who.rank and host == who.host else replace(who, rank=rank, host=host)

    def _global(self, local_rank: int, source: str) -> int | None:
        if self._one_node:
            return local_rank
        node = self._nodes.get(source)
        return node * self._per_node + local_rank if node is not None and self._per_node else None


def _numbered(logs: Sequence[Scanned]) -> dict[str, int]:
    """Ranks by the numbers in the names of logs, if these differ in one number only, from 0, and
    their contents do not contradict it.
    """
    names = {log.name: _NUMBER.findall(log.name) for log in logs}
    stems = {_NUMBER.sub("#", log.name) for log in logs}
    worlds = {
        event.number("world") for log in logs for event in log.events if event.signature in _STATED_WORLD
    } - {None, 0}
    if (
        len(logs) < 2
        or len(stems) != 1
        or worlds - {len(logs)}
        or _NO_RANKS.search(next(iter(stems)))
        or any(log.who.rank is not None or log.who.local_rank is not None for log in logs)
    ):
        return {}
    places = [index for index, values in enumerate(zip(*names.values(), strict=True)) if len(set(values)) > 1]
    if len(places) != 1:
        return {}
    ranks = {name: int(numbers[places[0]]) for name, numbers in names.items()}
    if sorted(ranks.values()) != list(range(len(logs))) or any(_launched(log) for log in logs):
        return {}
    if any(log.who.node_rank is not None and not _labels(log) for log in logs):
        return {}
    return ranks if all(_labels(log) <= {ranks[log.name]} for log in logs) else {}


def _each_of_one(logs: Sequence[Scanned]) -> dict[str, int]:
    """Ranks of logs that each have lines of a single, different rank."""
    if len(logs) < 2 or any(log.who.rank is not None or log.who.local_rank is not None for log in logs):
        return {}
    numbers = {
        log.name: next(iter(ranks)) for log in logs if len(ranks := _labels(log)) == 1 and not _launched(log)
    }
    several = any(len(_labels(log)) > 1 for log in logs)
    return numbers if len(numbers) > 1 and len(set(numbers.values())) == len(numbers) and not several else {}


def _labels(log: Scanned) -> set[int]:
    return {event.who.rank for event in log.events if event.who.rank is not None}


def _launched(log: Scanned) -> bool:
    return any(event.signature in _LAUNCHED for event in log.events)


def _is_within(event: LogEvent, trace: Traceback) -> bool:
    return (
        trace.began <= event.order
        and event.line <= trace.event.line + (0 if event.order <= trace.event.order else _MESSAGE_LINES)
        and event.who.rank is None
        and event.who.pid is None
    )


def _pid_ranks(logs: Sequence[Scanned]) -> dict[int, int]:
    """Ranks by process; a process number that two hosts use for different ranks is left out."""
    ranks_of: dict[int, set[int]] = defaultdict(set)
    for log in logs:
        rank: LogEvent | None = None
        for event in log.events:
            if event.signature == "table_rank":
                rank = event
            pid = event.number("pid")
            if event.signature == "table_exit" and rank is not None and pid is not None:
                ranks_of[pid].add(rank.number("rank") or 0)
            elif event.signature in ("ray_member", "rank_exit") and pid is not None:
                ranks_of[pid].add(event.number("rank") or 0)
            elif event.signature == "spawned" and pid is not None:
                ranks_of[pid].add(event.number("local_rank") or 0)
            elif event.signature in ("nccl_rank", "rank_of_world") and event.who.pid is not None:
                ranks_of[event.who.pid].add(event.number("rank") or 0)
    return {pid: next(iter(ranks)) for pid, ranks in ranks_of.items() if len(ranks) == 1}


def _member_hosts(logs: Sequence[Scanned]) -> dict[int, str]:
    """The addresses of Ray's workers by process."""
    hosts_of: dict[int, set[str]] = defaultdict(set)
    for log in logs:
        for event in log.events:
            pid = event.number("pid")
            if event.signature == "ray_member" and pid is not None:
                hosts_of[pid].add(event.fields["ip"])
    return {pid: next(iter(hosts)) for pid, hosts in hosts_of.items() if len(hosts) == 1}


def _node_of(log: Scanned) -> int | None:
    reported = [
        event.number("node") for event in log.events if event.signature in ("lf_nodes", "deepspeed_nodes")
    ]
    return (
        reported[-1] if reported and len(set(reported)) == 1 else log.who.node_rank if not reported else None
    )


def _host_of(log: Scanned) -> str | None:
    """The only host that the lines of a log name, else that of its file name.

    A Ray driver names only other hosts; and a table that lacks some of a log's ranks may belong to
    a different host.
    """
    if any(event.signature in ("ray_member", "ray_rank") or "ip=" in event.text[:80] for event in log.events):
        return log.who.host
    named = {event.who.host for event in log.events if event.who.host}
    tables = {event.fields["host"] for event in log.events if event.signature == "table_host"}
    listed = {event.number("rank") or 0 for event in log.events if event.signature == "table_rank"}
    if tables and len(listed | _labels(log)) <= 1 + max(listed, default=0) - min(listed, default=0):
        named |= tables
    return next(iter(named)) if len(named) == 1 else log.who.host if not named else None


def _per_node(logs: Sequence[Scanned]) -> int:
    counts = {
        event.number("count") or 0
        for log in logs
        for event in log.events
        if event.signature in ("lf_tasks", "nproc", "deepspeed_nodes")
    }
    return next(iter(counts)) if len(counts) == 1 else 0


def _is_cut(log: Scanned) -> bool:
    """Whether the beginning of a log is missing: its first line is that of a watchdog, a frame or a
    table.
    """
    first = next((event.text for event in log.head if event.text.strip()), "")
    return first.startswith(("  File ", "    ", "frame #")) or "Watchdog caught" in first


# fmt: off
_NOBODYS = frozenset({
    "healthy", "undetermined", "rdzv_timeout", "dns_failure", "hostname_loopback", "nproc_mismatch",
    "unequal_steps", "collective_mismatch", "device_unbound_barrier", "rank_stalled",
    "preempted_sigterm", "unused_parameters_ddp", "nan_loss", "port_in_use", "ib_unreachable",
    "p2p_blocked", "duplicate_gpu", "process_group_destroyed_twice", "teardown_crash",
    "single_device_nccl", "ray_resources_unsatisfiable",
})
# fmt: on
"""Causes for which the host of the log is not the culprit: it is the one that waited."""
_WORDS_CHARS = 60
_NAMELESS = frozenset({"localhost", "127.0.0.1", None})
"""Names that any host may have."""
_MACHINES = frozenset(
    {"gpu_fell_off", "ecc_error", "host_oom_killed", "driver_too_old", "shm_too_small", "ulimit"}
)
"""Causes on one machine, whose name helps even if no other is known."""


_OF_EITHER = frozenset({"gloo_unreachable"})
"""Lines of one of two hosts that do not reach each other: the culprit may be either."""


def with_host(finding: Hypothesis, facts: RunFacts) -> Hypothesis:
    """The hypothesis with its host, if it has none and one is known."""
    if finding.hosts or finding.cause in ("healthy", "undetermined"):
        return finding
    if any(event.signature in _OF_EITHER for event in finding.evidence[:1]):
        return finding
    rank = facts.ranks.get(finding.ranks[0]) if len(finding.ranks) == 1 else None
    if rank and rank.host and rank.host not in _NAMELESS:
        return replace(finding, hosts=(rank.host,))
    if (finding.ranks and finding.cause not in _MACHINES) or finding.cause in _NOBODYS:
        return finding
    cited = [event for event in finding.evidence if event.kind in ("error", "death", "fact")]
    cited_lines = {(event.signature, _words(event)) for event in cited}
    kinds = {event.signature for event in cited}
    alike = [
        event
        for event in facts.events
        if event.signature in kinds and (event.signature, _words(event)) in cited_lines
    ]
    shown = {
        event.who.host for event in (*cited, *alike)
    }  # evidence is limited: other hosts may have the same lines
    # Ray reports the process's host.
    reported = any(event.who.pid is not None for event in finding.evidence)
    several = len(facts.hosts) > 1 or (facts.nodes or 1) > 1 or finding.cause in _MACHINES or reported
    host = next(iter(shown)) if len(shown) == 1 and not shown & _NAMELESS else None
    return replace(finding, hosts=(host,)) if host and several else finding


def _words(event: LogEvent) -> str:
    return split_prefix(event.text)[1][:_WORDS_CHARS]

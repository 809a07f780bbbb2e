"""Ranks that ended without an error message: signals, exit codes, silence; and what the kernel and
Ray report about them.
"""

import re
from itertools import pairwise

from unisono.guard.diagnosis.rules_hang import LOST, WAITED, stalled
from unisono.guard.diagnosis.run_facts import (
    Exit,
    Hypothesis,
    LogEvent,
    View,
    first_of_each,
    hosts_of,
    ranks_of,
)

_DEADLY = frozenset({-4, -7, -8, -9, -11})
_SIGNALS = {-4: "SIGILL", -6: "SIGABRT", -7: "SIGBUS", -8: "SIGFPE", -9: "SIGKILL", -11: "SIGSEGV"}
_ABORTED = -6
_MOST_LOCAL = 64
"""Ranks of one host."""
_KILLED = re.compile(r"Killed process \d{1,10} \(([^)]{1,40})\)")
_RUN_PROGRAMS = re.compile(
    r"unisono|python|pt_|ray|torch|train|deepspeed|accelerate|llama|conda|worker|load|fork|bash|sh$|srun"
    r"|slurm|mpi|orted"
)
_SERVICES = re.compile(
    r"tensorboard|jupyter|dashboard|exporter|prometheus|uvicorn|gunicorn|nginx|[Ss]erver", re.IGNORECASE
)
"""Programs beside a run, which are terminated when it is over."""
_POD_LINES = 12
"""From the name of a pod to the reason of its end, in what kubectl prints."""


def find_out_of_memory(view: View) -> list[Hypothesis]:
    """The kernel, a cgroup or a scheduler ended a process for its memory, or none was left."""
    stated = [
        event
        for event in view.facts.pointing_to("host_oom_killed")
        if event.kind in ("error", "death") and not view.survived(event) and not _is_strangers(view, event)
    ]
    if not stated:
        return []
    stated.sort(key=lambda event: event.signature not in ("kernel_out_of_memory", "loader_killed"))
    killed = [event.number("pid") for event in view.facts.of("killed_pid")]
    ranks = tuple(
        sorted(
            {
                one.rank
                for one in view.facts.exits
                if one.pid in killed and one.rank is not None and one.pid is not None
            }
        )
    )
    pids = {event.number("pid"): event for event in view.facts.of("spawned")}
    if not ranks:
        ranks = tuple(sorted({pids[pid].number("local_rank") or 0 for pid in killed if pid in pids}))
    if not ranks:
        ranks = tuple(
            sorted({one.rank for one in view.facts.exits if one.code == -9 and one.rank is not None})
        )
    if not ranks:
        ranks = ranks_of(view.facts.of("killed_pid")) or ranks_of(
            event for event in stated if event.signature != "kernel_out_of_memory"
        )
    pods = _pods(view, stated)
    if not ranks:
        ranks = ranks_of(
            event for event in view.facts.events if event.rank is not None and _stem(event.source) in pods
        ) or _left_over(view)
    lines = list(view.facts.of("killed_pid"))[:2]
    kernel = [event for event in stated if "Killed process" in event.text] or stated
    decisive = (
        *kernel[:3],
        *(event for event in stated[:3] if event not in kernel[:3]),
        *[one.event for one in view.failing_exits if one.code == -9][:2],
    )
    who = f"rank {ranks[0]}'s process" if len(ranks) == 1 else "a process"
    oom = [event for event in stated if event.signature == "host_memory_gone"]
    why = (
        f"{who} could not allocate host memory"
        if oom and len(oom) == len(stated)
        else f"{who} was killed for its host memory use"
    )
    return [
        Hypothesis(
            "host_oom_killed",
            why,
            tuple(_unique((*decisive, *lines))),
            ranks if len(ranks) <= 1 else (),
            pods if len(pods) == 1 else _hosts(view, stated, ranks),
            confidence=0.95,
            step=view.facts.step,
        )
    ]


def find_ray_deaths(view: View) -> list[Hypothesis]:
    """Ray lost a worker, and no log says why."""
    stated = [event for event in view.facts.pointing_to("ray_worker_died") if not view.survived(event)]
    if not stated:
        return []
    stated.sort(key=lambda event: ("SYSTEM_ERROR" not in event.text, "exit type" not in event.text))
    snippets = {event.number("rank") for event in view.facts.of("ray_snippet")}
    dead = {event.number("pid") for event in view.facts.of("ray_pid", "ray_dead")}
    snippets |= {event.number("rank") for event in view.facts.of("ray_health")}
    members = {event.number("pid"): event.number("rank") for event in view.facts.of("ray_member")}
    ranks = {rank for rank in snippets if rank is not None} or {
        rank for pid, rank in members.items() if pid in dead and rank is not None
    }
    ips = [event.fields["ip"] for event in view.facts.of("ray_ip", "ray_dead")] or [
        event.who.host for event in stated if event.who.host
    ]
    ips = (
        [event.fields["ip"] for event in view.facts.of("ray_node_dead")]
        or [
            event.fields["ip"]
            for event in view.facts.of("ray_low")
            if "memory" in event.text.lower() or "he node IP" in event.text
        ]
        or ips
    )
    hosts = tuple(dict.fromkeys(ip for ip in ips if ip))
    one = tuple(sorted(ranks)) if len(ranks) == 1 else ()
    why = f"Ray lost the worker of rank {one[0]}" if one else "Ray lost a worker process"
    return [
        Hypothesis(
            "ray_worker_died",
            why,
            (*first_of_each(stated), *view.facts.of("ray_low")[:1]),
            one,
            hosts if len(hosts) == 1 else (),
            confidence=0.8,
            missing=(
                "the dead worker's own log (worker-*.err below /tmp/ray/session_latest/logs)",
                "dmesg of its host",
            ),
        )
    ]


def find_preemption(view: View) -> list[Hypothesis]:
    """The scheduler took the machine away."""
    stated = [event for event in view.facts.pointing_to("preempted_sigterm") if not view.survived(event)]
    if not stated:
        return []
    stated.sort(key=lambda event: event.signature != "preempted" or "SignalException" in event.text)
    failed = tuple(dict.fromkeys(event.fields["host"] for event in view.facts.of("node_failed")))
    why = (
        f"the job was ended because node {', '.join(failed)} failed"
        if failed
        else "the job was asked to end from outside"
    )
    return [
        Hypothesis(
            "preempted_sigterm",
            why,
            first_of_each(stated),
            hosts=failed if len(failed) == 1 else (),
            confidence=0.9,
            step=view.facts.step,
        )
    ]


def find_cancelled(view: View) -> list[Hypothesis]:
    """The job was terminated without a known reason, and nothing had failed before."""
    stated = [
        event
        for event in view.facts.of("cancelled")
        if not view.survived(event) and not _SERVICES.search(event.text)
    ]
    lost = [
        event
        for event in view.facts.of(*LOST, *WAITED)
        if any(one.source != event.source or event.order < one.order for one in stated)
    ]
    failed = [
        event
        for event in view.facts.events
        if event.kind in ("error", "death")
        and not view.is_quiet(event)
        and not view.is_victims(event)
        and event.signature not in ("traceback", "exception")
    ]
    if not stated or lost or failed or view.failing_exits:
        return []
    return [
        Hypothesis(
            "preempted_sigterm",
            "the job was asked to end from outside (scancel, a service that stops it, a machine that is"
            " reclaimed), and nothing had failed before",
            first_of_each(stated),
            confidence=0.6,
            step=view.facts.step,
            missing=("the scheduler's reason for the cancellation",),
        )
    ]


def find_deaths(view: View) -> list[Hypothesis]:
    """A rank ended by a signal or a code that no exception of its own explains."""
    return _by_exit(view) or _by_words(view)


def _by_exit(view: View) -> list[Hypothesis]:
    exits = [one for one in view.failing_exits if not view.survived(one.event)]
    deadly = [one for one in exits if one.code in _DEADLY]
    if deadly:
        return [_ended(view, deadly, 0.9)]
    victims = {
        event.rank
        for event in view.facts.events
        if event.signature in (*LOST, *WAITED) and event.rank is not None
    }
    victims |= {
        trace.event.rank
        for trace in view.tracebacks
        if trace.event.rank is not None and view.is_victim(trace)
    }
    watched = bool(view.facts.of("watchdog", "watchdog_follows", "watchdog_heartbeat"))
    aborted = [
        one
        for one in exits
        if one.code == _ABORTED and one.rank is not None and one.rank not in victims and not watched
    ]
    if len({one.rank for one in aborted}) == 1 and not view.facts.of("gloo_sizes"):
        return [_ended(view, aborted, 0.6)]
    explained = {trace.event.rank for trace in view.facts.tracebacks if trace.event.rank is not None}
    unlabelled = any(trace.event.rank is None for trace in view.tracebacks)
    silent = [
        one
        for one in exits
        if one.code > 0 and one.rank is not None and one.rank not in explained | victims and not unlabelled
    ]
    # If all ended the same way, the first one means nothing.
    alone = len({one.rank for one in silent}) == 1
    return [_ended(view, silent, 0.7)] if alone and not watched else []


def _ended(view: View, exits: list[Exit], confidence: float) -> Hypothesis:
    ranks = tuple(sorted({one.rank for one in exits if one.rank is not None}))
    if not ranks and len(exits) == 1:
        ranks = ranks_of(view.facts.of("fatal_python", "kernel_segfault")) or _left_over(view)
        ranks = ranks or _dead_before_the_end(view)
    first = [one.rank for one in exits if one.first and one.rank is not None]
    alike = len({one.code for one in exits}) == 1 and set(view.facts.ranks) <= set(ranks)
    if (
        len(ranks) > 1 and len(set(first)) == 1 and not alike
    ):  # if all died the same way, the first has no significance
        ranks = (first[0],)
    code = next((one.code for one in exits if not ranks or one.rank in ranks), exits[0].code)
    how = f"was ended by {_SIGNALS[code]}" if code in _SIGNALS else f"ended with code {code}"
    who = f"rank {ranks[0]}" if len(ranks) == 1 else "a rank"
    evidence = tuple(
        one.event
        for one in sorted(exits, key=lambda one: (one.rank not in ranks, one.event.signature != "table_exit"))
    )[:4]
    pids = {one.pid for one in exits if one.rank in ranks or not ranks}
    words = [
        event
        for event in view.facts.of("fatal_python", "kernel_segfault")
        if event.rank is None or event.rank in ranks
    ]
    evidence = (*words[:2], *evidence)
    evidence += tuple(event for event in view.facts.of("table_signal") if event.number("pid") in pids)[:1]
    hosts = tuple(dict.fromkeys(one.host for one in exits if one.host and (one.rank in ranks or not ranks)))
    several = len({*view.facts.hosts, *hosts}) > 1
    return Hypothesis(
        "rank_died_first",
        f"{who} {how}, without a reason in the logs",
        evidence,
        ranks if len(ranks) == 1 else (),
        hosts if several and len(hosts) == 1 else (),
        confidence=confidence,
        step=view.facts.step,
        facts={"signal": _SIGNALS.get(code, ""), "code": str(code)},
        missing=("dmesg of its host", f"the log of {who}"),
    )


def _killed(view: View) -> list[Hypothesis]:
    """A shell says that its process was killed, and nothing had gone wrong before."""
    before = {
        event.source: event.order
        for event in reversed(view.facts.of(*LOST, *WAITED, "cancelled", "preempted"))
    }
    stated = [
        event for event in view.facts.of("killed_by_shell") if event.order < before.get(event.source, 1 << 62)
    ]
    stated = [event for event in stated if not view.survived(event)]
    if not stated:
        return []
    ranks = ranks_of(stated)
    return [
        Hypothesis(
            "rank_died_first",
            "a process was killed from outside (SIGKILL), without a reason in the logs",
            first_of_each(stated),
            ranks if len(ranks) == 1 else (),
            confidence=0.7,
            step=view.facts.step,
            facts={"signal": "SIGKILL"},
            missing=("dmesg of its host",),
        )
    ]


def _is_strangers(view: View, event: LogEvent) -> bool:
    """Whether the kernel killed a process that is not part of a training run, by its name."""
    named = _KILLED.search(event.text)
    if named is None or _RUN_PROGRAMS.search(named[1]) or event.who.rank is not None:
        return False
    pid = named[0].split()[2]
    known_pids = {one.pid for one in view.facts.exits} | {
        one.number("pid") for one in view.facts.of("spawned")
    }
    shells = any(re.search(rf"\b{pid}\b", one.text) for one in view.facts.of("killed_by_shell"))
    return int(pid) not in known_pids and not shells


def _pods(view: View, stated: list[LogEvent]) -> tuple[str, ...]:
    """The pods that were reported to run out of memory."""
    near = [
        event.fields["pod"]
        for event in view.facts.of("pod_named")
        if any(one.source == event.source and abs(one.line - event.line) <= _POD_LINES for one in stated)
    ]
    return tuple(dict.fromkeys(near))


def _stem(name: str) -> str:
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[0]


def _left_over(view: View) -> tuple[int, ...]:
    """The one rank that did not live to complain, where all others did: a launcher may say how a
    process ended, and not which.
    """
    world = view.facts.world_size
    reporting = {event.rank for event in view.facts.of(*LOST, *WAITED) if event.rank is not None}
    reporting |= {trace.event.rank for trace in view.tracebacks if trace.event.rank is not None}
    missing = set(range(world)) - reporting if world and world <= 1 << 16 else set()
    return tuple(missing) if reporting and len(missing) == 1 else ()


_AT_ONCE_S, _ALIVE_S = 0.1, 0.3
"""DeepSpeed's launcher ends its processes one after another: one that is dead takes no time, a
living one does.
"""


def _dead_before_the_end(view: View) -> tuple[int, ...]:
    """The one process that DeepSpeed's launcher had not to end, by its times, on a single node."""
    lines = view.facts.of("deepspeed_killing", "deepspeed_return")
    local = {one.number("pid"): one.number("local_rank") for one in view.facts.of("spawned")}
    killed = [one for one in lines if one.signature == "deepspeed_killing"]
    if (view.facts.nodes or 1) > 1 or len(killed) < 2 or any(one.time is None for one in lines):
        return ()
    took = {
        one.number("pid"): (after.time or 0.0) - (one.time or 0.0)
        for one, after in pairwise(lines)
        if one.signature == "deepspeed_killing"
    }
    dead = [pid for pid, seconds in took.items() if seconds < _AT_ONCE_S]
    alive = [pid for pid, seconds in took.items() if seconds > _ALIVE_S]
    rank = local.get(dead[0]) if len(dead) == 1 and len(dead) + len(alive) == len(killed) else None
    return () if rank is None else (rank,)


def _by_words(view: View) -> list[Hypothesis]:
    """A crash that the interpreter or the shell reported."""
    stated = [event for event in view.facts.of("fatal_python", "kernel_segfault") if not view.survived(event)]
    if not stated:
        return _killed(view)
    ranks = ranks_of(stated)
    return [
        Hypothesis(
            "rank_died_first",
            "a process crashed in native code",
            first_of_each(stated),
            ranks if len(ranks) == 1 else (),
            confidence=0.85,
            facts={"signal": "SIGSEGV"},
            missing=("a core dump, or faulthandler's stack",),
        )
    ]


def find_silence(view: View) -> list[Hypothesis]:
    """The others lost a peer, and one rank says nothing at all."""
    lost = [event for event in view.facts.of(*LOST) if not view.survived(event)]
    if not lost:
        return []
    speak = {event.rank for event in view.facts.of(*LOST, *WAITED) if event.rank is not None}
    speak |= {trace.event.rank for trace in view.facts.tracebacks if trace.event.rank is not None}
    ended = {one.rank for one in view.facts.exits if one.code and one.rank is not None}
    world = view.facts.world_size
    all_ranks = set(range(world)) if world and world <= 1 << 16 else set(view.facts.ranks) | _gap(view)
    silent = sorted(all_ranks - speak - ended)
    rank_facts = view.facts.ranks.get(silent[0]) if silent else None
    if len(silent) != 1 or (not world and len(all_ranks) < 3 and not (rank_facts and rank_facts.own_source)):
        return []
    rank = silent[0]
    waited = [
        event for event in view.facts.of("gloo_timeout") if event.rank != rank and not view.survived(event)
    ]
    if waited:  # a rank that is gone is missed at once; who is waited for lives
        return [stalled(view, rank, waited)]
    facts = view.facts.ranks.get(rank)
    source = view.facts.sources.get(facts.own_source) if facts else None
    last = source.tail[-1:] if source else ([facts.last] if facts and facts.last else [])
    return [
        Hypothesis(
            "rank_died_first",
            f"rank {rank} is gone without a message: the others lost their connection to it",
            (*first_of_each(lost, limit=4), *last),
            (rank,),
            (source.host,) if source and source.host and len(_hosts_of_logs(view)) > 1 else (),
            confidence=0.75,
            step=view.facts.step,
            facts={"signal": ""},
            missing=("its exit code", "dmesg of its host"),
        )
    ]


def _hosts_of_logs(view: View) -> set[str]:
    return {log.host for log in view.facts.sources.values() if log.host}


def _gap(view: View) -> set[int]:
    """The ranks between the first and the last that torchrun's table lists: who is left out there
    ended with exit code 0.
    """
    listed = {
        one.rank for one in view.facts.exits if one.rank is not None and one.event.signature == "table_exit"
    }
    return (
        set(range(min(listed), max(listed) + 1))
        if listed and max(listed) - min(listed) < _MOST_LOCAL
        else set()
    )


def _hosts(view: View, stated: list[LogEvent], ranks: tuple[int, ...]) -> tuple[str, ...]:
    if len(view.facts.hosts) < 2:
        return ()
    named = hosts_of(stated) or tuple(
        dict.fromkeys(one.host for one in view.facts.exits if one.rank in ranks and one.host)
    )
    return named if len(named) == 1 else ()


def _unique(events: tuple[LogEvent, ...]) -> list[LogEvent]:
    seen: dict[tuple[str, int], LogEvent] = {}
    for event in events:
        seen.setdefault((event.source, event.line), event)
    return list(seen.values())

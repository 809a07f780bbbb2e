"""Causes that a log names in so many words: the program's own exceptions, NaN losses, and the ends
of runs that finished, healthy or with an error only during teardown.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from unisono.base.causes import find_cause
from unisono.base.causes.entries import judgement_of
from unisono.guard.diagnosis.line_prefixes import split_prefix
from unisono.guard.diagnosis.process_ends import exception_of
from unisono.guard.diagnosis.run_facts import (
    WRAPPERS,
    Hypothesis,
    LogEvent,
    Traceback,
    View,
    hosts_of,
    ranks_of,
)

_NAN = re.compile(r"\bnan\b|returned nan|inf`", re.IGNORECASE)
_STRONG = re.compile(r"train_runtime|train metrics|Do not forget to share")
"""Words that the whole run says, and not one rank in a program of its own."""
_KERNELS = frozenset({"kernel_out_of_memory", "kernel_segfault"})
"""Words of kernels, of whatever ran on the host at whatever time; once all is done they are not
about this run.
"""
_TWICE = re.compile(
    r"Process group cannot be None|assert pg is not None|Invalid process group specified|process group has"
    r" already been destroyed|Default process group has not been initialized"
)


@dataclass(frozen=True, slots=True)
class Named:
    """A cause with the lines that state it."""

    cause: str
    events: tuple[LogEvent, ...]
    quiet: bool


def find_named(view: View) -> list[Hypothesis]:
    """A hypothesis for each cause that a log states, that ended the run, and that has no rule of
    its own.
    """
    causes = dict.fromkeys(event.cause for event in view.facts.events if event.cause)
    hypotheses = []
    for cause in causes:
        if judgement_of(cause).has_rules:
            continue
        stated = lines_naming(view, cause)
        if stated is not None:
            hypotheses.append(named_hypothesis(view, stated))
    return hypotheses


def lines_naming(view: View, cause: str) -> Named | None:
    """The relevant lines that state the cause; None: there are none, or the run survived all."""
    events = [
        event
        for event in view.facts.events
        if event.cause == cause
        and event.kind in ("error", "death")
        and not view.is_victims(event)
        and not view.survived(event)
        and not view.is_reported(event)
    ]
    loud = [event for event in events if not view.is_quiet(event)]
    if loud:
        return Named(cause, tuple(loud), quiet=False)
    return Named(cause, tuple(events), quiet=not judgement_of(cause).counts_as_warning) if events else None


def named_hypothesis(view: View, stated: Named) -> Hypothesis:
    """The hypothesis for lines that state their cause."""
    shared = judgement_of(stated.cause).culprit != "ranks" and not _alone(view, stated)
    ranks = () if shared else culprits(view, stated.events)
    hosts = _hosts(view, stated, ranks)
    title = find_cause(stated.cause)
    return Hypothesis(
        cause=stated.cause,
        why=_sentence(title.title if title else stated.cause, ranks, hosts),
        evidence=(*stated.events[:_MOST_LINES], *_first_of_chain(view, stated.events[0])),
        ranks=ranks,
        hosts=hosts,
        confidence=0.5 if stated.quiet else 0.95,
        step=view.facts.step,
    )


_MOST_LINES = 8


def _first_of_chain(view: View, event: LogEvent) -> list[LogEvent]:
    """The exception from which a stated one followed: it names the file, the row or the number."""
    return [
        trace.earlier[-1].event
        for trace in view.facts.tracebacks
        if trace.earlier and (trace.event.source, trace.event.line) == (event.source, event.line)
    ][:1]


def culprits(view: View, events: Iterable[LogEvent]) -> tuple[int, ...]:
    """The ranks of these lines; empty if all ranks have them, or if the rank is unknown."""
    named = ranks_of(events)
    world = view.facts.world_size
    if not named:
        rank = view.table_rank()
        if rank is None:
            rank = _only_device_error(view)
        return (rank,) if rank is not None and view.distributed else ()
    if len(named) > 1 and world is not None and len(named) >= world:
        return ()
    if len(named) > 1:
        first = view.table_rank()
        return (first,) if first in named else named
    return named if world != 1 else ()


def _alone(view: View, stated: Named) -> bool:
    """Whether only one rank reports it and the others are victims: then that rank is the culprit,
    whatever the cause usually is.
    """
    named = set(ranks_of(stated.events))
    judgement = judgement_of(stated.cause)
    if len(named) != 1 or judgement.culprit == "nobody":
        return False
    if any(event.rank not in (None, *named) for event in view.consequences):
        return True
    return judgement.one_environment and (_others_write(view, named) or _only_snippet(view, named))


def _others_write(view: View, named: set[int]) -> bool:
    """Whether every other rank has a log of its own with lines in it; none of them reports the
    cause.
    """
    others = [rank_facts for rank, rank_facts in view.facts.ranks.items() if rank not in named]
    logs = [view.facts.sources.get(rank_facts.own_source) for rank_facts in others]
    return bool(logs) and all(log is not None and log.lines > 0 for log in logs)


def _only_snippet(view: View, named: set[int]) -> bool:
    """Whether Ray, which lists the errors of all workers, lists those of this rank alone."""
    listed = {event.number("rank") for event in view.facts.of("ray_snippet")}
    return listed == named and (view.facts.world_size or 0) > 1


def _only_device_error(view: View) -> int | None:
    """The only rank with a device error; assertions and kernel lines have no rank."""
    ranks = {
        event.rank
        for event in view.facts.of("device_assert", "launch_failure", "nccl_system_error")
        if event.rank is not None and "unhandled system error" not in event.text
    }
    return next(iter(ranks)) if len(ranks) == 1 else None


def _hosts(view: View, stated: Named, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The host, if the cause may affect one host and there are several."""
    if not judgement_of(stated.cause).one_host or (len(view.facts.hosts) < 2 and (view.facts.nodes or 1) < 2):
        return ()
    hosts = hosts_of(stated.events)
    return hosts if len(hosts) == 1 else ()


def _sentence(title: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    who = ", ".join([*(f"rank {rank}" for rank in ranks), *(f"host {host}" for host in hosts)])
    return f"{who}: {title}" if who else title


Rule = Callable[[View], list[Hypothesis]]


_NCCL = re.compile(
    r"NCCL error"
    r" in|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError|HCCL|c10d::"
    r"|torch\.distributed\.Dist\w+Error"
)


# fmt: off
_COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier",
    "monitored_barrier", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "wait",
    "init_process_group", "rendezvous", "sync_global_devices", "wait_for_everyone", "synchronize",
})
# fmt: on
"""Functions in which ranks meet: what is raised in them is mostly another's fault."""


def find_user_errors(view: View) -> list[Hypothesis]:
    """One finding for the program's own exceptions, if there are any."""
    traces = [trace for trace in view.tracebacks if _is_own(view, trace)]
    lone = [] if traces else _without_header(view)
    alive = [trace for trace in traces if not view.survived(trace.event)]
    late = [trace for trace in alive if _is_unknown_model(trace)]
    if late:
        return [_unknown_model(late)]
    threads = [
        trace
        for trace in view.facts.tracebacks
        if trace.threaded and not view.is_victim(trace) and not view.survived(trace.event)
    ]
    if not traces and not lone and threads and (view.consequences or view.failing_exits):
        return [_of_thread(view, threads)]
    if not alive and not lone and (refused := _refused_start(view)):
        return refused
    if not alive and not lone:
        return [_finding(view, traces, 0.4)] if traces and view.failing_exits else []
    if not alive:
        return [_from_lines(view, lone)]
    meets = all(
        trace.type in ("RuntimeError", "TimeoutError", "XlaRuntimeError")
        and {*trace.functions[-1:]} & _COLLECTIVES
        for trace in alive
    )
    return [_finding(view, alive, 0.6 if meets else 0.9)]


def _refused_start(view: View) -> list[Hypothesis]:
    """A program that rejected its arguments: it reports that without a traceback."""
    stated = [event for event in view.facts.of("usage_error") if not view.survived(event)]
    if not stated:
        return []
    words = _after_label(stated[0].text)
    return [
        Hypothesis(
            "user_code_error",
            f"the program rejected its arguments: {words[:160]}",
            tuple(stated[:4]),
            culprits(view, stated) if len(ranks_of(stated)) == 1 else (),
            confidence=0.85,
            facts={"exception": "", "message": words},
        )
    ]


def _of_thread(view: View, traces: list[Traceback]) -> Hypothesis:
    """A thread of the program ended, and the rank that it belonged to did not come any more."""
    finding = _finding(view, traces, 0.75)
    first = traces[0]
    ranks = (first.event.rank,) if first.event.rank is not None else view.silent()
    who = f"rank {ranks[0]}" if ranks else "the program"
    return replace(
        finding,
        ranks=ranks,
        why=(
            f"a thread of {who} ended with {first.type}:"
            f" {first.message.splitlines()[0] if first.message else ''}; then its rank hung"
        ),
    )


def _is_unknown_model(trace: Traceback) -> bool:
    """A model type that transformers of this version have no entry for; newer ones say so in
    words.
    """
    return trace.type == "KeyError" and "configuration_auto.py" in trace.frame


def _unknown_model(traces: list[Traceback]) -> Hypothesis:
    kind = traces[0].message.strip("'\"")
    return Hypothesis(
        "version_mismatch",
        f"the installed transformers does not support the model type {kind}: it is older than the model",
        tuple(trace.event for trace in traces[:3]),
        confidence=0.85,
        facts={"package": "transformers"},
    )


def _is_own(view: View, trace: Traceback) -> bool:
    """Whether it is the program's own failure, and no other entry's."""
    if view.is_victim(trace) or _NCCL.search(f"{trace.event.text}"):
        return False
    return not any(_owned_elsewhere(view, event) for event in view.near(trace))


def _owned_elsewhere(view: View, event: LogEvent) -> bool:
    return (
        event.cause is not None
        and judgement_of(event.cause).explains_exceptions
        and event.kind in ("error", "death")
        and not view.is_quiet(event)
    )


def _without_header(view: View) -> list[LogEvent]:
    """Last lines of tracebacks whose heads are lost."""
    covered = {(trace.event.source, trace.event.line) for trace in view.facts.tracebacks}
    covered |= {
        (one.event.source, one.event.line) for trace in view.facts.tracebacks for one in trace.earlier
    }
    covered |= {(one.source, one.line) for one in view.facts.events if _owned_elsewhere(view, one)}
    events = []
    for event in view.facts.of("exception"):
        parts = exception_of(_after_label(event.text))
        if (
            (event.source, event.line) in covered
            or parts is None
            or parts[0] in WRAPPERS
            or parts[0] in ("Error", "Exception")
        ):
            continue
        if not view.is_victims(event) and not _NCCL.search(event.text) and not view.survived(event):
            events.append(event)
    return events


def _after_label(text: str) -> str:
    return re.sub(r"^(?:\[rank\d{1,6}\]: ?|\([^)]{1,120}\) ?|\d{1,5}: )+", "", split_prefix(text)[1])


def _finding(view: View, traces: list[Traceback], confidence: float) -> Hypothesis:
    traces = sorted(
        traces,
        key=lambda trace: (
            trace.event.time is None,
            trace.event.time or 0.0,
            trace.event.source,
            trace.event.order,
        ),
    )
    first = traces[0]
    same = [trace for trace in traces if (trace.type, trace.user_frame) == (first.type, first.user_frame)]
    ranks = culprits(view, [trace.event for trace in same])
    where = first.user_frame or first.frame
    source = f"rank {ranks[0]} raised" if len(ranks) == 1 else "the program raised"
    why = f"{source} {first.type}: {first.message.splitlines()[0] if first.message.strip() else ''}".rstrip(
        " :"
    )
    hosts = {trace.event.who.host for trace in same}
    host = first.event.who.host if len(hosts) == 1 else None
    return Hypothesis(
        cause="user_code_error",
        why=why + (f", in {where}" if where else ""),
        evidence=tuple(trace.event for trace in same[:4]),
        ranks=ranks,
        hosts=(host,) if host and not ranks and len(view.facts.hosts) > 1 else (),
        confidence=confidence,
        facts={
            "exception": first.type,
            "message": first.message.splitlines()[0] if first.message else "",
            "frame": where,
            "file": first.user_file,
            "line": str(first.user_line or ""),
            "handled": ", ".join(one.type for one in first.earlier),
            "functions": " ".join(first.functions[-6:]),
        },
        step=view.facts.step,
    )


def _from_lines(view: View, lines: list[LogEvent]) -> Hypothesis:
    first = lines[0]
    parts = exception_of(_after_label(first.text)) or ("", "")
    ranks = culprits(view, [event for event in lines if event.text == first.text] or [first])
    return Hypothesis(
        cause="user_code_error",
        why=f"{parts[0]}: {parts[1]}".rstrip(" :"),
        evidence=tuple(lines[:4]),
        ranks=ranks,
        confidence=0.6,
        facts={"exception": parts[0], "message": parts[1]},
        missing=("the traceback above it",),
        step=view.facts.step,
    )


def find_finished(view: View) -> list[Hypothesis]:
    """The finding for a run whose work was done."""
    end = _end_of_work(view)
    if end is None:
        return find_destroyed_twice(view) or _crash_of_all_done(view) or _all_done(view)
    after = [
        event
        for event in view.facts.events
        if event.kind in ("error", "death") and _is_after(view, event, end) and not view.is_reported(event)
    ]
    twice = find_destroyed_twice(view)
    if twice:
        return twice
    crash = _crash_at_exit(view, end)
    if crash:
        return [crash]
    weak = end.signature == "trainer_finished" and not _STRONG.search(end.text)
    broke = [one for one in view.failing_exits if _is_after(view, one.event, end) and one.code > 0]
    broke_traces = [trace for trace in view.tracebacks if _is_after(view, trace.event, end)]
    if weak and view.distributed and (broke or broke_traces):
        return []  # one rank was done, and others were not
    serious = [event for event in after if event.cause or event.signature in ("exception", "traceback")]
    real = [event for event in serious if not view.is_victims(event) and not view.is_quiet(event)]
    if _STRONG.search(end.text) and not broke and not view.facts.of("srun_exit"):
        real = [
            event
            for event in real
            if ("slurmstepd" not in event.text or "DUE TO" in event.text) and event.signature not in _KERNELS
        ]
    return [] if real else [_healthy(view, end)]


def find_destroyed_twice(view: View) -> list[Hypothesis]:
    """The process group was destroyed twice, after training."""
    destroys = [trace for trace in view.facts.tracebacks if _is_destroy(trace)]
    lines = view.facts.of("group_is_none")
    if not destroys and not lines:
        return []
    began = min([*(trace.began for trace in destroys), *(event.order for event in lines)])
    source = (destroys[0].event if destroys else lines[0]).source
    done = [event for event in view.finishes if event.source != source or event.order < began]
    if not done and not _all_steps(view) and not _done_lines(view) and not _only_destroyed(view, destroys):
        return []
    evidence = (*lines[:2], *(trace.event for trace in destroys[:2]), *done[:1])
    why = "training was done; then the process group was destroyed a second time"
    return [Hypothesis("process_group_destroyed_twice", why, evidence, confidence=0.95)]


def _only_destroyed(view: View, destroys: list[Traceback]) -> bool:
    """Whether steps were made, and nothing but the second end of the group failed."""
    others = [trace for trace in view.tracebacks if trace not in destroys and not view.is_victim(trace)]
    return bool(destroys and view.progress and not others)


def find_nan(view: View) -> list[Hypothesis]:
    """The loss became NaN and stayed NaN."""
    lines = [
        event
        for event in view.facts.events
        if event.cause == "nan_loss" and event.kind in ("error", "death") and not view.is_skipped(event)
    ]
    rows = [event for event in view.facts.of("log_row") if event.fields.get("loss")]
    if not lines:
        return []
    rows_nan = [event for event in lines if event.signature == "loss_is_nan" and _is_row(event)]
    words = [event for event in lines if event not in rows_nan]
    if rows_nan and not words:
        healthy_after = [
            row
            for row in rows
            if row.source == rows_nan[-1].source
            and row.order > rows_nan[-1].order
            and not _NAN.search(row.text)
        ]
        if healthy_after or (len(rows_nan) == 1 and rows and not _NAN.search(rows[-1].text)):
            return []
    if words and not rows_nan and all(view.survived(event) or view.is_quiet(event) for event in words):
        return []
    evidence = (*(words or rows_nan)[:3], *(rows_nan[:2] if words else ()))
    step = rows_nan[0] if rows_nan else words[0]
    nan_ranks = {event.number("rank") for event in view.facts.of("nan_of_rank")}
    ranks = tuple(rank for rank in nan_ranks if rank is not None) if len(nan_ranks) == 1 else ()
    return [
        Hypothesis(
            "nan_loss",
            "the loss or its gradient is NaN, and training continued or ended with it",
            evidence,
            ranks,
            confidence=0.95,
            step=step.number("step"),
        )
    ]


def _is_row(event: LogEvent) -> bool:
    return "returned nan" not in event.text and "contains either" not in event.text


def _end_of_work(view: View) -> LogEvent | None:
    """The last line that says that the work is done."""
    return max(
        view.finishes,
        key=lambda event: (
            event.order if len(view.facts.sources) == 1 else 0,
            event.time or 0.0,
            event.order,
        ),
        default=None,
    )


def _done_lines(view: View) -> list[LogEvent]:
    """The lines with which every rank says that it is done; empty: not all do."""
    done = view.facts.of("rank_done")
    all_ranks = set(range(view.facts.world_size)) if view.facts.world_size else set(view.facts.ranks)
    return done if done and all_ranks and {event.number("rank") for event in done} >= all_ranks else []


def _is_after(view: View, event: LogEvent, end: LogEvent) -> bool:
    finishes = [one.order for one in view.finishes if one.source == event.source]
    if finishes:
        return event.order > max(finishes)
    if event.time is not None and end.time is not None:
        return event.time > end.time
    return True


def _crash_of_all_done(view: View) -> list[Hypothesis]:
    """Every rank said that it was done, and then one aborted."""
    done = _done_lines(view)
    crash = _crash_at_exit(view, min(done, key=lambda event: event.order)) if done else None
    return [crash] if crash else []


def _all_done(view: View) -> list[Hypothesis]:
    """Every rank says that it is done, or the last step was made, and nothing failed."""
    bad = [
        event
        for event in view.facts.events
        if event.kind in ("error", "death")
        and not view.survived(event)
        and not view.is_quiet(event)
        and not view.is_reported(event)
        and not view.is_skipped(event)
    ]
    if bad or view.failing_exits or view.tracebacks:
        return []
    ended, started = view.facts.of("deepspeed_done"), view.facts.of("spawned")
    if ended and len(ended) >= len(started) and not view.consequences:
        why = "every process that the launcher started ended successfully"
        return [Hypothesis("healthy", why, (ended[-1],), confidence=0.9)]
    done = _done_lines(view)
    if done:
        return [
            Hypothesis(
                "healthy", "every rank reports its end, and nothing failed", (done[-1],), confidence=0.85
            )
        ]
    if _all_steps(view) and not view.consequences:
        last = [event for event in view.progress if event.number("step") == view.facts.step]
        return [
            Hypothesis(
                "healthy",
                f"the last of {view.facts.steps} steps was made, and nothing failed",
                tuple(last[-1:]),
                confidence=0.7,
            )
        ]
    return []


def _crash_at_exit(view: View, end: LogEvent) -> Hypothesis | None:
    """A process that aborted after its work was done."""
    aborts = [
        event
        for event in view.facts.of(
            "terminate", "fatal_python", "torchrun_killed", "torchrun_aborted", "kernel_segfault", "teardown"
        )
        if _is_after(view, event, end)
    ]
    aborted = [one for one in view.failing_exits if _is_after(view, one.event, end) and one.code < 0]
    if not aborts and not aborted:
        return None
    errors = [
        trace for trace in view.tracebacks if _is_after(view, trace.event, end) and not view.is_victim(trace)
    ]
    if errors or any(event.cause == "host_oom_killed" for event in view.facts.events):
        return None
    evidence = (*aborts[:2], *(one.event for one in aborted[:2]), end)
    return Hypothesis(
        "teardown_crash",
        "all work was done; then a process aborted while exiting",
        evidence,
        confidence=0.85,
    )


def _all_steps(view: View) -> bool:
    facts = view.facts
    return facts.steps is not None and facts.step is not None and facts.step >= facts.steps > 0


def _is_destroy(trace: Traceback) -> bool:
    text = f"{trace.type}: {trace.message}"
    last = trace.functions[-1] if trace.functions else ""
    return "destroy_process_group" in trace.functions and (
        bool(_TWICE.search(text)) or (trace.type == "AssertionError" and last == "destroy_process_group")
    )


def _healthy(view: View, end: LogEvent) -> Hypothesis:
    warned = [event for event in view.facts.events if event.kind in ("error", "death", "consequence")]
    more = f"; {len(warned)} alarming lines were not fatal" if warned else ""
    return Hypothesis("healthy", f"the run finished{more}", (end,), confidence=0.95)

"""Exceptions of the program: what no other entry of the catalogue owns, raised by a rank that was no victim."""

import re
from dataclasses import replace

from unisono.diagnose.event import Event
from unisono.diagnose.facts import Traceback
from unisono.diagnose.finding import Finding
from unisono.diagnose.identity import split_prefix
from unisono.diagnose.rules.owned import culprits
from unisono.diagnose.rules.view import WRAPPERS, View, ranks_of
from unisono.diagnose.tracebacks import exception_of

NOT_OWNERS = frozenset({
    "user_code_error", "rank_stalled", "rank_died_first", "device_unbound_barrier", "teardown_crash", "preempted_sigterm", "unequal_steps", "nproc_mismatch", "single_device_nccl", "straggler",
})  # fmt: skip
"""Pointed to by lines that explain no exception."""
_NCCL = re.compile(r"NCCL error in|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError|HCCL|c10d::|torch\.distributed\.Dist\w+Error")  # fmt: skip
_BLAMED_ON = re.compile(r"^(?:CUDA error: (?:unspecified launch failure|an illegal memory access|misaligned address|an illegal instruction|device-side assert)|CUDA error: unknown)")  # fmt: skip


_COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier",
    "monitored_barrier", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "wait", "init_process_group", "rendezvous", "sync_global_devices", "wait_for_everyone", "synchronize",
})  # fmt: skip
"""Functions in which ranks meet: what is raised in them is mostly another's fault."""


def find_user_errors(view: View) -> list[Finding]:
    """One finding for the program's own exceptions, if there are any."""
    own = [trace for trace in view.tracebacks if _is_own(view, trace)]
    lone = [] if own else _without_header(view)
    alive = [trace for trace in own if not view.survived(trace.event)]
    late = [trace for trace in alive if _is_unknown_model(trace)]
    if late:
        return [_unknown_model(late)]
    threads = [trace for trace in view.facts.tracebacks if trace.threaded and not view.is_victim(trace) and not view.survived(trace.event)]  # fmt: skip
    if not own and not lone and threads and (view.consequences or view.failing_exits):
        return [_of_thread(view, threads)]
    if not alive and not lone and (refused := _refused_start(view)):
        return refused
    if not alive and not lone:
        return [_finding(view, own, 0.4)] if own and view.failing_exits else []
    if not alive:
        return [_from_lines(view, lone)]
    meets = all(trace.type in ("RuntimeError", "TimeoutError", "XlaRuntimeError") and {*trace.functions[-1:]} & _COLLECTIVES for trace in alive)  # fmt: skip
    return [_finding(view, alive, 0.6 if meets else 0.9)]


def _refused_start(view: View) -> list[Finding]:
    """A program that did not take its arguments: it says so without a traceback."""
    said = [event for event in view.facts.of("usage_error") if not view.survived(event)]
    if not said:
        return []
    words = _after_label(said[0].text)
    return [Finding("user_code_error", f"the program did not accept how it was called: {words[:160]}", tuple(said[:4]), culprits(view, said) if len(ranks_of(said)) == 1 else (), confidence=0.85, facts={"exception": "", "message": words})]  # fmt: skip


def _of_thread(view: View, traces: list[Traceback]) -> Finding:
    """A thread of the program ended, and the rank that it belonged to did not come any more."""
    found = _finding(view, traces, 0.75)
    first = traces[0]
    ranks = (first.event.rank,) if first.event.rank is not None else view.silent()
    who = f"rank {ranks[0]}" if ranks else "the program"
    return replace(found, ranks=ranks, why=f"a thread of {who} ended with {first.type}: {first.message.splitlines()[0] if first.message else ''}; then its rank stood still")  # fmt: skip


def _is_unknown_model(trace: Traceback) -> bool:
    """A model type that transformers of this version have no entry for; newer ones say so in words."""
    return trace.type == "KeyError" and "configuration_auto.py" in trace.frame


def _unknown_model(traces: list[Traceback]) -> Finding:
    kind = traces[0].message.strip("'\"")
    return Finding("version_mismatch", f"the installed transformers know no model type {kind}: they are older than the model", tuple(trace.event for trace in traces[:3]), confidence=0.85, facts={"package": "transformers"})  # fmt: skip


def _is_own(view: View, trace: Traceback) -> bool:
    """Whether it is the program's own failure, and no other entry's."""
    if view.is_victim(trace) or _NCCL.search(f"{trace.event.text}"):
        return False
    return not any(_owned_elsewhere(view, event) for event in view.near(trace))


def _owned_elsewhere(view: View, event: Event) -> bool:
    return (
        event.cause is not None
        and event.cause not in NOT_OWNERS
        and event.kind in ("error", "death")
        and not view.is_quiet(event)
    )  # fmt: skip


def _without_header(view: View) -> list[Event]:
    """Last lines of tracebacks whose heads are lost."""
    covered = {(trace.event.source, trace.event.line) for trace in view.facts.tracebacks}
    covered |= {(one.event.source, one.event.line) for trace in view.facts.tracebacks for one in trace.earlier}  # fmt: skip
    found = []
    for event in view.facts.of("exception"):
        parts = exception_of(_after_label(event.text))
        if (
            (event.source, event.line) in covered
            or parts is None
            or parts[0] in WRAPPERS
            or parts[0] in ("Error", "Exception")
        ):
            continue
        owned = any(one.line == event.line and one.source == event.source and _owned_elsewhere(view, one) for one in view.facts.events)  # fmt: skip
        if not owned and not view.is_victims(event) and not _NCCL.search(event.text) and not view.survived(event):  # fmt: skip
            found.append(event)
    return found


def _after_label(text: str) -> str:
    return re.sub(r"^(?:\[rank\d{1,6}\]: ?|\([^)]{1,120}\) ?|\d{1,5}: )+", "", split_prefix(text)[1])


def _finding(view: View, traces: list[Traceback], confidence: float) -> Finding:
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
    whose = f"rank {ranks[0]} raised" if len(ranks) == 1 else "the program raised"
    why = f"{whose} {first.type}: {first.message.splitlines()[0] if first.message.strip() else ''}".rstrip(" :")  # fmt: skip
    return Finding(
        cause="user_code_error",
        why=why + (f", in {where}" if where else ""),
        evidence=tuple(trace.event for trace in same[:4]),
        ranks=ranks,
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


def _from_lines(view: View, lines: list[Event]) -> Finding:
    first = lines[0]
    parts = exception_of(_after_label(first.text)) or ("", "")
    ranks = culprits(view, [event for event in lines if event.text == first.text] or [first])
    return Finding(
        cause="user_code_error",
        why=f"{parts[0]}: {parts[1]}".rstrip(" :"),
        evidence=tuple(lines[:4]),
        ranks=ranks,
        confidence=0.6,
        facts={"exception": parts[0], "message": parts[1]},
        missing=("the traceback above it",),
        step=view.facts.step,
    )

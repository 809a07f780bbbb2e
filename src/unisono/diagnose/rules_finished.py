"""Runs that finished: healthy, or with an error only during teardown; and NaN losses."""

import re

from unisono.diagnose.run_facts import Event, Hypothesis, Traceback, View

_NAN = re.compile(r"\bnan\b|returned nan|inf`", re.IGNORECASE)
_STRONG = re.compile(r"train_runtime|train metrics|Do not forget to share")
"""Words that the whole run says, and not one rank in a program of its own."""
_KERNELS = frozenset({"kernel_out_of_memory", "kernel_segfault"})
"""Words of kernels, of whatever ran on the host at whatever time; once all is done they are not about this run."""
_TWICE = re.compile(
    r"Process group cannot be None|assert pg is not None|Invalid process group specified|process group has already been destroyed|Default process group has not been initialized"
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
    found = [trace for trace in view.facts.tracebacks if _is_destroy(trace)]
    lines = view.facts.of("group_is_none")
    if not found and not lines:
        return []
    began = min([*(trace.began for trace in found), *(event.order for event in lines)])
    source = (found[0].event if found else lines[0]).source
    done = [event for event in view.finishes if event.source != source or event.order < began]
    if not done and not _all_steps(view) and not _done_lines(view) and not _only_destroyed(view, found):
        return []
    evidence = (*lines[:2], *(trace.event for trace in found[:2]), *done[:1])
    why = "training was done; then the process group was destroyed a second time"
    return [Hypothesis("process_group_destroyed_twice", why, evidence, confidence=0.95)]


def _only_destroyed(view: View, found: list[Traceback]) -> bool:
    """Whether steps were made, and nothing but the second end of the group failed."""
    others = [trace for trace in view.tracebacks if trace not in found and not view.is_victim(trace)]
    return bool(found and view.progress and not others)


def find_nan(view: View) -> list[Hypothesis]:
    """The loss became NaN and stayed NaN."""
    lines = [
        event for event in view.facts.events if event.cause == "nan_loss" and event.kind in ("error", "death")
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
    own = {event.number("rank") for event in view.facts.of("nan_of_rank")}
    ranks = tuple(rank for rank in own if rank is not None) if len(own) == 1 else ()
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


def _is_row(event: Event) -> bool:
    return "returned nan" not in event.text and "contains either" not in event.text


def _end_of_work(view: View) -> Event | None:
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


def _done_lines(view: View) -> list[Event]:
    """The lines with which every rank says that it is done; empty: not all do."""
    done = view.facts.of("rank_done")
    all_ranks = set(range(view.facts.world_size)) if view.facts.world_size else set(view.facts.ranks)
    return done if done and all_ranks and {event.number("rank") for event in done} >= all_ranks else []


def _is_after(view: View, event: Event, end: Event) -> bool:
    own = [one.order for one in view.finishes if one.source == event.source]
    if own:
        return event.order > max(own)
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


def _crash_at_exit(view: View, end: Event) -> Hypothesis | None:
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


def _healthy(view: View, end: Event) -> Hypothesis:
    warned = [event for event in view.facts.events if event.kind in ("error", "death", "consequence")]
    more = f"; {len(warned)} alarming lines were not fatal" if warned else ""
    return Hypothesis("healthy", f"the run finished{more}", (end,), confidence=0.95)

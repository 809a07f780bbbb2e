"""Which rank caused a stall: a pure function of what is known of all ranks.

The rules, in order. A rank that is stopped, or whose interpreter does not run, is the culprit.
Otherwise it is a rank without progress that does not wait for others; of several such ranks, those
whose stack or flight recorder shows that they wait are victims. Otherwise all ranks without
progress are in collectives: then those that are behind, or in a different collective, are the
culprits (see mismatch); if all are in the same one, the network is. A rank is reported and a run is
stopped after different times: see pace.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from unisono.base.causes import Evidence, Verdict
from unisono.guard.watch import PHASES, phase_named
from unisono.guard.watch.rl_activities import rl_activity
from unisono.guard.watch.verdicts import Limits, Patience, describe_activity, labels, mismatch, verdict
from unisono.guard.watch.views import Beat, Look, RankView, RunView, Suspicion

_MOVES_S = 1.0  # no rule needs less; usually all ranks have beaten since, which is checked first
_STOPPED_S = 3.0
_GIL_S = 3.0
_FROZEN = ("__refrigerator", "do_freezer_trap")  # of control groups, version 1 and 2
_SILENT_S = 3.0
_LAST_WORD_S = 2.0
_WAITS_IN_TORCH = ("torch/distributed/", "torch/_C/_distributed")
_IN_A_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3|/unisono/guard/integrations/|<frozen "
)
_WAITING_FRAMES = 4
_LOOK_S = 1.5
_WAITED_S = 3.0
_STILL_S = 3.0
_INTERPRETER_S = 10.0
_BUSY_GPU_PERCENT = 95
_IDLE_S = 30.0
_IDLE_STEPS = 20  # times a mean step
_IDLE_AT_START_S = 600.0
_LOADER = "torch/utils/data/dataloader.py"
_LOADS_A_BATCH = "torch/utils/data/_utils/fetch.py"
_STARTS_A_WORKER = re.compile(r"/multiprocessing/process\.py:\d+ in _bootstrap$")
_WORKER_LINES = 3
_LONG_COLLECTIVE_S = 30.0  # of a foreign program, which may send a whole model in one


def judge(run_view: RunView, patience: Patience) -> Suspicion | Verdict | None:
    """The problem of a run at this moment; None while it makes progress.

    A Verdict stops the run; a Suspicion does not. Ranks with progress are never judged, and ranks
    that wait for others are never blamed.
    """
    if all(view.idle_s <= _MOVES_S for view in run_view.views.values()):
        return None
    run_view = replace(run_view, views=dict(sorted(run_view.views.items())))
    # A rank that has reported its result can lose nothing: a slow exit is not a problem of the run.
    alive = [
        view
        for view in run_view.views.values()
        if view.beat is not None and not view.has_ended and not view.reported_result
    ]
    if not alive:
        return None
    return (
        _stopped(run_view, alive)
        or _left_early(run_view, alive)
        or _interpreter_stalled(run_view, alive, patience)
        or _does_not_come(run_view, alive, patience)
        or _still_complete(run_view, alive, patience)
        or _apart_in_collectives(run_view, alive, patience)
        or _together_in_a_collective(run_view, alive, patience)
        or _idle_everywhere(run_view, alive, patience)
        or _may_all_wait(run_view, alive, patience)
    )


def _stopped(run_view: RunView, alive: Sequence[RankView]) -> Suspicion | Verdict | None:
    stopped = [view for view in alive if _is_stopped(view) and view.idle_s > 1.0]
    if not stopped:
        return None
    since_s = min(view.idle_s for view in stopped)
    ranks = [view.rank for view in stopped]
    how = "state T" if stopped[0].process.state == "T" else "its control group is frozen"
    summary = (
        f"{labels(run_view, ranks)} {'is' if len(ranks) == 1 else 'are'} stopped ({how}),"
        f" {describe_activity(stopped[0])}, for {since_s:.0f} s"
    )
    named = verdict("rank_stopped", summary, run_view, ranks=ranks, since_s=since_s)
    if since_s >= _STOPPED_S:
        return named
    return Suspicion(named, since_s, is_named=False, ends_in_s=_STOPPED_S - since_s, to_inspect=tuple(ranks))


def _is_stopped(view: RankView) -> bool:
    return view.process.state == "T" or view.process.waits_in in _FROZEN


def _left_early(run_view: RunView, alive: Sequence[RankView]) -> Verdict | None:
    """A rank has reported its result while others are in a step."""
    stuck = [view for view in alive if _waits(view, run_view) and view.idle_s > _LAST_WORD_S]
    early = [
        view.rank
        for view in run_view.views.values()
        if view.reported_result and not _participated(view, stuck)
    ]
    if not early or len(stuck) < len(alive):
        return None
    since_s = min(view.idle_s for view in stuck)
    summary = f"{labels(run_view, early)} left before the others, who wait {describe_activity(stuck[0])}"
    return verdict("unequal_steps", summary, run_view, ranks=early, since_s=since_s)


def _participated(left: RankView, stuck: Sequence[RankView]) -> bool:
    """Whether a rank that has left took part in the collectives of those that wait: its data is
    still being sent over a slow network.

    Known only for our own ranks, whose collectives are all counted.
    """
    beats = [view.beat for view in (left, *stuck) if view.beat is not None and not view.beat.is_foreign]
    return len(beats) == 1 + len(stuck) and beats[0].comm >= max(beat.comm for beat in beats)


def _interpreter_stalled(
    run_view: RunView, alive: Sequence[RankView], patience: Patience
) -> Suspicion | Verdict | None:
    """The second thread of a rank is silent, too: native code holds the GIL, or the process gets no
    CPU.
    """
    stalled = [
        view
        for view in alive
        if min(view.pulse_idle_s, view.idle_s) >= _GIL_S
        and view.process.state not in ("T", "t", "Z", "")
        and _may_be_named(view, alive, run_view)
    ]
    if not stalled:
        return None
    view = max(stalled, key=lambda v: v.pulse_idle_s)
    if view.process.state == "D":
        return _graded(
            "io_blocked",
            f"does not run: it waits in the kernel ({view.process.waits_in or 'state D'})",
            run_view,
            view,
            patience,
        )
    what = "does not run any Python thread: native code holds the interpreter's lock"
    return _graded("gil_held", what, run_view, view, patience)


def _does_not_come(
    run_view: RunView, alive: Sequence[RankView], patience: Patience
) -> Suspicion | Verdict | None:
    """A rank that does not wait for others has made no progress for too long."""
    late = [
        v
        for v in alive
        if not _waits(v, run_view)
        and v.idle_s >= _limits(v, patience).suspect_s
        and _may_be_named(v, alive, run_view)
    ]
    if not late:
        return None
    # A rank that made progress during most of a silence that stops the run did not cause it.
    ends_s = max((v.idle_s for v in late if v.idle_s >= _limits(v, patience).act_s), default=0.0)
    late = [v for v in late if v.idle_s >= ends_s / 2]
    view = min(late, key=lambda v: (_position(v, run_view), -v.idle_s))
    cause, how = _how_it_is_late(view)
    graded = _graded(cause, how, run_view, view, patience)
    if not isinstance(graded, Suspicion):
        return graded
    # A foreign rank is reported with its line, and with the collective of a rank that waits for it;
    # until then it is delayed.
    is_ours = view.beat is not None and not view.beat.is_foreign
    unseen = tuple(v.rank for v in late if not _is_seen(v, run_view))
    if not is_ours:
        others = (run_view.views[rank] for rank in graded.to_inspect if rank != view.rank)
        unseen += tuple(other.rank for other in others if not _is_seen(other, run_view))
    if not unseen:
        return graded
    # Only stacks show which of several ranks waits for the others; a missing stack does not delay
    # the report forever.
    is_certain = (len(late) == 1 and is_ours) or graded.since_s > _limits(view, patience).name_s + _LOOK_S
    return replace(graded, is_named=graded.is_named and is_certain, to_inspect=(*graded.to_inspect, *unseen))


def _may_be_named(view: RankView, alive: Sequence[RankView], run_view: RunView) -> bool:
    """Whether silence is evidence against it: always for our own ranks, else only if it certainly
    blocks others.
    """
    if view.beat is None or not view.beat.is_foreign:
        return True
    if len(run_view.views) > 1 and _nobody_is_left_to_wait(alive):
        return True
    return _holds_up_others(view, [other for other in alive if other is not view and _waits(other, run_view)])


def _holds_up_others(view: RankView, waiting: Sequence[RankView]) -> bool:
    """Whether a rank of a foreign program certainly stalls while others wait for it.

    Args:
        view: of the rank, which does not wait itself.
    """
    assert view.beat is not None
    if all(other.idle_s < _WAITED_S for other in waiting):
        return False
    if view.pulse_idle_s >= _INTERPRETER_S:  # then its CPU use is not measured, either
        return True
    return view.beat.still_s >= _STILL_S


def _nobody_is_left_to_wait(views: Sequence[RankView]) -> bool:
    """Whether all ranks of a foreign program without a result sleep, and their interpreters do not
    run.

    Then no rank waits for them in a collective, and they will not exit either, e.g. if a process
    group is destroyed and waits for its own thread, which needs the GIL. Native code that computes
    does not sleep.

    Args:
        views: of those ranks; of more than one rank that the program has.
    """
    return all(view.pulse_idle_s >= _INTERPRETER_S and view.process.state == "S" for view in views)


def _how_it_is_late(view: RankView) -> tuple[str, str]:
    """Cause and description of a rank that does not return, by its phase and its process."""
    process = view.process
    if process.reads_input:
        return "waits_for_input", "waits for input from the terminal or stdin"
    if process.state == "D":
        where = f" ({process.waits_in})" if process.waits_in else ""
        return "io_blocked", f"waits for storage in the kernel{where}"
    if view.beat is not None and view.beat.phase == "data":
        dead = "; a process that loads data is dead" if "Z" in process.children else ""
        return "data_starved", f"waits for its data{dead}"
    # As seen on an H100: the rank spins in a copy from the device, in state R.
    if process.gpu_percent is not None and process.gpu_percent >= _BUSY_GPU_PERCENT:
        return "user_code_stuck", f"waits for a GPU that is at {process.gpu_percent} %, and does not return"
    if process.state == "R":
        return "user_code_stuck", "is busy, and does not return"
    return "user_code_stuck", "sleeps or waits, and does not return"


def _apart_in_collectives(
    run_view: RunView, alive: Sequence[RankView], patience: Patience
) -> Verdict | Suspicion | None:
    """All ranks without progress wait for others, but not in the same collective."""
    stuck = [view for view in alive if _waits(view, run_view)]
    if len(stuck) < 2 or len(stuck) < len(alive):
        return None
    limits, since_s = _limits_of_all(stuck, patience), min(view.idle_s for view in stuck)
    if since_s < limits.suspect_s:
        return None
    named = mismatch(run_view, stuck)
    if named is None or _network_has_problems(run_view):
        return None
    unseen = tuple(view.rank for view in stuck if view.rank not in run_view.looks)
    spare_s = _LOOK_S if unseen else 0.0
    if since_s >= limits.apart_s + spare_s:
        return named
    # Before the second step a stack can be older than the collective that the rank is in by now.
    is_first = limits.apart_s > limits.name_s
    is_named = since_s >= limits.name_s + spare_s if is_first else not unseen
    to_inspect = tuple(view.rank for view in stuck) if is_first else unseen
    return Suspicion(
        named, since_s, is_named=is_named, ends_in_s=limits.apart_s - since_s, to_inspect=to_inspect
    )


def _still_complete(run_view: RunView, alive: Sequence[RankView], patience: Patience) -> Suspicion | None:
    """Collectives of sharded weights, between which there is no heartbeat, have completed between
    two inspections: the ranks are inspected again.
    """
    if not any(run_view.looks[view.rank].has_moved for view in alive if view.rank in run_view.looks):
        return None
    limits, since_s = _limits_of_all(alive, patience), min(view.idle_s for view in alive)
    if not limits.suspect_s <= since_s < limits.act_s or not all(_waits(v, run_view) for v in alive):
        return None
    return _to_inspect(run_view, alive, since_s, is_quiet=limits.apart_s > limits.name_s)


def _to_inspect(run_view: RunView, alive: Sequence[RankView], since_s: float, *, is_quiet: bool) -> Suspicion:
    """All ranks are silent, and only their stacks show whether they stall."""
    ranks = [view.rank for view in alive]
    summary = f"{labels(run_view, ranks)} are silent, {describe_activity(alive[0])}, for {since_s:.0f} s"
    unsure = verdict("rank_stalled", summary, run_view, ranks=ranks, since_s=since_s)
    return Suspicion(
        unsure, since_s, is_named=False, ends_in_s=None, to_inspect=tuple(ranks), is_quiet=is_quiet
    )


def _network_has_problems(run_view: RunView) -> bool:
    """Then ranks may be in different collectives without a fault: a rank that has sent its last
    piece of one continues, whether or not it arrives.
    """
    return any(node.links or node.silent_s >= _SILENT_S for node in run_view.nodes.values())


def _together_in_a_collective(
    run_view: RunView, alive: Sequence[RankView], patience: Patience
) -> Suspicion | Verdict | None:
    """All ranks are in collectives, usually in the same one, which does not complete: something
    between them fails.
    """
    stuck = [view for view in alive if _waits(view, run_view)]
    if not stuck or len(stuck) < len(alive):
        return None
    limits, since_s = _limits_of_all(stuck, patience), min(view.idle_s for view in stuck)
    if since_s < limits.suspect_s:
        return None
    is_foreign = any(view.beat is not None and view.beat.is_foreign for view in stuck)
    ended = {rank for rank, view in run_view.views.items() if view.has_ended and not view.reported_result}
    if ended and not is_foreign:
        return None  # they wait for a rank that is exiting, and its own error is the cause
    first = max(stuck, key=lambda view: view.idle_s)
    silent = [node for node in run_view.nodes.values() if node.silent_s >= _SILENT_S]
    links = [
        Evidence(where=f"node {n.node_rank} ({n.host})", text=link)
        for n in run_view.nodes.values()
        for link in n.links
    ]
    if silent:
        names = ", ".join(f"node {node.node_rank} ({node.host})" for node in silent)
        summary = f"all reachable ranks wait {describe_activity(first)}, and nothing is received from {names}"
        named = verdict(
            "node_unreachable",
            summary,
            run_view,
            ranks=(),
            hosts=[n.host for n in silent],
            since_s=since_s,
            evidence=links,
        )
    elif links:
        summary = (
            f"all ranks wait ({describe_activity(first)}), and what they send does not arrive:"
            f" {links[0].text}"
        )
        named = verdict("node_unreachable", summary, run_view, ranks=(), since_s=since_s, evidence=links)
    else:
        summary = (
            f"all {'remaining ' if ended else ''}ranks wait {describe_activity(first)}, which does not end;"
            " NCCL_DEBUG=INFO (--debug-comm) would show which rank or connection is silent"
        )
        named = verdict("rank_stalled", summary, run_view, ranks=(), since_s=since_s, confidence=0.5)
    name_s = max(limits.name_s, _LONG_COLLECTIVE_S) if is_foreign else limits.name_s
    to_inspect = [view.rank for view in stuck if not is_foreign or not _is_seen(view, run_view)]
    return _by_time(named, since_s, name_s, limits.act_s, to_inspect=to_inspect)


def _idle_everywhere(
    run_view: RunView, alive: Sequence[RankView], patience: Patience
) -> Suspicion | Verdict | None:
    """No rank of a foreign program uses a processor or GPU, reads, writes, or waits in a
    collective.

    A program that compiles, downloads, evaluates or saves does one of these, or waits for a process
    of its own that does.
    """
    beats = [view.beat for view in alive if view.beat is not None and view.beat.is_foreign]
    if len(beats) < len(alive) or any(_waits(view, run_view) or view.process.gpu_percent for view in alive):
        return None
    since_s = min(*(view.idle_s for view in alive), *(beat.still_s for beat in beats))
    limit_s = max(map(_idle_limit_s, beats))
    if since_s < limit_s:
        return None
    ranks = [view.rank for view in alive]
    lines = _lines_of(alive, run_view)
    summary = f"no rank computes, reads, writes or waits in a collective, for {since_s:.0f} s: {lines}"
    named = verdict(_why_idle(alive, run_view), summary, run_view, ranks=ranks, since_s=since_s)
    ends_in_s = None if patience.idle_limit_s is None else patience.idle_limit_s - since_s
    if ends_in_s is not None and ends_in_s <= 0:
        return named
    is_named = since_s >= limit_s + _LOOK_S or all(_is_seen(view, run_view) for view in alive)
    return Suspicion(named, since_s, is_named=is_named, ends_in_s=ends_in_s, to_inspect=tuple(ranks))


def _may_all_wait(run_view: RunView, alive: Sequence[RankView], patience: Patience) -> Suspicion | None:
    """Before the second step only their stacks can show that all of our own ranks wait in
    collectives, and none of them compiles or computes.
    """
    beats = [v.beat for v in alive if v.beat is not None and not v.beat.is_foreign and _is_joined(v.beat)]
    if not len(run_view.views) == len(alive) == len(beats) > 1:
        return None
    limits, since_s = _limits_of_all(alive, patience), min(view.idle_s for view in alive)
    if not limits.suspect_s <= since_s < limits.act_s or limits.apart_s == limits.name_s:
        return None
    return _to_inspect(run_view, alive, since_s, is_quiet=True)


def _idle_limit_s(beat: Beat) -> float:
    """How long a foreign rank may be idle.

    Before its first step it may wait for a scheduler, a license or another job.
    """
    if beat.step <= 1:
        return _IDLE_AT_START_S
    return max(_IDLE_S, _IDLE_STEPS * beat.times.total_s / max(1, beat.times.count))


def _lines_of(alive: Sequence[RankView], run_view: RunView) -> str:
    """Where the ranks are, those in the same line together."""
    at: dict[str, list[int]] = {}
    for view in alive:
        at.setdefault(_top(view, run_view).removeprefix(", ") or "in an unknown line", []).append(view.rank)
    return "; ".join(f"{labels(run_view, ranks)} {line}" for line, ranks in at.items())


def _why_idle(alive: Sequence[RankView], run_view: RunView) -> str:
    """The cause, by the stacks of idle ranks."""
    if any(view.process.reads_input for view in alive):
        return "waits_for_input"
    looks = [look for view in alive if (look := run_view.looks.get(view.rank)) is not None and look.stack]
    if looks and all(any(_LOADER in frame for frame in look.stack) for look in looks):
        return "data_starved"
    return "user_code_stuck"


def _graded(
    cause: str, what: str, run_view: RunView, view: RankView, patience: Patience
) -> Suspicion | Verdict | None:
    """The result for one rank: suspected, reported or final, by how long it has been silent."""
    limits = _limits(view, patience)
    since_s = view.idle_s
    if since_s < limits.suspect_s:
        return None
    at = _top(view, run_view)
    summary = (
        f"{labels(run_view, [view.rank])} {what}; it has been {describe_activity(view)} for {since_s:.0f}"
        f" s{at}"
    )
    named = verdict(cause, summary, run_view, ranks=[view.rank], since_s=since_s)
    others = [
        v.rank
        for v in run_view.views.values()
        if v.rank != view.rank and not v.has_ended and _waits(v, run_view)
    ]
    return _by_time(named, since_s, limits.name_s, limits.act_s, to_inspect=[view.rank, *others[:1]])


def _by_time(
    named: Verdict, since_s: float, name_s: float, act_s: float, *, to_inspect: Sequence[int]
) -> Suspicion | Verdict:
    if since_s >= act_s:
        return named
    return Suspicion(
        named, since_s, is_named=since_s >= name_s, ends_in_s=act_s - since_s, to_inspect=tuple(to_inspect)
    )


def _limits(view: RankView, patience: Patience) -> Limits:
    assert view.beat is not None
    return patience.limits(view.beat)


def _limits_of_all(waiting: Sequence[RankView], patience: Patience) -> Limits:
    """Limits for ranks that all wait: those of the rank with the shortest waits so far.

    A rank also waits while a different rank evaluates or saves alone, however long that takes; the
    rank that arrives last never does. So the duration of a collective itself, with all ranks in it,
    is at most the shortest of their longest times.
    """
    beats = [view.beat for view in waiting if view.beat is not None]
    all_wait = all(_is_joined(beat) for beat in beats)
    return min((patience.limits(beat, all_wait=all_wait) for beat in beats), key=lambda limits: limits.name_s)


def _is_joined(beat: Beat) -> bool:
    """Whether a rank has joined the others; before that it may wait until they have started."""
    phase = PHASES[phase_named(beat.phase)]
    return phase.in_step or not phase.waits


def _waits(view: RankView, run_view: RunView) -> bool:
    """Whether a rank waits for others: by its phase, or by its stack, since sharded weights
    communicate inside forward and backward.
    """
    if view.waits:
        return True
    if view.beat is None or view.beat.is_foreign:
        return False
    look = run_view.looks.get(view.rank)
    if look is None or not _is_in_torch_distributed(look.stack):
        return False
    # Of ranks that all wait in the same kind of phase, one that has begun fewer collectives than
    # another is late, not waiting.
    return look.begun is None or look.completed is None or look.begun.number > look.completed


def _is_in_torch_distributed(stack: Sequence[str]) -> bool:
    return any(part in line for line in stack[:_WAITING_FRAMES] for part in _WAITS_IN_TORCH)


def _position(view: RankView, run_view: RunView) -> tuple[int, int, int]:
    """Progress of a rank: step, our collectives, the flight recorder's."""
    assert view.beat is not None
    look = run_view.looks.get(view.rank)
    number = look.begun.number if look is not None and look.begun is not None else 0
    return view.beat.step, view.beat.comm, number


def _is_seen(view: RankView, run_view: RunView) -> bool:
    """Whether the inspection of a rank has the required data: its stack, or for a foreign rank that
    waits, its collective.
    """
    look = run_view.looks.get(view.rank)
    if look is None:
        return False
    asks_collective = view.beat is not None and view.beat.is_foreign and _waits(view, run_view)
    return look.begun is not None if asks_collective else bool(look.stack)


def _top(view: RankView, run_view: RunView) -> str:
    """The innermost line of its stack, and that of the program itself if a library is in
    between.
    """
    look = run_view.looks.get(view.rank)
    if look is None or not look.stack:
        return ""
    top, is_foreign = look.stack[0], view.beat is not None and view.beat.is_foreign
    line = _line_of_program(look.stack) or top if is_foreign else top
    workers = _workers_of(look)
    activity = rl_activity(look.stack) if is_foreign else None
    at = f", at {top}" + (f", called from {line}" if line != top else "") + workers
    return f", {activity}{at}" if activity is not None else at


def _line_of_program(stack: Sequence[str]) -> str | None:
    """The innermost frame that is not a library's."""
    return next((frame for frame in stack if not _IN_A_LIBRARY.search(frame)), None)


def _workers_of(look: Look) -> str:
    """Where the worker processes are that have something to do; empty if none has."""
    lines = sorted({line for worker in look.workers if (line := _line_of_worker(worker.stack))})
    if not lines:
        return ""
    return (
        ", with worker processes at"
        f" {', '.join(lines[:_WORKER_LINES])}{' …' if len(lines) > _WORKER_LINES else ''}"
    )


def _line_of_worker(stack: Sequence[str]) -> str | None:
    """The line of the program that a worker process executes; None if it waits for its next
    task.

    What a forked process was called from is its parent's. A loader may read rows of a library's
    dataset.
    """
    inner = list(takewhile(lambda frame: not _STARTS_A_WORKER.search(frame), stack))
    has_task = any(_LOADS_A_BATCH in frame for frame in inner)
    return _line_of_program(inner) or (inner[0] if has_task else None)

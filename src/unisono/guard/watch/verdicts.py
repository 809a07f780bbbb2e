"""Verdicts on a running job: what, which ranks, since when, evidence, fix; and the times behind
them: how long a rank may go without progress, and which rank is slower than the others.

Pure, with the clock passed in.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.base.causes import MORE_PATIENCE, RESUMES, Evidence, Verdict, find_cause
from unisono.base.text import one_line, parse_seconds
from unisono.guard.watch import PHASES, phase_named
from unisono.guard.watch.views import Beat, Collective, Look, RankView, RunView

_SUSPECT_S = 3.0
_NAME_S = 4.5
_ACT_S = 30.0
_ACT_TIMES = 5.0
_SPARE_S = (2.5, 5.0)
_UNKNOWN_S = 600.0
_FIRST_WAIT_S = (20.0, 30.0)
_SEEN_IN_STEP = 4
_SEEN_ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of silence after which a rank is inspected, reported, and the run stopped; all equal
    if the phase's duration is unknown.

    Attributes:
        apart_s: after which the run is stopped if all ranks wait in different collectives.
    """

    suspect_s: float
    name_s: float
    act_s: float
    apart_s: float


@dataclass(frozen=True, slots=True)
class Patience:
    """The config's setting.

    Attributes:
        stall_after_s: silence after which a run is stopped; None: derived from observed durations.
        idle_limit_s: after so long a foreign program is stopped whose ranks are all idle; None:
            never.
    """

    stall_after_s: float | None = None
    idle_limit_s: float | None = None

    @classmethod
    def of(cls, stall_after: str, *, idle_limit_s: float | None = None) -> "Patience":
        """From `watch.stall_after`: a duration, or "auto"."""
        return cls(None if stall_after == "auto" else parse_seconds(stall_after), idle_limit_s)

    def limits(self, beat: Beat, *, all_wait: bool = False) -> Limits:
        """Limits for a rank in the phase of its heartbeat.

        The longest observed silence of the phase stands for its 99th percentile. A phase that has
        not been observed, as everything before the second step, has no known duration: its limit is
        ten minutes without progress. If all ranks wait in collectives, none of them computes or
        compiles, and they are reported before that.

        Args:
            beat: the rank's.
            all_wait: whether all ranks wait in collectives.
        """
        phase = PHASES[phase_named(beat.phase)]
        if beat.is_foreign:
            return self._of_foreign(beat)
        seen = beat.times.count >= (_SEEN_IN_STEP if phase.in_step else _SEEN_ELSEWHERE)
        if not seen:
            limit = self.stall_after_s or _UNKNOWN_S
            suspect, name = (min(limit, s) for s in (_FIRST_WAIT_S if all_wait else (limit, limit)))
            return Limits(suspect, name, limit, limit)
        longest = beat.times.longest_s
        low, high = _SPARE_S
        name = max(_NAME_S, longest + min(max(low, 2 * longest), high))
        act = self.stall_after_s or max(_ACT_S, _ACT_TIMES * longest)
        return Limits(min(name - 1.0, max(_SUSPECT_S, 1.5 * longest)), name, max(name, act), name)

    def _of_foreign(self, beat: Beat) -> Limits:
        """In a foreign program a phase recurs, but may also be an evaluation.

        A rank is reported early, since that requires more than silence (see judge), but the run is
        stopped only when torch's own timeout would.
        """
        name = max(_NAME_S, beat.times.longest_s + _SPARE_S[0])
        return Limits(_SUSPECT_S, name, max(name, self.stall_after_s or _UNKNOWN_S), name)


_STEPS = 5
_SECONDS = 10.0
_TIMES = 1.3
_AT_LEAST_S = 0.005  # per step: less is noise of the clock and the scheduler


@dataclass(frozen=True, slots=True)
class _Mark:
    now: float
    step: int
    data_s: float
    compute_s: float
    comm_s: float


@dataclass
class Pace:
    """Records how long each rank took for data, computing and collectives."""

    _first: dict[int, _Mark] = field(default_factory=dict)
    _last: dict[int, _Mark] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)
    _slow_once: int | None = None

    def note(self, views: Mapping[int, RankView], now: float) -> None:
        """Records the progress of the ranks; `now` in seconds of one clock."""
        for rank, view in views.items():
            if view.beat is None or view.has_ended:
                continue
            if rank not in self._last or view.beat.step > self._last[rank].step:
                self._last[rank] = _mark(view.beat, now)
                self._first.setdefault(rank, self._last[rank])

    def straggler(self, run_view: RunView) -> Verdict | None:
        """The rank whose own time per step is 1.3 times the median over at least 5 steps and 10 s,
        twice in a row; reported once.

        A rank's own time is that in data and computing. Of two ranks the faster one is the median.
        A single slow span happens to any rank on a busy machine.
        """
        spans = {
            rank: span
            for rank in self._last
            if (span := _span(self._first[rank], self._last[rank])) is not None
        }
        if len(spans) < 2 or len(spans) < len(run_view.places):
            return None
        self._first = dict(self._last)  # the next span begins where this one ends
        before, self._slow_once = self._slow_once, _slowest(spans)
        rank = self._slow_once
        if rank is None or rank != before or rank in self._reported:
            return None
        self._reported.add(rank)
        return _straggler_verdict(run_view, spans, rank)


def _slowest(spans: Mapping[int, _Mark]) -> int | None:
    """The rank that is slower than the others by more than noise; None if there is none."""
    seconds_of = {rank: _own_s(span) for rank, span in spans.items()}
    middle = statistics.median_low(seconds_of.values())
    rank = max(seconds_of, key=lambda r: seconds_of[r])
    return rank if seconds_of[rank] >= _TIMES * middle and seconds_of[rank] - middle >= _AT_LEAST_S else None


def _own_s(span: _Mark) -> float:
    return span.data_s + span.compute_s


def _mark(beat: Beat, now: float) -> _Mark:
    data, compute, comm, _ = beat.shares_s
    return _Mark(now, beat.step, data, compute, comm)


def _span(first: _Mark, last: _Mark) -> _Mark | None:
    """Seconds per step between two marks, if they are far enough apart.

    `step` is the number of steps, `now` the total seconds.
    """
    steps = last.step - first.step
    if steps < _STEPS or last.now - first.now < _SECONDS:
        return None
    return _Mark(
        last.now - first.now,
        steps,
        (last.data_s - first.data_s) / steps,
        (last.compute_s - first.compute_s) / steps,
        (last.comm_s - first.comm_s) / steps,
    )


def _straggler_verdict(run_view: RunView, spans: Mapping[int, _Mark], rank: int) -> Verdict:
    step_s, middle = _own_s(spans[rank]), statistics.median_low(_own_s(span) for span in spans.values())
    shares = {
        name: (
            getattr(spans[rank], name) - statistics.median_low(getattr(span, name) for span in spans.values())
        )
        for name in ("data_s", "compute_s")
    }
    phase = "data" if shares["data_s"] > shares["compute_s"] else "computing"
    place = run_view.places[rank]
    summary = (
        f"{place.label} takes {step_s * 1000:.0f} ms per step, and the median rank {middle * 1000:.0f} ms, over"
        f" {spans[rank].step} steps; it loses the time in {phase}, and the others wait for it"
    )
    evidence = [
        Evidence(
            where=run_view.places[r].label,
            text=(
                f"a step: data {s.data_s * 1000:.1f} ms, computing {s.compute_s * 1000:.1f} ms, collectives"
                f" {s.comm_s * 1000:.1f} ms"
            ),
        )
        for r, s in sorted(spans.items())
    ]
    return verdict(
        "straggler",
        summary,
        run_view,
        ranks=[rank],
        since_s=spans[rank].now,
        evidence=evidence[:8],
        severity="warning",
    )


_STACK_LINES = 6
_MOST_WAITING = 4
_OWN_RUN_FIXES = {
    "rank_stopped": (
        (
            "Find out who stopped it: Ctrl-Z in a terminal, a debugger, a scheduler that suspends jobs, a"
            " paused container."
        ),
        RESUMES,
    ),
    "rank_stalled": (
        MORE_PATIENCE,
        "--debug-comm makes NCCL log what it waits for.",
        "Look at the network between the hosts, and, with GPUs, at `dmesg` and `nvidia-smi` on each of them.",
    ),
}
"""Fixes for our own runs, instead of those in the catalogue for any program."""
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "Z": "has ended",
    "t": "is held by a debugger",
}


def verdict(
    cause: str,
    summary: str,
    run_view: RunView,
    *,
    ranks: Sequence[int],
    since_s: float,
    evidence: Iterable[Evidence] = (),
    confidence: float = 1.0,
    severity: str = "fatal",
    hosts: Sequence[str] = (),
) -> Verdict:
    """A verdict on some ranks, with evidence of them and of those that wait for them.

    Args:
        summary: one line.
        since_s: seconds since it began.
        evidence: in addition to that of every rank.
        confidence: 0 to 1.
        severity: as in Verdict.
        hosts: culprits, if they are nodes and not ranks.
    """
    entry = find_cause(cause)
    views = [run_view.views[rank] for rank in ranks if rank in run_view.views]
    beats = [view.beat for view in views if view.beat is not None]
    look_evidence = [
        *evidence,
        *(item for view in views for item in rank_evidence(view, run_view)),
        *waiting_evidence(run_view, ranks),
    ]
    return Verdict.model_validate(
        {
            "cause": cause,
            "when": "during",
            "severity": severity,
            "summary": summary,
            "ranks": tuple(ranks),
            "hosts": tuple(hosts) or tuple(dict.fromkeys(run_view.places[rank].host for rank in ranks)),
            "phase": beats[0].phase if beats else None,
            "step": (beats[0].step or None) if beats else None,
            "evidence": tuple(look_evidence),
            "fix": tuple(_OWN_RUN_FIXES.get(cause) or (entry.remedy if entry else ())),
            "confidence": confidence,
            "named_after_s": since_s,
        }
    )


def describe_activity(view: RankView) -> str:
    """The activity of a rank, for people: "in forward and backward of step 12"."""
    beat = view.beat
    if beat is None:
        return "starting"
    text = PHASES[phase_named(beat.phase)].text
    if beat.phase == "comm":
        size = f" of {beat.elements} elements" if beat.elements else ""
        text = f"in collective {beat.comm}, {beat.kind}{size}"
    at = f" of step {beat.step}" if PHASES[phase_named(beat.phase)].in_step and beat.step else ""
    far = f", {beat.done} of {beat.total} done" if beat.total else ""
    return f"{text}{at}{far}"


def rank_evidence(view: RankView, run_view: RunView) -> list[Evidence]:
    """Evidence of one rank: its phase, its process, its stack, its last collective."""
    where = run_view.places[view.rank].label
    process = view.process
    state = (
        f"state {process.state} ({_STATES.get(process.state, 'see ps(1)')})"
        if process.state
        else "no process"
    )
    waits = f" in {process.waits_in}" if process.waits_in else ""
    text = f"{describe_activity(view)}; no progress for {view.idle_s:.1f} s; {state}{waits}"
    text += (
        f"; its second thread has been silent for {view.pulse_idle_s:.1f} s" if view.pulse_idle_s > 1 else ""
    )
    text += f"; its GPU is at {process.gpu_percent} %" if process.gpu_percent is not None else ""
    text += f"; its child processes are in state {', '.join(process.children)}" if process.children else ""
    evidence = [Evidence(where=where, text=text)]
    look = run_view.looks.get(view.rank)
    if look is not None:
        evidence += _inspection_evidence(look, where)
    return evidence


def waiting_evidence(run_view: RunView, culprits: Sequence[int]) -> list[Evidence]:
    """Evidence of the ranks that wait for the culprits."""
    evidence = []
    for rank, view in sorted(run_view.views.items()):
        if rank in culprits or view.beat is None or view.has_ended:
            continue
        begun = run_view.looks[rank].begun if rank in run_view.looks else None
        recorder = f" (flight recorder: {begun})" if begun is not None else ""
        evidence.append(
            Evidence(
                where=run_view.places[rank].label,
                text=(
                    f"{'waits, ' if view.waits else ''}{describe_activity(view)}, for {view.idle_s:.1f}"
                    f" s{recorder}"
                ),
            )
        )
    more = len(evidence) - _MOST_WAITING
    omitted = [Evidence(where=f"{more} more ranks", text="wait, too")] if more > 0 else []
    return [*evidence[:_MOST_WAITING], *omitted]


def _inspection_evidence(look: Look, where: str) -> list[Evidence]:
    evidence = [
        Evidence(where=f"{where}, stack", text=one_line(line, limit=200))
        for line in look.stack[:_STACK_LINES]
    ]
    if not look.stack and look.how:
        evidence.append(Evidence(where=f"{where}, stack", text=f"none: {one_line(look.how, limit=200)}"))
    if look.begun is not None:
        evidence.append(
            Evidence(
                where=f"{where}, flight recorder",
                text=f"in {look.begun}; last completed: #{look.completed}",
            )
        )
    if look.note:
        evidence.append(Evidence(where=where, text=one_line(look.note, limit=200)))
    return evidence


def labels(run_view: RunView, ranks: Sequence[int]) -> str:
    """Labels of the ranks: "rank 1, node 0 (a)", or for several "ranks 1, 3 and 5"."""
    places = [run_view.places[rank] for rank in ranks]
    if len(places) == 1:
        return places[0].label
    numbers = [str(place.rank) for place in places]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


_UNKNOWN = ""
"""For a collective that is not known."""


# ---- ranks in different collectives


def mismatch(run_view: RunView, views: Sequence[RankView]) -> Verdict | None:
    """The verdict on ranks whose last collectives differ, including ranks that failed in them; None
    if they match.
    """
    steps = Counter(view.beat.step for view in views if view.beat is not None)
    since_s = max((view.idle_s for view in views), default=0.0)
    if len(steps) > 1 and not _in_one_collective(run_view, views):
        most = max(steps)
        behind = [v.rank for v in views if v.beat is not None and v.beat.step < most]
        ahead = [v.rank for v in views if v.beat is not None and v.beat.step == most]
        at = ", ".join(f"{step}" for step in sorted(steps)[:-1])
        summary = (
            f"{labels(run_view, behind)} made fewer steps: step {at} was the last, and"
            f" {labels(run_view, ahead)} continued to step {most}"
        )
        return verdict("unequal_steps", summary, run_view, ranks=behind, since_s=since_s)
    beats = {view.rank: view.beat for view in views if view.beat is not None and view.beat.is_foreign}
    if left_the_loop(list(beats.values())):
        return _left_the_loop(run_view, beats, since_s)
    if len(beats) == len(views) and (out_of_loop := _out_of_their_loop(run_view, beats, since_s)) is not None:
        return out_of_loop
    kinds: dict[str, list[int]] = {}
    for view in views:
        kinds.setdefault(_collective(view, run_view), []).append(view.rank)
    if len(kinds) < 2 or _UNKNOWN in kinds:
        return None
    groups = sorted(kinds.items(), key=lambda item: (len(item[1]), item[1]))
    odd = groups[0][1] if len(groups[0][1]) < len(groups[1][1]) else []
    described = "; ".join(f"{labels(run_view, ranks)}: {kind}" for kind, ranks in groups)
    summary = f"ranks are in different collectives: {described}"
    evidence = [Evidence(where=labels(run_view, ranks), text=kind) for kind, ranks in groups]
    return verdict("collective_mismatch", summary, run_view, ranks=odd, since_s=since_s, evidence=evidence)


def _in_one_collective(run_view: RunView, views: Sequence[RankView]) -> bool:
    """Whether ranks of a foreign program wait in the same collective; then different step counts do
    not matter.
    """
    if not all(view.beat is not None and view.beat.is_foreign for view in views):
        return False
    looks = [run_view.looks.get(view.rank) for view in views]
    begun = {alike(look.begun) if look is not None and look.begun is not None else _UNKNOWN for look in looks}
    return len(begun) == 1 and _UNKNOWN not in begun


def _left_the_loop(run_view: RunView, beats: Mapping[int, Beat], since_s: float) -> Verdict | None:
    """The verdict on ranks that have not read a batch for the step of the others, if they are in a
    different collective.
    """
    begun = {
        alike(look.begun)
        for rank in beats
        if (look := run_view.looks.get(rank)) is not None and look.begun is not None
    }
    if len(begun) < 2:
        return None
    behind = [rank for rank, beat in beats.items() if not beat.micro]
    ahead = [rank for rank, beat in beats.items() if beat.micro]
    step = beats[ahead[0]].step
    summary = (
        f"{labels(run_view, behind)} made fewer steps: step {step - 1} was the last, and"
        f" {labels(run_view, ahead)} continued to step {step}"
    )
    return verdict("unequal_steps", summary, run_view, ranks=behind, since_s=since_s)


def _out_of_their_loop(run_view: RunView, beats: Mapping[int, Beat], since_s: float) -> Verdict | None:
    """The verdict on ranks that cannot make another step while others can, which are in a recurring
    collective.
    """
    looks = {rank: look for rank in beats if (look := run_view.looks.get(rank)) is not None}
    behind = [rank for rank, look in looks.items() if look.may_step is False]
    ahead = [rank for rank, look in looks.items() if look.may_step and look.recurs]
    if not behind or not ahead or len(behind) + len(ahead) < len(beats):
        return None
    begun = {rank: alike(look.begun) for rank, look in looks.items() if look.begun is not None}
    if len(begun) < len(beats) or {begun[rank] for rank in behind} & {begun[rank] for rank in ahead}:
        return None
    last = max(beats[rank].step for rank in behind) - 1
    are, its = ("is", "its loop") if len(ahead) == 1 else ("are", "theirs")
    summary = (
        f"{labels(run_view, behind)} made fewer steps: step {last} was the last, and the loop is over there;"
        f" {labels(run_view, ahead)} {are} still in {its}"
    )
    ways = {True: "its loop has had that before", False: "nothing leads back from there to its steps"}
    evidence = [
        Evidence(where=labels(run_view, [rank]), text=f"{begun[rank]}; {ways[rank in ahead]}")
        for rank in beats
    ]
    return verdict("unequal_steps", summary, run_view, ranks=behind, since_s=since_s, evidence=evidence)


def _collective(view: RankView, run_view: RunView) -> str:
    """The collective that a rank is in, with equal text for equal ones.

    The flight recorder also has torch's own.
    """
    assert view.beat is not None
    look = run_view.looks.get(view.rank)
    if look is not None and look.begun is not None:
        return alike(look.begun) if view.beat.is_foreign else str(look.begun)
    if view.beat.is_foreign:
        return _UNKNOWN
    return f"collective {view.beat.comm}, {view.beat.kind} of {view.beat.elements} elements"


_EQUALLY_SIZED = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")


def alike(begun: Collective) -> str:
    """Text of a collective; ranks with different texts cannot be in the same one.

    Some kinds allow different sizes.
    """
    sizes = f" {begun.sizes}" if begun.name in _EQUALLY_SIZED else ""
    return f"{begun.name} #{begun.number}{sizes}"


def left_the_loop(beats: Sequence[Beat]) -> bool:
    """Whether, of ranks with equal step counts, some have read a batch for the next step and others
    have not: those have left the loop.

    Without a loader of torch no rank reads a batch, and the result is False.
    """
    return any(beat.micro for beat in beats) and not all(beat.micro for beat in beats)

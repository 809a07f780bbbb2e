"""Times of phases and steps: how long a rank may go without progress, and which rank is slower than the others. Pure, with the clock passed in."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.causes import Evidence, Verdict
from unisono.text import parse_seconds
from unisono.watch.beat import PHASES, phase_named
from unisono.watch.verdicts import verdict
from unisono.watch.views import Beat, RankView, RunView

_SUSPECT_S = 3.0
_NAME_S = 4.5
_ACT_S = 30.0
_ACT_TIMES = 5.0
_SPARE_S = (2.5, 5.0)
_UNKNOWN_S = 600.0
_SEEN_IN_STEP = 4
_SEEN_ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of silence after which a rank is inspected, reported, and the run stopped; all equal if the phase's duration is unknown."""

    suspect_s: float
    name_s: float
    act_s: float


@dataclass(frozen=True, slots=True)
class Patience:
    """The config's setting.

    Attributes:
        stall_after_s: silence after which a run is stopped; None: derived from observed durations.
    """

    stall_after_s: float | None = None

    @classmethod
    def of(cls, stall_after: str) -> "Patience":
        """From `watch.stall_after`: a duration, or "auto"."""
        return cls(None if stall_after == "auto" else parse_seconds(stall_after))

    def limits(self, beat: Beat) -> Limits:
        """Limits for a rank in the phase of its heartbeat.

        The longest observed silence of the phase stands for its 99th percentile. A phase that has not been observed, as everything before
        the second step, has no known duration: its limit is ten minutes without progress.
        """
        phase = PHASES[phase_named(beat.phase)]
        if beat.is_foreign:
            return self._of_foreign(beat)
        seen = beat.times.count >= (_SEEN_IN_STEP if phase.in_step else _SEEN_ELSEWHERE)
        if not seen:
            limit = self.stall_after_s or _UNKNOWN_S
            return Limits(limit, limit, limit)
        longest = beat.times.longest_s
        low, high = _SPARE_S
        name = max(_NAME_S, longest + min(max(low, 2 * longest), high))
        act = self.stall_after_s or max(_ACT_S, _ACT_TIMES * longest)
        return Limits(min(name - 1.0, max(_SUSPECT_S, 1.5 * longest)), name, max(name, act))

    def _of_foreign(self, beat: Beat) -> Limits:
        """In a foreign program a phase recurs, but may also be an evaluation.

        A rank is reported early, since that requires more than silence (see judge), but the run is stopped only when torch's own timeout would.
        """
        name = max(_NAME_S, beat.times.longest_s + _SPARE_S[0])
        return Limits(_SUSPECT_S, name, max(name, self.stall_after_s or _UNKNOWN_S))


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
        """The rank whose own time per step is 1.3 times the median over at least 5 steps and 10 s, twice in a row; reported once.

        A rank's own time is that in data and computing. Of two ranks the faster one is the median. A single slow span happens to any rank
        on a busy machine.
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
    own = {rank: _own_s(span) for rank, span in spans.items()}
    middle = statistics.median_low(own.values())
    rank = max(own, key=lambda r: own[r])
    return rank if own[rank] >= _TIMES * middle and own[rank] - middle >= _AT_LEAST_S else None


def _own_s(span: _Mark) -> float:
    return span.data_s + span.compute_s


def _mark(beat: Beat, now: float) -> _Mark:
    data, compute, comm, _ = beat.shares_s
    return _Mark(now, beat.step, data, compute, comm)


def _span(first: _Mark, last: _Mark) -> _Mark | None:
    """Seconds per step between two marks, if they are far enough apart. `step` is the number of steps, `now` the total seconds."""
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
    own, middle = _own_s(spans[rank]), statistics.median_low(_own_s(span) for span in spans.values())
    shares = {
        name: getattr(spans[rank], name)
        - statistics.median_low(getattr(span, name) for span in spans.values())
        for name in ("data_s", "compute_s")
    }
    phase = "data" if shares["data_s"] > shares["compute_s"] else "computing"
    place = run_view.places[rank]
    summary = (
        f"{place.label} takes {own * 1000:.0f} ms per step, and the median rank {middle * 1000:.0f} ms, over {spans[rank].step} steps;"
        f" it loses the time in {phase}, and the others wait for it"
    )
    evidence = [
        Evidence(
            where=run_view.places[r].label,
            text=f"a step: data {s.data_s * 1000:.1f} ms, computing {s.compute_s * 1000:.1f} ms, collectives {s.comm_s * 1000:.1f} ms",
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

"""How long a rank may go without a sign of progress, from what the run has shown. Seconds; pure."""

from dataclasses import dataclass

from unisono.units import parse_seconds
from unisono.watch.phases import PHASES, phase_named
from unisono.watch.record import Beat

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
    """From which silence on a rank is looked at, is named, and is ended; all three the same where its phase has no known length."""

    suspect_s: float
    name_s: float
    act_s: float


@dataclass(frozen=True, slots=True)
class Patience:
    """The config's word on it.

    Attributes:
        stall_after_s: silence after which a run is ended; None: learnt from the run.
    """

    stall_after_s: float | None = None

    @classmethod
    def of(cls, stall_after: str) -> "Patience":
        """From `watch.stall_after`: a duration, or "auto"."""
        return cls(None if stall_after == "auto" else parse_seconds(stall_after))

    def limits(self, beat: Beat) -> Limits:
        """For a rank in the phase that its beat tells.

        The longest silence that the phase has shown stands for its 99th percentile. A phase that has not been seen yet, as everything before
        the second step, has no known length: it is given ten minutes, and time in which its progress grows is no silence.
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
        """In somebody else's program a phase comes back until one day it is an evaluation.

        Naming is quick, for it takes more than silence (see unisono.watch.foreign), and the end for silence comes when torch's own would.
        """
        name = max(_NAME_S, beat.times.longest_s + _SPARE_S[0])
        return Limits(_SUSPECT_S, name, max(name, self.stall_after_s or _UNKNOWN_S))

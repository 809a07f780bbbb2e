"""What is known of a rank at one moment, as plain values that travel from its node to the head."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from unisono.watch.phases import PHASES, phase_named
from unisono.watch.record import Beat, PhaseTimes


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What the system says of a rank's process.

    Attributes:
        state: of its main thread, as ps(1) has it: R, S, D, T, Z; an empty string where it is gone or not told.
        waits_in: the kernel's function that the main thread waits in, or an empty string.
        cpu_s: CPU seconds of all its threads so far.
        children: states of the processes that it has started, as loaders are: one letter each.
        gpu_percent: how busy its device is; None without one.
    """

    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    children: str = ""
    gpu_percent: int | None = None


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank, as its node's front sees it.

    Attributes:
        rank: which.
        node_rank: its node.
        beat: its record; None before its first.
        idle_s: seconds for which the main thread has not beaten, by the clock of the front; time in which that was stopped itself is none.
        pulse_idle_s: the same of its second thread.
        process: what the system says.
        has_ended: its process is gone, or about to be: it has refused or crashed.
        told_result: it has handed over its result.
    """

    rank: int
    node_rank: int
    beat: Beat | None
    idle_s: float
    pulse_idle_s: float
    process: ProcessView
    has_ended: bool = False
    told_result: bool = False

    @property
    def waits(self) -> bool:
        """Whether its beat says that it waits for others: by its phase; of somebody else's program, which has few, by what it has begun.

        That is a collective that is not done, also one that nobody called from Python, as in DDP's backward.
        """
        if self.beat is None:
            return False
        return PHASES[phase_named(self.beat.phase)].waits or (self.beat.is_foreign and self.beat.pending > 0)

    def to_json(self) -> dict[str, Any]:
        """For the way to the head."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads what to_json gave.

        Raises:
            KeyError, TypeError, ValueError: if it is no such object.
        """
        beat = value["beat"]
        if beat is not None:
            beat = Beat(**{
                **beat, "shares_s": tuple(float(share) for share in beat["shares_s"]), "times": PhaseTimes(**beat["times"]),
            })  # fmt: skip
        return cls(
            rank=int(value["rank"]), node_rank=int(value["node_rank"]), beat=beat, idle_s=float(value["idle_s"]),
            pulse_idle_s=float(value["pulse_idle_s"]), process=ProcessView(**value["process"]),
            has_ended=bool(value["has_ended"]), told_result=bool(value["told_result"]),
        )  # fmt: skip

"""What the judge says."""

from dataclasses import dataclass

from unisono.causes import Verdict


@dataclass(frozen=True)
class Suspicion:
    """Somebody does not move; the run goes on.

    Attributes:
        verdict: what it is, as far as is known. It ends nothing.
        since_s: how long.
        is_named: whether it is sure enough to be told with cause and rank; before, it is a line that something is looked at.
        ends_in_s: after how many seconds more without progress the run is ended; None where it is not ended for that.
        wanted: ranks to be looked at: their stacks and the flight recorder.
    """

    verdict: Verdict
    since_s: float
    is_named: bool
    ends_in_s: float | None
    wanted: tuple[int, ...] = ()

"""Who has started the fronts, and may know of a lost node what the head does not."""

from typing import Protocol

from unisono.causes import Verdict


class Witness(Protocol):
    """Whoever started the fronts."""

    def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
        """Why a node is gone, and how many seconds that word was waited for; None where there is none in bounded time."""

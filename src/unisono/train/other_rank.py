"""What ranks other than 0 say: what is theirs alone. What all ranks know, rank 0 says once."""

from typing import Any

from unisono.events import Reporter

_RANK_0 = frozenset({"eval", "sample", "checkpoint"})
_SHARED_WARNINGS = frozenset({"nan_step", "early_stop"})


class OtherRankReporter(Reporter):
    """A reporter that leaves out what rank 0 reports for all, and of a step says its number."""

    def __init__(self, inner: Reporter) -> None:
        super().__init__(None)
        self._inner = inner

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message, or nothing."""
        if kind in _RANK_0 or (kind == "warning" and fields.get("code") in _SHARED_WARNINGS):
            return
        if kind == "step":
            fields = {"step": fields["step"]}
        self._inner.send(kind, **fields)

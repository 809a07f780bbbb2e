"""Several runs in one log: the last one counts. A launcher's own restarts belong to one run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.diagnose.event import Event
from unisono.diagnose.scan import Scanned

_BEGINS = frozenset({"omp_banner", "lf_tasks", "launched", "deepspeed_cmd", "ray_began"})
_ENDS = frozenset({
    "table_first", "exit_line", "deepspeed_return", "trainer_finished", "lightning_finished", "worker_group_finished", "preempted", "srun_exit",
})  # fmt: skip
_OVERLAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """A run that came before the one that counts, in the same log.

    Attributes:
        source: the log.
        first: its first line; last: its last line.
    """

    source: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.source}:{self.first}-{self.last}"


def last_run(scanned: Sequence[Scanned]) -> tuple[list[Scanned], list[Earlier]]:
    """The logs cut down to the last run in each, and what was cut off."""
    kept, earlier = [], []
    for one in scanned:
        begins = _beginnings(one)
        for first, after in zip([_START, *begins], begins, strict=False):
            earlier.append(Earlier(one.name, first.line, max(first.line, after.line - 1)))
        kept.append(_from(one, begins[-1].order) if begins else one)
    return kept, earlier


_START = Event(source="", line=1, order=0, signature="line", kind="fact", cause=None, text="")


def _beginnings(one: Scanned) -> list[Event]:
    """The events with which a further run begins."""
    found: list[Event] = []
    begin, ended, restarts = 0, False, False
    for place, event in enumerate(one.events):
        if event.signature in _ENDS or _is_plain_end(event):
            ended, restarts = True, False
        elif event.signature == "worker_group_restarts":
            restarts = True
        elif event.signature in _BEGINS and ended and not restarts:
            if not _same_run(one.events[begin:place], one.events[place:]):
                found.append(event)
                begin = place
            ended = False
    return found


def _is_plain_end(event: Event) -> bool:
    """An exception that is no rank's: the launcher's, or that of a program with one rank."""
    return event.signature == "exception" and event.rank is None


def _same_run(before: list[Event], after: list[Event]) -> bool:
    """Whether two parts are logs of two nodes, one behind the other: other nodes, other ranks, or the same time."""
    for name, signature in (("node", "lf_nodes"), ("node", "deepspeed_nodes")):
        one, other = (
            {e.fields.get(name) for e in part if e.signature == signature} for part in (before, after)
        )
        if one and other:
            return not one & other
    one_ranks, other_ranks = (
        {e.fields["rank"] for e in part if e.signature in ("process_rank", "rank_of_world")}
        for part in (before, after)
    )
    if one_ranks and other_ranks:
        return not one_ranks & other_ranks
    began = next((e.time for e in after if e.time is not None), None)
    last = max((e.time for e in before if e.time is not None), default=None)
    return began is not None and last is not None and began < last - _OVERLAP_S


def _from(one: Scanned, order: int) -> Scanned:
    return replace(
        one,
        events=[event for event in one.events if event.order >= order],
        tracebacks=[trace for trace in one.tracebacks if trace.began >= order],
        head=[event for event in one.head if event.order >= order],
        tail=[event for event in one.tail if event.order >= order],
    )

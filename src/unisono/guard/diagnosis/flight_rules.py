"""Matches the flight recordings of several ranks: which ranks did not reach a collective, and which
called a different one.

Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.guard.diagnosis.flight_recording import FlightEntry, Recording
from unisono.guard.diagnosis.run_facts import Hypothesis, LogEvent, Origin

# fmt: off
SIZES_MATCH = frozenset(
    ["all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_barrier", "barrier", "broadcast",
     "_broadcast_oop", "reduce", "_reduce_oop", "all_gather", "_all_gather_base",
     "all_gather_into_tensor_coalesced", "ALLGATHER_coalesced", "all_gather_single", "reduce_scatter",
     "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "REDUCE_SCATTER_coalesced", "reduce_scatter_single"]
)
# fmt: on
"""Collectives to which all ranks bring as many elements; gather, scatter, all_to_all and the *_v
ones may differ.
"""
_WAITS = frozenset(
    ["rank_stalled", "rank_died_first", "collective_mismatch", "device_unbound_barrier", "rdzv_timeout"]
)
"""Causes of logs that show little more than a timeout."""
_MOST_SHOWN = 8
_Place = tuple[str, int]


def judge_recordings(recordings: Sequence[Recording]) -> list[Hypothesis]:
    """Hypotheses from all recordings of a run, the most likely first; empty if no rank waits."""
    run = _Run(tuple(recordings))
    if not run.waits:
        return []
    return run.mismatches() or run.absences() or run.undecided()


def with_recordings(findings: list[Hypothesis], recorded: list[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses of the logs with those of the recordings, which are more precise than
    watchdogs about who waited for whom.

    A cause that a log states stays first: an exception, a signal or a full disk come before the
    wait that they cause.
    """
    if not recorded:
        return findings
    first, best = findings[0], recorded[0]
    vague = first.cause == "undetermined" or (first.cause in _WAITS and best.confidence >= 0.5)
    same = first.cause == best.cause and not first.ranks
    return [*recorded, *findings] if vague or same else [first, *recorded, *findings[1:]]


@dataclass(frozen=True)
class _Run:
    all: tuple[Recording, ...]

    @cached_property
    def of_rank(self) -> dict[int, Recording]:
        """Recordings by rank; of two of the same rank the first."""
        recordings: dict[int, Recording] = {}
        for recording in self.all:
            if recording.rank is not None:
                recordings.setdefault(recording.rank, recording)
        return dict(sorted(recordings.items()))

    @cached_property
    def members(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each group, as recorded or by use; the default group has all."""
        ranks_of: dict[str, set[int]] = defaultdict(set)
        for rank, recording in self.of_rank.items():
            for group in recording.groups:
                ranks_of[group].add(rank)
                ranks_of[group].update(recording.members.get(group, ()))
        for group in ranks_of:
            if "default_pg" in group:
                ranks_of[group].update(self.of_rank)
        return {group: tuple(sorted(ranks)) for group, ranks in ranks_of.items()}

    @cached_property
    def waits(self) -> dict[_Place, list[int]]:
        """Ranks that wait, by group and number."""
        ranks_at: dict[_Place, list[int]] = defaultdict(list)
        for rank, recording in self.of_rank.items():
            for group, seq in recording.waits.items():
                ranks_at[group, seq].append(rank)
        return dict(sorted(ranks_at.items(), key=lambda item: (item[0][1], item[0][0])))

    def mismatches(self) -> list[Hypothesis]:
        """Ranks with different collectives at the same number of a group; the lowest such number
        counts.
        """
        for group, seq in self._compared():
            entries = {rank: entry for rank in self.members[group] if (entry := self.entry(rank, group, seq))}
            odd = _odd(entries)
            if odd is not None:
                return [self._mismatch(entries, odd)]
        return []

    def absences(self) -> list[Hypothesis]:
        """Ranks that others wait for, while they do not wait themselves."""
        absent = {place: self._absent(place) for place in self.waits}
        blocked = {rank for place, ranks in self.waits.items() if absent[place] for rank in ranks}
        missing = {rank for ranks in absent.values() for rank in ranks}
        if not missing:
            return []
        free = sorted(missing - blocked)
        if not free:
            return [self._circle(absent)]
        recorded = [rank for rank in free if rank in self.of_rank]
        unrecorded = [rank for rank in free if rank not in self.of_rank]
        return [
            *([self._did_not_come(recorded, absent)] if recorded else []),
            *([self._left_nothing(unrecorded, absent, alone=not recorded)] if unrecorded else []),
        ]

    def undecided(self) -> list[Hypothesis]:
        """Some ranks wait, and no absent rank is known."""
        place, ranks = next(iter(self.waits.items()))
        return [self._busy(place, ranks) or self._idle(place, ranks) or self._nobody(place, ranks)]

    def _busy(self, place: _Place, ranks: list[int]) -> Hypothesis | None:
        """All ranks have called it, and on a few GPUs it has not started.

        Only NCCL's recorder shows that.
        """
        entries = {rank: entry for rank in ranks if (entry := self.entry(rank, *place))}
        states = Counter(entry.state for entry in entries.values() if entry.backend == "nccl")
        if not states["started"] > states["scheduled"] > 0:
            return None
        late = sorted(rank for rank, entry in entries.items() if entry.state == "scheduled")
        why = (
            f"all ranks called {self._called(place)}, but on {_ranks(late)} the GPU has not begun it: the GPU"
            " still executes an earlier operation, or hangs in it"
        )
        return Hypothesis("rank_stalled", why, self._evidence(late, place), tuple(late), confidence=0.6)

    def _idle(self, place: _Place, ranks: list[int]) -> Hypothesis | None:
        """Ranks that do not wait while all others do; gloo does not record the members of a
        group.
        """
        idle = [rank for rank, recording in self.of_rank.items() if not recording.waits]
        if not idle:
            return None
        waits = list(self.waits.items())[:_MOST_SHOWN]
        listed = "; ".join(f"{_ranks(waiting)} in {self._called(at)}" for at, waiting in waits)
        why = f"others wait ({listed}); not waiting: {_ranks(idle)}"
        return Hypothesis(
            "rank_stalled", why, self._evidence([*ranks, *idle], place), tuple(idle), confidence=0.6
        )

    def _nobody(self, place: _Place, ranks: list[int]) -> Hypothesis:
        missing = [
            "NCCL's network log: NCCL_DEBUG=INFO in the next run; and the stacks of the ranks (py-spy dump)"
        ]
        if unknown := [recording.name for recording in self.all if recording.rank is None]:
            missing.append(f"the rank of {', '.join(unknown[:_MOST_SHOWN])}: its name has no number")
        if len(self.of_rank) < 2:
            missing.append(
                "the recordings of the other ranks: a single one shows which rank waits, not for which"
            )
        why = (
            f"{_ranks(ranks)} wait in {self._called(place)}, and the recordings show no rank that is late or"
            " elsewhere"
        )
        return Hypothesis(
            "undetermined", why, self._evidence(ranks, place), confidence=0.3, missing=tuple(missing)
        )

    def entry(self, rank: int, group: str, seq: int) -> FlightEntry | None:
        """The rank's entry at that number."""
        recording = self.of_rank.get(rank)
        return recording.entry(group, seq) if recording else None

    def _compared(self) -> list[_Place]:
        """The numbers that not all members have completed, in order."""
        places = []
        for group, ranks in self.members.items():
            recorded = [
                one.groups[group] for rank in ranks if (one := self.of_rank.get(rank)) and group in one.groups
            ]
            first = min(((one.completed or 0) for one in recorded), default=0) + 1
            last = max((one.enqueued for one in recorded), default=0)
            kept = {seq for one in self.of_rank.values() for name, seq in one.entries if name == group}
            places += [(group, seq) for seq in sorted(kept) if first <= seq <= last]
        return sorted(places, key=lambda place: (place[1], place[0]))

    def _absent(self, place: _Place) -> list[int]:
        group, seq = place
        absent = []
        for rank in self.members.get(group, ()):
            recording = self.of_rank.get(rank)
            far = recording.groups.get(group) if recording else None
            if far is None or far.enqueued < seq:
                absent.append(rank)
        return absent

    def _mismatch(self, entries: dict[int, FlightEntry], odd: list[int]) -> Hypothesis:
        one = next(iter(entries.values()))
        listed = ", ".join(f"rank {rank}: {entry}" for rank, entry in _shown(entries, odd))
        nobody = "" if odd else "; equally many ranks have each, so none can be blamed"
        why = (
            f"at number {one.seq} of group {one.group} the ranks are in different collectives"
            f" ({listed}){nobody}"
        )
        order = [*odd, *(rank for rank in entries if rank not in odd)]
        return Hypothesis(
            "collective_mismatch",
            why,
            self._evidence(order, (one.group, one.seq)),
            tuple(odd),
            confidence=0.95 if odd else 0.8,
        )

    def _did_not_come(self, ranks: list[int], absent: dict[_Place, list[int]]) -> Hypothesis:
        place = next(place for place, missing in absent.items() if set(missing) & set(ranks))
        late = [rank for rank in ranks if rank in absent[place]]
        last = "; ".join(
            f"rank {rank}'s last was {self._last(rank, place[0])}" for rank in late[:_MOST_SHOWN]
        )
        why = (
            f"{_ranks(self.waits[place])} wait in {self._called(place)}, which {_ranks(late)} did not reach:"
            f" {last}"
        )
        return Hypothesis(
            "rank_stalled",
            why,
            self._evidence([*late, *self.waits[place]], place),
            tuple(late),
            confidence=0.85,
        )

    def _left_nothing(self, ranks: list[int], absent: dict[_Place, list[int]], *, alone: bool) -> Hypothesis:
        place = next(place for place, missing in absent.items() if set(missing) & set(ranks))
        late = [rank for rank in ranks if rank in absent[place]]
        few = len(late) * 2 <= len(self.of_rank)
        why = (
            f"{_ranks(self.waits[place])} wait in {self._called(place)}, and there is no recording of"
            f" {_ranks(late)}"
        )
        missing = (f"the recordings and logs of {_ranks(late)}: a rank that exited leaves none",)
        if not (alone and few):
            return Hypothesis(
                "undetermined", why, self._evidence(self.waits[place], place), confidence=0.3, missing=missing
            )
        return Hypothesis(
            "rank_died_first",
            why,
            self._evidence(self.waits[place], place),
            tuple(late),
            confidence=0.5,
            missing=missing,
        )

    def _circle(self, absent: dict[_Place, list[int]]) -> Hypothesis:
        places = [place for place, missing in absent.items() if missing]
        listed = "; ".join(
            f"{_ranks(self.waits[place])} in {self._called(place)}" for place in places[:_MOST_SHOWN]
        )
        evidence = tuple(
            event for place in places[:_MOST_SHOWN] for event in self._evidence(self.waits[place][:1], place)
        )
        return Hypothesis(
            "collective_mismatch",
            f"ranks wait for each other in different groups: {listed}",
            evidence,
            confidence=0.85,
        )

    def _called(self, place: _Place) -> str:
        entry = next(
            (entry for rank in self.waits.get(place, ()) if (entry := self.entry(rank, *place))), None
        )
        return f"{entry or f'collective #{place[1]}'} of group {place[0]}"

    def _last(self, rank: int, group: str) -> str:
        recording = self.of_rank[rank]
        far = recording.groups.get(group)
        if far is None:
            return "none in this group"
        entry = recording.entry(group, far.enqueued)
        return f"{entry or f'#{far.enqueued}'}{f', called at {entry.place}' if entry and entry.place else ''}"

    def _evidence(self, ranks: Sequence[int], place: _Place) -> tuple[LogEvent, ...]:
        return tuple(self._event(rank, place) for rank in ranks[:_MOST_SHOWN] if rank in self.of_rank)

    def _event(self, rank: int, place: _Place) -> LogEvent:
        recording, (group, seq) = self.of_rank[rank], place
        entry = recording.entry(group, seq)
        text = (
            f"rank {rank}: {entry} of group {group}"
            if entry
            else f"rank {rank}: its last of group {group} was {self._last(rank, group)}"
        )
        if group not in recording.groups:
            text = f"rank {rank}: in no collective"
        elif entry:
            text += ", not completed" if (recording.waits.get(group) or seq + 1) <= seq else ", completed"
            text += f", called at {entry.place}" if entry.place else ""
        return LogEvent(
            recording.name,
            1,
            seq,
            "flight",
            "fact",
            None,
            text,
            Origin(rank=rank),
            entry.time if entry else None,
            {"seq": str(seq), "group": group},
        )


def _odd(entries: dict[int, FlightEntry]) -> list[int] | None:
    """The ranks that differ from the majority; empty if there is none; None if all are equal."""
    kinds = {rank: entry.kind for rank, entry in entries.items()}
    by_size = all(entry.kind in SIZES_MATCH for entry in entries.values())
    arguments = {rank: (entry.kind, _size(entry) if by_size else 0) for rank, entry in entries.items()}
    if len(set(kinds.values())) < 2 and len(set(arguments.values())) < 2:
        return None
    groups = Counter(arguments.values()).most_common()
    if len(groups) > 1 and groups[0][1] == groups[1][1]:
        return []
    return sorted(rank for rank, what in arguments.items() if what != groups[0][0])


def _size(entry: FlightEntry) -> int:
    return entry.outputs if "reduce_scatter" in entry.kind.lower() else entry.inputs


def _shown(entries: dict[int, FlightEntry], odd: list[int]) -> list[tuple[int, FlightEntry]]:
    return sorted(entries.items(), key=lambda item: (item[0] not in odd, item[0]))[:_MOST_SHOWN]


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "nobody"
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN])) + (" …" if len(ranks) > _MOST_SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

"""Ranks that waited in vain: who did not come, who came with something else, who had less to do."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping

from unisono.guard.diagnosis.run_facts import Hypothesis, LogEvent, TimedOutCollective, View, first_of_each

NEAR_END_SHARE = 0.97
NEAR_END_STEPS = 6
"""So close to an epoch's end a rank that does something else has most likely run out of batches."""
CLOSE_SEQ = 2
"""A rank in a different collective may have counted one or two more or less."""
FIRST_SEQ = 12
"""Sequence numbers of the collectives with which programs begin: barriers, broadcasts of shapes."""

WAITED = ("watchdog", "watchdog_timeout", "gloo_timeout", "store_wait", "monitored_barrier", "timed_out_work")
LOST = ("peer_closed", "store_lost", "nccl_peer_gone", "gloo_no_mesh", "ib_flushed")


def find_mismatches(view: View) -> list[Hypothesis]:
    """Two ranks in different collectives, as stated by the log."""
    prints = view.facts.of("fingerprint", "mismatch_detected")
    sizes = view.facts.of("gloo_sizes", "nccl_sizes")
    if not prints and not sizes:
        return []
    uneven = find_uneven(view, evidence=[*prints, *sizes])
    if uneven:
        return uneven
    if prints:
        odd = _odd_fingerprint(view.facts.of("fingerprint"))
        why = "two ranks are in different collectives" + (f"; rank {odd} differs" if odd is not None else "")
        return [
            Hypothesis(
                "collective_mismatch",
                why,
                first_of_each(sorted(prints, key=lambda e: e.signature != "mismatch_detected")),
                (odd,) if odd is not None else (),
                confidence=0.95,
            )
        ]
    return [
        Hypothesis(
            "collective_mismatch",
            "what one rank sent is not what the other expected: they are in different collectives",
            first_of_each(sizes),
            confidence=0.75,
            missing=_next_time(),
        )
    ]


def find_uneven(view: View, *, evidence: Iterable[LogEvent] = ()) -> list[Hypothesis]:
    """Ranks with fewer steps than the others."""
    waited = [event for event in view.facts.events if event.signature in (*WAITED, *LOST)]
    if not waited and not evidence:
        return []
    proofs = list(evidence) or waited[:4]
    lengths = lengths_of(view)
    if len(set(lengths.values())) > 1:
        odd = _odd(lengths)
        if odd is None and len(lengths) == 2 and view.facts.world_size in (None, 2):
            odd = min(lengths, key=lengths.__getitem__)  # of two, the one that runs out first
        lines = [event for event in view.facts.of("length", "rank_has") if _rank_of(event) in lengths]
        lines.sort(key=lambda event: _rank_of(event) != odd)
        counts = ", ".join(f"rank {rank}: {length}" for rank, length in sorted(lengths.items())[:8])
        return [
            Hypothesis(
                "unequal_steps",
                f"the ranks do not have the same amount of data ({counts})",
                (*lines[:6], *proofs[:3]),
                (odd,) if odd is not None else (),
                confidence=0.9,
                step=view.facts.step,
            )
        ]
    done = _finished_early(view)
    if done is not None:
        return [
            Hypothesis(
                "unequal_steps",
                f"rank {done.number('rank')} had finished its steps while others had not",
                (done, *proofs[:3]),
                (done.number("rank") or 0,),
                confidence=0.85,
                step=view.facts.step,
            )
        ]
    return []


def find_hang(view: View) -> list[Hypothesis]:
    """From what the watchdogs of several ranks say."""
    groups: dict[str, list[TimedOutCollective]] = defaultdict(list)
    for one in view.facts.collectives:
        if one.rank is not None:
            groups[one.group].append(one)
    if not groups:
        return _gloo(view)
    waiting = max(groups.values(), key=len)
    rules = (_reported_lag, _different, _behind, _absent, _one_continues, _undecided)
    return next((hypotheses for rule in rules if (hypotheses := rule(view, waiting))), [])


def first_collectives(view: View) -> bool:
    """Whether the wait was in the first collectives of all: nothing had worked before."""
    waits = [one for one in view.facts.collectives if one.seq is not None or one.completed is not None]
    if view.facts.step:
        return False
    if not waits:
        return bool(view.facts.of(*WAITED))
    return all((one.seq or 0) <= FIRST_SEQ and (one.completed or 0) <= FIRST_SEQ for one in waits)


def lengths_of(view: View) -> dict[int, int]:
    """How much data each rank says that it has, of the kind that most ranks tell of."""
    kinds: dict[str, dict[int, int]] = defaultdict(dict)
    for event in view.facts.of("length", "rank_has"):
        rank, length = _rank_of(event), (event.fields.get("length") or "").replace(",", "")
        if rank is not None and length.isdecimal():
            kind = "".join(letter for letter in event.text.split("=")[0].split(":")[-1] if letter.isalpha())
            kinds[kind if event.signature == "length" else "has"].setdefault(rank, int(length))
    several = [lengths for lengths in kinds.values() if len(lengths) > 1]
    different = [lengths for lengths in several if len(set(lengths.values())) > 1]
    return max(different or several, key=len, default={})


def near_end(view: View) -> bool:
    """Whether the last step that was shown is one of the last."""
    step, steps = view.facts.step, view.facts.steps
    return bool(
        step
        and steps
        and steps > 1
        and (step / steps >= NEAR_END_SHARE or steps - step <= NEAR_END_STEPS)
        and step > NEAR_END_STEPS
    )


def _reported_lag(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    """Torch's own report on ranks that are out of step."""
    lines = view.facts.of("lagging")
    if not lines:
        return []
    ranks = tuple(
        sorted({int(word) for event in lines for word in event.fields["ranks"].replace(",", " ").split()})
    )
    who = ", ".join(f"rank {rank}" for rank in ranks[:8])
    cause = "unequal_steps" if near_end(view) else "rank_stalled"
    return [
        Hypothesis(
            cause,
            f"{who} did not join the collective in which the others waited",
            (*lines[:2], *_lines(waiting)[:3]),
            ranks if len(ranks) == 1 else (),
            confidence=0.85,
            step=view.facts.step,
            missing=_next_time(),
        )
    ]


def _different(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    """Ranks wait in different collectives with one sequence number."""
    operations = {one.rank: (one.op, one.numel_in) for one in waiting if one.op and one.rank is not None}
    ops = Counter(op for op, _ in operations.values())
    seqs = [one.seq for one in waiting if one.seq is not None]
    same_seq = not seqs or max(seqs) - min(seqs) <= CLOSE_SEQ
    if (
        len(operations) < 2
        or not same_seq
        or (len(ops) < 2 and len({size for _, size in operations.values()}) < 2)
    ):
        return []
    odd = _odd(operations)
    evidence = _lines(waiting, first=odd)
    ranks = (odd,) if odd is not None else ()
    kinds = ", ".join(f"rank {rank}: {op} of {size}" for rank, (op, size) in sorted(operations.items())[:6])
    if near_end(view):
        return [
            Hypothesis(
                "unequal_steps",
                f"near the end of the data, the ranks are in different collectives ({kinds})",
                evidence,
                ranks,
                confidence=0.75,
                step=view.facts.step,
            )
        ]
    return [
        Hypothesis(
            "collective_mismatch",
            f"at the same place the ranks are in different collectives ({kinds})",
            evidence,
            ranks,
            confidence=0.85,
            step=view.facts.step,
        )
    ]


def _behind(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    """A rank that enqueued less than the others, or waits for an earlier collective."""
    places = {one.rank: one.enqueued for one in waiting if one.enqueued is not None and one.rank is not None}
    if len(places) < 2 or len(set(places.values())) < 2:
        places = {one.rank: one.seq for one in waiting if one.seq is not None and one.rank is not None}
    if len(places) < 2 or len(set(places.values())) < 2:
        return []
    low = min(places.values())
    last = [rank for rank, step in places.items() if step == low]
    if len(last) * 2 > len(places) or max(places.values()) - low < 2:
        return []
    ranks = tuple(last) if len(last) == 1 else ()
    evidence = _lines(waiting, first=last[0])
    cause = "unequal_steps" if near_end(view) else "rank_stalled"
    who = ", ".join(f"rank {rank}" for rank in last)
    return [
        Hypothesis(
            cause,
            f"{who} is behind the others: collective {low}, others are at {max(places.values())}",
            evidence,
            ranks,
            confidence=0.7,
            step=view.facts.step,
            missing=_next_time(),
        )
    ]


def _absent(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    """All waiting ranks wait for the same collective; a known rank did not wait."""
    absent = missing_ranks(view, {one.rank for one in waiting if one.rank is not None})
    if len(absent) != 1:
        return []
    return [stalled(view, absent[0], [one.event for one in waiting])]


def _one_continues(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    """Ranks above 0 waited while the progress bar of the main process, the only one with a bar,
    advanced: it did not reach the collective.
    """
    ranks = {one.rank for one in waiting if one.rank is not None}
    if not ranks or 0 in ranks or ranks | {0} != set(range(max(ranks) + 1)):
        return []
    began = min(waiting, key=lambda one: one.event.order).event
    bars = [
        event
        for event in view.facts.of("bar", "preparing", "preparing_data", "transfer", "loading", "saving")
        if event.rank in (None, 0) and event.source == began.source
    ]
    after = [event for event in bars if event.order > began.order]
    return [stalled(view, 0, [one.event for one in waiting])] if after else []


def stalled(view: View, rank: int, proofs: list[LogEvent]) -> Hypothesis:
    """The finding that a rank did not come, with the last that was seen of it."""
    facts = view.facts.ranks.get(rank)
    busy = _last_sign(view, rank)
    if near_end(view) and (busy is None or busy.signature not in ("preparing", "preparing_data", "loading")):
        return Hypothesis(
            "unequal_steps",
            f"near the end of the data, rank {rank} did not join a collective in which the others waited",
            (*proofs[:3], *([busy] if busy else [])),
            (rank,),
            confidence=0.6,
            step=view.facts.step,
            missing=_next_time(),
        )
    phase = None
    if busy is not None and busy.signature in ("preparing", "preparing_data"):
        phase = "preparing data"
    elif busy is not None and busy.signature == "saving":
        phase = "saving a checkpoint"
    activity = f"; its last sign of life: it was {phase}" if phase else ""
    evidence = (*([busy] if busy else []), *proofs[:4])
    has_log = facts is not None and bool(facts.own_source)
    return Hypothesis(
        "rank_stalled",
        f"rank {rank} did not join a collective in which the others waited{activity}",
        evidence,
        (rank,),
        confidence=0.85 if has_log or phase else 0.7,
        phase=phase,
        step=view.facts.step,
        missing=() if has_log else (f"the log of rank {rank}",),
    )


def _undecided(view: View, waiting: list[TimedOutCollective]) -> list[Hypothesis]:
    if near_end(view):
        lines = [event for event in view.progress if event.number("step") == view.facts.step][-1:]
        return [
            Hypothesis(
                "unequal_steps",
                "ranks waited for a peer near the end of the data",
                (*_lines(waiting), *lines),
                confidence=0.55,
                step=view.facts.step,
                missing=_next_time(),
            )
        ]
    return []


def _gloo(view: View) -> list[Hypothesis]:
    """Waits without sequence numbers: gloo, the store, monitored barriers."""
    listed = _listed(view)
    if listed:
        return listed
    named = view.facts.of("monitored_barrier")
    if named:
        ranks = tuple(int(word) for word in named[0].fields["ranks"].replace(",", " ").split())
        return [
            Hypothesis(
                "rank_stalled",
                f"{', '.join(f'rank {rank}' for rank in ranks)} did not reach a barrier",
                tuple(named[:4]),
                ranks if len(ranks) == 1 else ranks[:64],
                confidence=0.9,
            )
        ]
    waits = [
        event
        for event in view.facts.of("gloo_timeout", "store_wait", "timed_out_work")
        if not view.survived(event)
    ]
    ranks_waiting = {event.rank for event in waits if event.rank is not None}
    if not waits:
        return []
    absent = missing_ranks(view, ranks_waiting) if ranks_waiting else []
    alive = [
        rank
        for rank in absent
        if view.facts.ranks.get(rank) and view.facts.ranks[rank].ending == "terminated"
    ]
    if len(absent) == 1:
        return [stalled(view, absent[0], waits)]
    lost = {event.rank for event in view.facts.of(*LOST) if event.rank is not None} - ranks_waiting
    silent = [rank for rank in absent if rank not in lost]
    if len(silent) == 1:  # those who lost a peer lost one that had waited and left
        return [stalled(view, silent[0], waits)]
    if len(lost) == 1 and (next(iter(lost)) in absent or not absent):
        return [stalled(view, next(iter(lost)), waits)]
    if not any(event.signature in ("gloo_timeout", "store_wait") for event in waits):
        return []
    return [
        Hypothesis(
            "rank_stalled",
            "ranks waited for one that did not arrive in time; the logs do not show which",
            first_of_each(waits),
            confidence=0.4,
            missing=_missing_logs(alive or absent),
        )
    ]


def _listed(view: View) -> list[Hypothesis]:
    """A coordinator's list of those who did not come: Horovod's inspector of stalls, JAX's
    coordination service.
    """
    lines = view.facts.of("not_come")
    words = [event for event in view.facts.of("stall_seen", "tasks_unhealthy") if not view.survived(event)]
    numbers = {
        int(word)
        for event in lines
        for name in ("ranks", "missing", "task")
        for word in event.fields.get(name, "").replace(",", " ").split()
    }
    if not words or not numbers:
        return []
    ranks = tuple(sorted(numbers))
    is_unhealthy = any(event.signature == "tasks_unhealthy" for event in words)
    who = ", ".join(f"rank {rank}" for rank in ranks[:8])
    why = (
        f"{who} no longer sends heartbeats"
        if is_unhealthy
        else f"{who} did not join a collective in which the others waited"
    )
    return [
        Hypothesis(
            "rank_died_first" if is_unhealthy else "rank_stalled",
            why,
            (*words[:2], *lines[:3]),
            ranks if len(ranks) == 1 else (),
            confidence=0.85,
            step=view.facts.step,
            missing=(f"the log of {who}",),
        )
    ]


def missing_ranks(view: View, waiting: set[int]) -> list[int]:
    """Ranks that exist and did not wait, as far as the logs tell."""
    world = view.facts.world_size
    all_ranks = set(range(world)) if world and world <= 1 << 16 else set(view.facts.ranks)
    if not world and not any(facts.own_source for facts in view.facts.ranks.values()) and len(all_ranks) < 3:
        return []
    failed = {trace.event.rank for trace in view.tracebacks if not view.is_victim(trace)}
    return sorted(all_ranks - waiting - failed)


def _last_sign(view: View, rank: int) -> LogEvent | None:
    """The last line of a rank that shows what it was at."""
    facts = view.facts.ranks.get(rank)
    if facts is None:
        return None
    if facts.progress is not None:
        return facts.progress
    shared = [
        event
        for event in view.facts.of(
            "preparing", "preparing_data", "bar", "step", "saving", "transfer", "loading"
        )
        if event.rank is None
    ]
    if rank == 0 and shared:  # bars without a rank are the first rank's
        return shared[-1]
    source = view.facts.sources.get(facts.own_source)
    return source.tail[-1] if source and source.tail else facts.last


def _finished_early(view: View) -> LogEvent | None:
    """The line with which one rank says that it is done, where the others never do."""
    done = view.facts.of("rank_done")
    ranks = {event.number("rank") for event in done}
    world = view.facts.world_size
    return (
        done[0] if len(ranks) == 1 and (world is None or world > 1) and done[0].fields.get("steps") else None
    )


def _rank_of(event: LogEvent) -> int | None:
    named = event.number("rank")
    return named if named is not None else event.rank


def _odd(values: Mapping[int, Hashable]) -> int | None:
    """The one rank that differs from all others, where there are at least two others that agree."""
    counts = Counter(values.values())
    if len(counts) != 2 or len(values) < 3:
        return None
    least, number = counts.most_common()[-1]
    return next((rank for rank, value in values.items() if value == least), None) if number == 1 else None


def _odd_fingerprint(events: list[LogEvent]) -> int | None:
    """The rank that most others say differs from them."""
    prints: dict[int, str] = {}
    for event in events:
        for who, what in (("one", "one_print"), ("other", "other_print")):
            rank = event.number(who)
            if rank is not None:
                prints[rank] = event.fields.get(what, "")
    return _odd(prints)


def _lines(waiting: list[TimedOutCollective], *, first: int | None = None) -> tuple[LogEvent, ...]:
    return tuple(one.event for one in sorted(waiting, key=lambda one: one.rank != first))[:6]


def _missing_logs(ranks: list[int]) -> tuple[str, ...]:
    logs = (f"the logs of ranks {', '.join(map(str, ranks[:8]))}",) if ranks else ("the logs of all ranks",)
    return (*logs, *_next_time())


def _next_time() -> tuple[str, ...]:
    return (
        (
            "next time: TORCH_NCCL_TRACE_BUFFER_SIZE=20000 (TORCH_FR_BUFFER_SIZE since torch 2.9) and"
            " TORCH_NCCL_DUMP_ON_TIMEOUT=1 for the flight recorder; TORCH_DISTRIBUTED_DEBUG=DETAIL names"
            " mismatches"
        ),
    )

"""The part of all callbacks that knows no trainer: ranks agree on what they are about to train, then report phases, steps and losses to the watch."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from unisono.agree.reports import number_list
from unisono.causes import Verdict, find_cause
from unisono.errors import Disagreed, Problem
from unisono.integrations.inside.guarded_process import this_process
from unisono.integrations.trainer_facts import TrainerFacts, compare

_TURNS = count()  # of this process: all ranks agree equally often
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.25
_ANSWER_S = 5.0
_NOTIFY_AFTER_S = 30.0
_MOST_BYTES = 1 << 16

Notify = Callable[[str], None]


class World:
    """The process group of this program, as seen by one rank.

    Attributes:
        size: number of ranks.
        store: torch's store, which all ranks reach.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.store = rank, size, store

    @property
    def patience_s(self) -> float:
        """The timeout of the group's collectives, used here as well."""
        return float(self.store.timeout.total_seconds())


def find_world() -> World | None:
    """The world of a program with a process group of several ranks; None for a single rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    size = distributed.get_world_size()
    if size < 2:
        return None
    # torch has no public name for the store that init_process_group has made; a test notices if this one goes.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return World(distributed.get_rank(), size, store)


def meet(world: World, facts: TrainerFacts, *, notify: Notify) -> None:
    """Compares the facts of all ranks. All ranks must call it, and equally often; it is not a collective.

    Args:
        world: see find_world.

    Raises:
        Disagreed: on every rank, with the same message, if they differ; or if a rank has not come within the group's own patience.
    """
    facts = replace(facts, rank=world.rank)
    prefix = f"unisono/{next(_TURNS)}"
    try:
        verdict = (
            _compare_on_rank0(world, prefix, facts, notify)
            if world.rank == 0
            else _await_verdict(world, prefix, facts, notify)
        )
    except RuntimeError as error:  # torch's DistError: the store, and so the rank that holds it, is gone
        raise Disagreed.of(
            "another rank left while the ranks compared their data",
            why=str(error),
            fix="look at the first error among all ranks' output",
        ) from error
    if verdict is not None:
        raise refusal(verdict)


def refusal(verdict: Verdict) -> Disagreed:
    """The exception for a verdict: its message, and as notes the evidence and the fix."""
    cause = find_cause(verdict.cause)
    title = f"{cause.title}: " if cause else ""
    error = Disagreed(Problem(f"{title}{verdict.summary}  [{verdict.cause}]"), verdict=verdict)
    for line in verdict.lines()[1:]:
        error.add_note(line)
    return error


def _compare_on_rank0(world: World, prefix: str, facts: TrainerFacts, notify: Notify) -> Verdict | None:
    others = range(1, world.size)
    late = _await(world, [f"{prefix}/{rank}" for rank in others], world.patience_s, notify)
    if late:
        verdict: Verdict | None = _missing_ranks(
            [rank for rank in others if f"{prefix}/{rank}" in late], world
        )
    else:
        verdict = compare([facts, *(_facts_of(world.store, f"{prefix}/{rank}", rank) for rank in others)])
    world.store.set(f"{prefix}/word", json.dumps(verdict.to_json() if verdict else None))
    if verdict:  # the rank with the store stays until the others have read it
        _await(
            world,
            [f"{prefix}/heard/{rank}" for rank in others if f"{prefix}/{rank}" not in late],
            _ANSWER_S,
            None,
        )
    return verdict


def _await_verdict(world: World, prefix: str, facts: TrainerFacts, notify: Notify) -> Verdict | None:
    world.store.set(f"{prefix}/{world.rank}", json.dumps(facts.to_json()))
    word = f"{prefix}/word"
    if _await(world, [word], world.patience_s + _ANSWER_S, None):
        return _missing_ranks([0], world)
    value = json.loads(_read(world.store, word))
    verdict = Verdict.from_json(value) if value else None
    if verdict:
        world.store.set(f"{prefix}/heard/{world.rank}", "1")
    return verdict


def _facts_of(store: Any, key: str, rank: int) -> TrainerFacts:
    value = json.loads(_read(store, key))
    return replace(TrainerFacts.from_json(value if isinstance(value, dict) else {}), rank=rank)


def _read(store: Any, key: str) -> str:
    data: bytes = store.get(key)
    return data[:_MOST_BYTES].decode(errors="replace")


def _await(world: World, keys: Sequence[str], limit_s: float, notify: Notify | None) -> set[str]:
    """Waits until all keys exist; returns those that are missing at the limit."""
    began = time.monotonic()
    pause_s, notify_at_s = _FIRST_LOOK_S, _NOTIFY_AFTER_S
    while keys and not world.store.check(list(keys)):
        waited_s = time.monotonic() - began
        if waited_s >= limit_s:
            return {key for key in keys if not world.store.check([key])}
        if notify and waited_s >= notify_at_s:
            missing = [int(key.rpartition("/")[2]) for key in keys if not world.store.check([key])]
            notify(
                f"for {waited_s:.0f} s the other ranks have waited for {number_list('rank', missing)} to come to the first step"
            )
            notify_at_s *= 2
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    return set()


def _missing_ranks(ranks: Sequence[int], world: World) -> Verdict:
    return Verdict(
        cause="rank_stalled",
        when="before",
        phase="agree.ranks",
        ranks=tuple(ranks),
        confidence=0.9,
        summary=f"{number_list('rank', ranks)} did not reach the first step within {world.patience_s:.0f} s",
        fix=(
            "look at the last output of that rank; if preparing the data takes longer, raise the process group's timeout",
        ),
    )


class Recorder(Protocol):
    """Receives progress reports. Phases are those of unisono.watch.beat."""

    def phase(self, name: str) -> None:
        """The rank enters a phase."""

    def step(self, step: int) -> None:
        """The rank begins this optimizer step, from 1."""

    def emit(self, kind: str, **fields: Any) -> None:
        """An event of unisono.events."""


class Unwatched:
    """Ignores progress reports: there is no front."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def step(self, step: int) -> None:
        """Nothing."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Nothing."""


def find_recorder() -> Recorder:
    """This guarded process under `unisono run`; otherwise one that ignores reports."""
    return this_process() or Unwatched()


class CallbackReporter:
    """The part of all callbacks that does not depend on the trainer."""

    def __init__(self) -> None:
        self._recorder = find_recorder()

    def begin(self, facts: TrainerFacts) -> None:
        """Compares with the other ranks what is about to be trained; all ranks must call it. A single rank only reports it.

        Raises:
            Disagreed: on every rank, with the same message.
        """
        self._recorder.emit("facts", facts=facts.to_json())
        world = find_world()
        if world is None:
            return
        self.phase("agree.ranks")
        try:
            meet(world, facts, notify=logging.getLogger("unisono").warning)
        except Disagreed as error:
            verdict = error.verdict.to_json() if error.verdict else None
            self._recorder.emit("refused", text=str(error), exit_code=error.exit_code, verdict=verdict)
            raise

    def phase(self, name: str) -> None:
        """The rank enters a phase; a repetition counts as a heartbeat."""
        self._recorder.phase(name)

    def step(self, step: int) -> None:
        """The rank begins this optimizer step, from 1."""
        self._recorder.step(step)

    def loss(self, step: int, loss: object) -> None:
        """Reports a loss that the trainer has already copied to the host; nothing is read from the device."""
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            self._recorder.emit("step", step=step, loss=loss if math.isfinite(loss) else str(loss))

"""The part of all callbacks that knows no trainer: ranks agree on what they are about to train,
then report phases, steps and losses to the watch.

A rank reads its own facts (`read_loader`); `compare` is pure and gives the verdict. Nothing of the
program is called that could draw a random number, open a file or decode an image: rows are looked
at only where they lie ready, in a table of `datasets`, in a Subset's indices, in tensors, in a
list. Of a dataset of the program's own class only the length is known.
"""

import hashlib
import json
import logging
import math
import sys
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from typing import Any, Protocol

from unisono.base.causes import Verdict, find_cause
from unisono.base.errors import Disagreed, Problem
from unisono.base.text import one_line
from unisono.guard.agree.agreement import Agreement, Stage, Wording, judge_keys
from unisono.guard.agree.reports import Member, name_all, name_ranks, number_list
from unisono.guard.agree.rules import Rule
from unisono.guard.integrations.inside.guarded_process import this_process

_TURNS = count()  # of this process: all ranks agree equally often
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.25
_ANSWER_S = 5.0
_NOTIFY_AFTER_S = 30.0
_MOST_BYTES = 1 << 16

Notify = Callable[[str], None]
_SAMPLED_ROWS = 8
_LONGEST_DIGESTED = 64  # items of a list or dict in a row
_DEEPEST = 4

_SEED = (
    "give every split and shuffle the same fixed seed on all ranks: train_test_split(…, seed=42),"
    " random_split(…, generator=…)"
)
_SPLIT = Rule(
    "trainer.split",
    "rows and their order",
    "equal",
    "fail",
    "split_mismatch",
    (_SEED, "or split once, save the parts, and let every rank read them"),
)
_DATA = Rule(
    "trainer.data",
    "training data",
    "equal",
    "fail",
    "data_mismatch",
    (
        "on {who}: compare the data files with a correct node's: `sha256sum FILE`",
        "or keep the data on shared storage",
    ),
)
_STEPS = Rule(
    "trainer.steps",
    "steps",
    "equal",
    "fail",
    "unequal_steps",
    (
        (
            "give every rank the same number of batches: the same batch size and number of steps,"
            " drop_last=True, or one dataset that a distributed sampler divides"
        ),
    ),
)
_ROWS_KEYS = ("rows", "content of the rows", "seed of the sampler")
_STEP_KEYS = ("steps", "batches of an epoch")
_LABELS = {"content of the rows": "first and last rows"}


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Observable properties of a dataset.

    Attributes:
        rows: how many; None where it does not say.
        rows_digest: of some of them, from the first to the last, as they are dealt; "" where they
            cannot be looked at.
        source_digest: of what they were chosen from; "" where that is not known.
    """

    rows: int | None = None
    rows_digest: str = ""
    source_digest: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """The training that one rank is about to start.

    Only numbers and digests: no row leaves the rank.

    Attributes:
        rank: over all nodes.
        sharded: whether one dataset is dealt over the ranks, so that all must hold the same.
        batches: micro-batches of an epoch on this rank; None where unknown.
        steps: optimizer steps of the whole training; None where unknown.
    """

    rank: int = 0
    host: str = ""
    sharded: bool = False
    data: DataFacts = DataFacts()
    sampler_seed: int | None = None
    batches: int | None = None
    steps: int | None = None

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TrainerFacts":
        """Reads what `to_json` wrote; what a newer writer adds is left out.

        Raises:
            TypeError: if it is something else.
        """
        data = (
            DataFacts(**_known(DataFacts, value["data"]))
            if isinstance(value.get("data"), dict)
            else DataFacts()
        )
        return replace(
            cls(**_known(cls, {**value, "data": data})), host=one_line(str(value.get("host", "")), limit=60)
        )

    def comparable(self) -> dict[str, Hashable]:
        """The values that must be equal on all ranks, by the words of a verdict.

        Unknown values are left out.

        Ranks that read data of their own may have epochs of other lengths, as long as they make the
        same number of steps.
        """
        rows = (
            (self.data.rows, self.data.rows_digest or None, self.sampler_seed)
            if self.sharded
            else (None, None, None)
        )
        steps = (self.steps, self.batches if self.sharded or self.steps is None else None)
        reported = zip((*_ROWS_KEYS, *_STEP_KEYS), (*rows, *steps), strict=True)
        return {key: value for key, value in reported if value is not None}


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: given for name, given in value.items() if name in names}


def compare(reports: Sequence[TrainerFacts]) -> Verdict | None:
    """The verdict on a difference between ranks, the reason before its consequences; None where
    there is none.

    A key that some ranks do not know is not compared.
    """
    hosts = sorted(
        {one.host for one in reports}, key=lambda host: min(r.rank for r in reports if r.host == host)
    )
    members = sorted((Member(hosts.index(one.host), one.rank, one.host), one) for one in reports)
    stage = Stage("agree.ranks", name_ranks if len(hosts) == 1 else name_all)
    values = [(who, one.comparable()) for who, one in members]
    common = set.intersection(*(set(reported) for _, reported in values)) if values else set()
    of_rows = _judge(_blamed(members), values, [key for key in _ROWS_KEYS if key in common], stage)
    of_steps = _judge(_STEPS, values, [key for key in _STEP_KEYS if key in common], stage)
    return next(iter(of_rows.merged(of_steps).fatal), None)


def _judge(
    rule: Rule, values: Sequence[tuple[Member, Mapping[str, Hashable]]], keys: Sequence[str], stage: Stage
) -> Agreement:
    reported = [(who, {key: given[key] for key in keys}) for who, given in values]
    wording = Wording(shown=_shown, label=lambda key: _LABELS.get(key, key), order=keys.index)
    return judge_keys(rule, reported, wording, stage=stage)


def _shown(key: str, value: Hashable) -> str:
    if isinstance(value, int):
        return str(value) if key.startswith("seed") else f"{value:,}"
    return f"digest {one_line(str(value), limit=12)}"


def _blamed(members: Sequence[tuple[Member, TrainerFacts]]) -> Rule:
    """Whether the files differ or what was chosen from them: by the digest of the source, else by
    where the border runs.
    """
    sources = {one.data.source_digest for _, one in members}
    if "" not in sources:
        return _DATA if len(sources) > 1 else _SPLIT
    by_host: dict[str, set[tuple[int | None, str]]] = {}
    for who, one in members:
        by_host.setdefault(who.host, set()).add((one.data.rows, one.data.rows_digest))
    several = len(members) > len(by_host) > 1  # with one rank on each host either may be
    return _DATA if several and all(len(values) == 1 for values in by_host.values()) else _SPLIT


# --- reading


def read_loader(loader: Any) -> TrainerFacts:
    """Facts of a DataLoader of this rank: torch's own, or the wrapper of Accelerate or
    Lightning.
    """
    samplers = list(_samplers(loader))
    kinds = {base.__name__ for one in (loader, *samplers) for base in type(one).__mro__}
    if "DataLoaderDispatcher" in kinds:  # rank 0 reads for all
        return TrainerFacts()
    distributed = next((one for one in samplers if _is_a(one, "DistributedSampler")), None)
    return TrainerFacts(
        sharded=distributed is not None or "BatchSamplerShard" in kinds,
        data=read_dataset(getattr(loader, "dataset", None)),
        sampler_seed=(
            _number(getattr(distributed, "seed", None)) if getattr(distributed, "shuffle", False) else None
        ),
        batches=length_of(loader),
    )


def _is_a(thing: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(thing).__mro__)


def _samplers(loader: Any) -> Iterable[Any]:
    """The samplers of a loader, from the outermost in: batch samplers wrap batch samplers, and
    these a sampler.
    """
    seen: list[Any] = []
    queue = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while queue:
        one = queue.pop(0)
        if one is None or any(one is other for other in seen) or len(seen) > 16:
            continue
        seen.append(one)
        queue += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
    return seen


def length_of(thing: Any) -> int | None:
    """The length; None if there is none, as for streams, or if it is invalid."""
    try:
        return len(thing)
    # A foreign dataset's __len__ raises any of these if the length is unknown; PyTorch's own
    # streams raise NotImplementedError.
    except (TypeError, NotImplementedError, AttributeError, ValueError, OverflowError):
        return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_dataset(dataset: Any) -> DataFacts:
    """Facts of a dataset, without calling it: see the module docstring."""
    kind = type(dataset).__name__
    rows = length_of(dataset)
    if rows is None:
        return DataFacts(kind=kind)
    if _is_a(dataset, "Subset") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        below = read_dataset(dataset.dataset)
        source = _digest("source", below.rows, below.rows_digest, below.source_digest)
        chosen = array("q", (int(index) for index in dataset.indices))
        return DataFacts(rows, _digest(source, chosen.tobytes()), source, kind)
    if isinstance(dataset, list | tuple):
        return DataFacts(rows, _digest(*(dataset[position] for position in _places(rows))), "", kind)
    if hasattr(dataset, "tensors") and isinstance(dataset.tensors, tuple):
        picked = [tensor[position] for tensor in dataset.tensors for position in _places(rows)]
        return DataFacts(rows, _digest(*picked), "", kind)
    if hasattr(dataset, "with_format") and hasattr(dataset, "data") and rows:
        return _read_table(dataset, rows, kind)
    return DataFacts(rows, "", "", kind)


def _read_table(dataset: Any, rows: int, kind: str) -> DataFacts:
    """The facts of a `datasets.Dataset`: rows as they lie in its table, nothing decoded, no
    transform of the program's called.
    """
    picked = dataset.with_format("arrow")[_places(rows)].to_pylist()
    splits = getattr(getattr(dataset, "info", None), "splits", None) or {}
    sizes = sorted(
        (str(name), getattr(split, "num_examples", 0), getattr(split, "num_bytes", 0))
        for name, split in splits.items()
    )
    below = getattr(dataset.data, "num_rows", rows)
    source = _digest("splits", sizes) if sizes else _digest("table", below) if below != rows else ""
    return DataFacts(rows, _digest(*picked), source, kind)


def _places(rows: int) -> list[int]:
    """Some places from the first to the last, each once."""
    last = rows - 1
    return sorted({last * part // (_SAMPLED_ROWS - 1) for part in range(_SAMPLED_ROWS)}) if rows else []


def _digest(*values: Any) -> str:
    """Equal for equal plain values, in every process; of other objects only the class counts."""
    made = hashlib.blake2b(digest_size=8)
    for value in values:
        _feed(made, value, 0)
    return made.hexdigest()


def _feed(made: "hashlib.blake2b", value: Any, depth: int) -> None:
    made.update(type(value).__name__.encode() + b"\x00")
    if isinstance(value, bool | int | float | str | bytes) or value is None:
        made.update(value if isinstance(value, bytes) else str(value).encode(errors="replace"))
    elif isinstance(value, Mapping) and depth < _DEEPEST:
        for key in list(value)[:_LONGEST_DIGESTED]:
            _feed(made, key, depth + 1)
            _feed(made, value[key], depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST:
        made.update(str(len(value)).encode())
        items = value if len(value) <= _LONGEST_DIGESTED else [*value[:32], *value[-32:]]
        for item in items:
            _feed(made, item, depth + 1)
    elif hasattr(value, "tolist") and hasattr(value, "shape"):  # a tensor or an array
        made.update(str(value.tolist()).encode())
    made.update(b"\x01")


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
    # The store that init_process_group has made. torch 2.13 has a public `get_group_store`, but not
    # each earlier torch that such programs have. A test notices if this name goes.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return World(distributed.get_rank(), size, store)


def meet(world: World, facts: TrainerFacts, *, notify: Notify) -> None:
    """Compares the facts of all ranks.

    All ranks must call it, and equally often; it is not a collective.

    Args:
        world: see find_world.

    Raises:
        Disagreed: on every rank, with the same message, if they differ; or if a rank has not come
            within the group's own patience.
    """
    facts = replace(facts, rank=world.rank)
    prefix = f"unisono/{next(_TURNS)}"
    try:
        verdict = (
            _compare_on_rank0(world, prefix, facts, notify)
            if world.rank == 0
            else _await_verdict(world, prefix, facts, notify)
        )
    except RuntimeError as error:
        # It is torch's DistError: the store, and so the rank that holds it, is gone.
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
                f"for {waited_s:.0f} s the other ranks have waited for {number_list('rank', missing)} to come"
                " to the first step"
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
            (
                "look at the last output of that rank; if preparing the data takes longer, raise the process"
                " group's timeout"
            ),
        ),
    )


class Recorder(Protocol):
    """Receives progress reports. Phases are those of unisono.guard.watch."""

    def phase(self, name: str) -> None:
        """The rank enters a phase."""

    def step(self, step: int) -> None:
        """The rank begins this optimizer step, from 1."""

    def emit(self, kind: str, **fields: Any) -> None:
        """An event of unisono.base.events."""


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
        """Compares with the other ranks what is about to be trained; all ranks must call it.

        A single rank only reports it.

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
        """Reports a loss that the trainer has already copied to the host; nothing is read from the
        device.
        """
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            self._recorder.emit("step", step=step, loss=loss if math.isfinite(loss) else str(loss))

"""What a callback reads of a loader, and what is said where ranks differ.

Run: pytest tests/guard/integrations/test_trainer_facts.py
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from unisono.guard.integrations.inside.loaders import digest_of
from unisono.guard.integrations.trainer_callback import (
    DataFacts,
    TrainerFacts,
    compare,
    read_dataset,
    read_loader,
)


def _of(rank: int, host: str = "a", **given: Any) -> TrainerFacts:
    data = DataFacts(
        rows=given.pop("rows", 96),
        rows_digest=given.pop("digest", "d1"),
        source_digest=given.pop("source", ""),
    )
    return TrainerFacts(rank=rank, host=host, sharded=given.pop("sharded", True), data=data, **given)


def _table(count: int = 64) -> Dataset:
    return Dataset.from_dict(
        {"text": [f"row {number}" for number in range(count)], "number": list(range(count))}
    )


def test_ranks_that_hold_the_same_agree() -> None:
    assert compare([_of(rank, steps=12, batches=6) for rank in range(4)]) is None


def test_the_odd_rank_among_four_is_named_with_both_numbers() -> None:
    verdict = compare([_of(rank, rows=896 if rank == 2 else 899) for rank in range(4)])
    assert verdict is not None
    assert (verdict.cause, verdict.ranks, verdict.when) == ("split_mismatch", (2,), "before")
    assert "896 on rank 2" in verdict.summary
    assert "899 on ranks 0, 1 and 3" in verdict.summary or "899 on ranks 0, 1, 3" in verdict.summary


def test_other_rows_are_the_reason_and_other_steps_their_consequence() -> None:
    verdict = compare([_of(0, rows=80, steps=20), _of(1, rows=64, steps=16)])
    assert verdict is not None
    assert verdict.cause == "split_mismatch"


def test_other_steps_on_the_same_rows_are_unequal_steps() -> None:
    verdict = compare([_of(0, steps=20), _of(1, steps=16)])
    assert verdict is not None
    assert verdict.cause == "unequal_steps"
    assert "20 on rank 0, 16 on rank 1" in verdict.summary


def test_other_rows_that_differ_by_machine_are_other_files() -> None:
    differing = [_of(0, "a", rows=9), _of(1, "a", rows=9), _of(2, "b", rows=8), _of(3, "b", rows=8)]
    verdict = compare(differing)
    assert verdict is not None
    assert verdict.cause == "data_mismatch"
    inside = [*differing[:3], _of(3, "b", rows=7)]
    assert getattr(compare(inside), "cause", "") == "split_mismatch"


def test_where_the_source_is_known_it_decides_between_files_and_split() -> None:
    same = [_of(0, "a", digest="x", source="s"), _of(1, "b", digest="y", source="s")]
    assert getattr(compare(same), "cause", "") == "split_mismatch"
    other = [same[0], replace(same[1], data=replace(same[1].data, source_digest="t"))]
    assert getattr(compare(other), "cause", "") == "data_mismatch"


def test_ranks_with_their_own_data_may_differ_in_rows_but_not_in_steps() -> None:
    own = [
        _of(rank, rows=90 + rank, digest=str(rank), sharded=False, batches=9 + rank, steps=50)
        for rank in range(2)
    ]
    assert compare(own) is None
    assert getattr(compare([own[0], replace(own[1], steps=51)]), "cause", "") == "unequal_steps"


def test_what_one_rank_does_not_know_is_not_compared() -> None:
    assert compare([_of(0, steps=5), _of(1, steps=None)]) is None


def test_a_different_seed_of_a_distributed_sampler_is_a_different_order() -> None:
    verdict = compare([_of(0, sampler_seed=3), _of(1, sampler_seed=7)])
    assert verdict is not None
    assert "seed of the sampler: 3 on rank 0, 7 on rank 1" in verdict.summary


def test_facts_survive_the_way_through_the_store_and_junk_is_not_a_facts() -> None:
    facts = _of(3, "node-b", steps=4, batches=2, sampler_seed=0)
    assert TrainerFacts.from_json(facts.to_json()) == facts
    assert TrainerFacts.from_json({"junk": 1, "host": "a\x1b[2Jb\nc"}).host == "ab c"


def test_unseeded_split_of_a_table_shows_in_its_rows_and_not_its_source() -> None:
    parts = [
        read_dataset(_table().train_test_split(test_size=0.25, seed=seed)["train"]) for seed in (1, 2, 1)
    ]
    assert parts[0].rows == parts[1].rows == 48
    assert parts[0].rows_digest != parts[1].rows_digest
    assert parts[0] == parts[2]
    assert parts[0].source_digest == parts[1].source_digest != ""


def test_unseeded_split_that_was_mapped_shows_without_a_callback_too() -> None:
    """`map` writes a new table: no indices are left that would tell.

    TRL and LLaMA-Factory map all that they read.
    """

    def prepared(seed: int) -> Dataset:
        chosen = _table().train_test_split(test_size=0.25, seed=seed)["train"]
        return chosen.map(lambda row: {"length": len(row["text"])})

    for filtered in (False, True):  # `filter` makes indices of its own, which are the same on all ranks
        tables = [prepared(seed) for seed in (1, 2, 1)]
        digests = [
            digest_of(one.filter(lambda row: row["length"] > 0) if filtered else one) for one in tables
        ]
        assert digests[0] == digests[2] != digests[1]


def test_table_is_read_without_its_transform_or_decoding_its_pictures() -> None:
    def never(_: object) -> object:
        raise AssertionError("the program's transform was called")

    plain = _table()
    assert read_dataset(plain.with_transform(never)).rows_digest == read_dataset(plain).rows_digest


def test_subsets_tensors_and_lists_are_known_by_their_rows() -> None:
    data = TensorDataset(torch.arange(40).reshape(20, 2))
    one, two = (random_split(data, [16, 4], torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    assert read_dataset(one).rows_digest != read_dataset(two).rows_digest
    assert read_dataset(one).source_digest == read_dataset(two).source_digest
    assert (
        read_dataset(data).rows_digest
        != read_dataset(TensorDataset(torch.arange(40).reshape(20, 2) + 1)).rows_digest
    )
    assert read_dataset([{"text": "a"}]).rows_digest != read_dataset([{"text": "b"}]).rows_digest
    assert read_dataset(Subset(data, [])).rows == 0


class _Own(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, place: int) -> int:
        raise AssertionError("a row of the program's own dataset was read")


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        raise AssertionError("a stream was read")


def test_only_the_length_of_an_own_dataset_and_nothing_of_a_stream_is_read() -> None:
    assert read_dataset(_Own()) == DataFacts(rows=7, kind="_Own")
    facts = read_loader(DataLoader(_Stream(), batch_size=2))
    assert (facts.data.rows, facts.batches, facts.sharded) == (None, None, False)


def test_reading_draws_no_random_number() -> None:
    states = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state())
    read_loader(DataLoader(_table().shuffle(seed=1), batch_size=4, shuffle=True))
    assert random.getstate() == states[0]
    assert repr(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_loader_with_a_sharding_sampler_is_distinguished_from_a_plain_one() -> None:
    data = TensorDataset(torch.arange(20))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, seed=5)
    sharded = read_loader(DataLoader(data, batch_size=2, sampler=sampler))
    assert (sharded.sharded, sharded.sampler_seed, sharded.batches, sharded.data.rows) == (True, 5, 5, 20)
    assert not read_loader(DataLoader(data, batch_size=2)).sharded


@pytest.mark.parametrize("kind", ["sharded", "read by rank 0"])
def test_what_accelerate_makes_of_a_loader_is_known_by_its_names(kind: str) -> None:
    """Depends on BatchSamplerShard, DataLoaderDispatcher and their `batch_sampler`: if these
    change, this test notices.
    """
    PartialState(cpu=True)
    dispatch = kind != "sharded"
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=2, shuffle=True)
    try:
        prepared = prepare_data_loader(
            loader, num_processes=2, process_index=0, dispatch_batches=dispatch, put_on_device=dispatch, device=torch.device("cpu")
        )  # fmt: skip
        facts = read_loader(prepared)
    finally:
        PartialState._reset_state()
    assert facts.sharded is not dispatch
    assert facts.data.rows == (None if dispatch else 20)
    assert facts.batches == (None if dispatch else 5)


def test_the_callbacks_are_imported_by_nobody_but_the_program() -> None:
    package = Path(__file__).parents[3] / "src" / "unisono"
    for name in ("integrations.transformers", "integrations.lightning", "integrations.accelerate"):
        assert not [path for path in package.rglob("*.py") if f"unisono.{name} import" in _imports(path)], (
            name
        )


def _imports(path: Path) -> str:
    """Without the examples in docstrings, which are indented."""
    return "\n".join(line for line in path.read_text().splitlines() if line.startswith(("from ", "import ")))

"""Units stay whole, see no other unit, and need no logits of all tokens at once; a metric without
meaning is absent.

Run: pytest tests/trainer/objectives/test_units.py
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.guard.watch import Beats
from unisono.trainer.batches.table import TableRows, TableSource
from unisono.trainer.data.build import pack
from unisono.trainer.data.token_table import TokenBlock, TokenTable, collate
from unisono.trainer.objectives.preference import Kto
from unisono.trainer.plan import SequenceStream
from unisono.trainer.training import rank_run

Train = Callable[..., Any]
_VOCABULARY = 20_000
_CHUNKS = {"lora": 128, "full": 256}  # rows of logits


def _table(pairs: list[tuple[int, int]], *, packing: bool) -> TokenTable:
    """Pairs of so many tokens; each token says to which pair and side it belongs."""
    lengths = [length for pair in pairs for length in pair]
    ids = np.concatenate([np.full(length, i, np.int32) for i, length in enumerate(lengths)])
    ends = np.cumsum([0, *lengths])
    targets = np.ones(len(ids), np.uint8)
    targets[ends[:-1]] = 0
    both = np.array([sum(pair) for pair in pairs])
    limit = 2 * max(lengths)
    sequences = pack(both.tolist(), limit=limit) if packing else [[i] for i in range(len(pairs))]
    columns = {
        "stored": np.arange(len(pairs)) * 2, "length": both, "loss": both - 2, "file": np.zeros(len(pairs), np.int64),
        "number": np.arange(len(pairs)) + 1,
    }  # fmt: skip
    return TokenTable(
        split="train", blocks=[TokenBlock(ends, ids, targets)], columns=columns, sides=2, files=[("pairs.jsonl", True)], eos=0,
        sequence_rows=np.array([row for rows in sequences for row in rows]), sequence_ends=np.cumsum([0, *map(len, sequences)]),
        sequence_columns={
            "tokens": np.array([both[rows].sum() for rows in sequences]),
            "loss_tokens": np.array([(both[rows] - 2).sum() for rows in sequences]),
        },
    )  # fmt: skip


@given(
    pairs=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=24),
    packing=st.booleans(),
    world=st.integers(1, 4),
    micro=st.integers(1, 4),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_ranks_and_micro_batches_get_whole_pairs_each_once(
    pairs: list[tuple[int, int]], world: int, micro: int, rounds: int, seed: int, *, packing: bool
) -> None:
    table = _table(pairs, packing=packing)
    rows = TableRows(table, torch.device("cpu"))
    total = 2 * table.sequences + 1
    ranks = [
        TableSource(rows, SequenceStream(table.sequences, seed), micro * rounds, micro, total, rank, world)
        for rank in range(world)
    ]
    seen = []
    for step in range(1, -(-total // (micro * rounds)) + 1):
        units = []
        for batches in (data.step(step) for data in ranks):
            assert len(batches.micros) <= batches.rounds
            for group in batches.micros:
                batch = collate(table, group.sequences, sides=(0, 1))
                assert len(group.sequences) <= micro
                assert sum(group.units) == len(batch.units)
                loaded = group.load((0, 1))
                assert loaded.rows.input_ids.tolist() == batch.input_ids.tolist()
                firsts = batch.input_ids[np.cumsum([0, *batch.lengths])[:-1]].tolist()
                assert firsts == [2 * unit + side for unit in batch.units for side in (0, 1)]
                assert batch.lengths == [length for unit in batch.units for length in pairs[unit]]
                units += batch.units
        counts = ranks[0].step(step).counts
        assert counts.units == len(units)
        assert counts.first_tokens == sum(pairs[unit][0] for unit in units)
        seen += ranks[0].step(step).sequences
        assert sorted(units) == sorted(
            int(u) for s in ranks[0].step(step).sequences for u in table.rows_of(s)
        )
    first, second = seen[: table.sequences], seen[table.sequences : 2 * table.sequences]
    assert sorted(first) == sorted(second) == list(range(table.sequences)), "each once in an epoch"


def test_the_longest_micro_batch_is_that_of_the_sides_in_the_loss() -> None:
    """Of a rated answer the mismatched one, which is in no loss, may be longer than any other."""
    rows = TableRows(_table([(3, 30), (20, 4), (10, 5)], packing=False), torch.device("cpu"))
    data = TableSource(rows, SequenceStream(3, 0), 2, 1, 3)
    assert [data.longest(sides).sequences for sides in ((0,), (1,), (0, 1))] == [[1], [0], [0]]


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=7),
    micro=st.integers(1, 4),
)
def test_the_longest_micro_batch_of_padded_rows_is_that_with_most_places(
    lengths: list[list[int]], micro: int
) -> None:
    """Every row of a micro batch takes as much memory as its longest."""
    ends = np.cumsum([0, *map(len, lengths)])
    table = _table([(n, 1) for rows in lengths for n in rows], packing=False)
    table = replace(table, sequence_rows=np.arange(ends[-1]), sequence_ends=ends)
    rows = TableRows(table, torch.device("cpu"))
    data = TableSource(rows, SequenceStream(len(lengths), 0), micro, micro, len(lengths))

    def places(group: Sequence[int]) -> int:
        return sum(len(lengths[i]) for i in group) * max(max(lengths[i]) for i in group)

    chosen = data.longest((0,), padded=True).sequences
    assert len(set(chosen)) == len(chosen) <= micro
    groups = (g for n in range(1, micro + 1) for g in itertools.combinations(range(len(lengths)), n))
    assert places(chosen) == max(map(places, groups))


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_a_changed_answer_changes_the_log_probability_of_no_other(
    train_here: Train, pair_files: tuple[Path, Path], model_dir: Path, tmp_path: Path, layout: str
) -> None:
    """All rows are packed together. The values of the reference are those of single answers."""
    rows = [json.loads(line) for line in pair_files[0].read_text().splitlines()]
    found = []
    for word in ("dog", "cat"):
        rows[7]["rejected"] = f"the {word} sings"
        file = tmp_path / f"{word}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = model_dir
        if layout == "padded":  # its capped attention needs padded rows
            model = tmp_path / "gemma"
            _write_gemma(model, model_dir)
        run = train_here(
            objective="dpo", model={"path": str(model), "dtype": "float32"}, duration="1 steps",
            data={"train": str(file), "max_length": 512},
        )  # fmt: skip
        assert run.plan.data.train.sequences <= 4
        (ready,) = run.of_kind("ready")
        assert ready["facts"]["layout"] == layout
        found.append(load_file(run.directory / "reference.safetensors")["train"])
    before, after = found
    assert before.shape == (40, 2)
    changed = (before != after).nonzero().tolist()
    assert [7, 1] in changed
    assert abs(float(before[7, 1] - after[7, 1])) > 1e-2
    before[7, 1] = after[7, 1]
    assert torch.allclose(before, after, rtol=0, atol=1e-6)


def _write_gemma(directory: Path, model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return found


@pytest.mark.parametrize("adapter", [{"rank": 4, "alpha": 8}, None], ids=["lora", "full"])
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "simpo"])
def test_logits_of_all_tokens_never_exist_at_once(
    train_here: Train,
    pair_files: tuple[Path, Path],
    rated_files: tuple[Path, Path],
    model_dir: Path,
    tmp_path: Path,
    objective: str,
    adapter: dict[str, Any] | None,
) -> None:
    """In the reference, the rehearsal, the steps and the evaluation."""
    config = transformers.LlamaConfig.from_pretrained(model_dir, vocab_size=_VOCABULARY)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "wide")
    train, unseen = rated_files if objective == "kto" else pair_files
    with _Largest() as largest:
        run = train_here(
            objective=objective, adapter=adapter, model={"path": str(tmp_path / "wide"), "dtype": "float32"}, duration="2 steps",
            data={"train": str(train), "eval": str(unseen), "max_length": 64, "packing": False}, batch={"global": 40, "micro": 40},
        )  # fmt: skip
    assert run.plan.micro_batch == 40
    loss_tokens = run.metrics[0]["loss_tokens"] // (
        2 if objective == "kto" else 1
    )  # half are of mismatched answers
    chunk = _CHUNKS["full" if adapter is None else "lora"]
    assert loss_tokens > chunk
    assert largest.elements == chunk * _VOCABULARY


_OF_PAIRS = {
    "rewards_chosen",
    "rewards_rejected",
    "reward_margin",
    "reward_accuracy",
    "logps_chosen",
    "logps_rejected",
}
_METRICS = {
    "dpo": _OF_PAIRS, "orpo": _OF_PAIRS, "simpo": _OF_PAIRS, "reward": _OF_PAIRS - {"logps_chosen", "logps_rejected"},
    "kto": _OF_PAIRS - {"reward_accuracy"} | {"kl"},
}  # fmt: skip


@pytest.mark.parametrize("objective", _METRICS)
def test_steps_and_evaluations_have_the_metrics_that_the_objective_has(
    train_here: Train, pair_files: tuple[Path, Path], rated_files: tuple[Path, Path], objective: str
) -> None:
    train, unseen = rated_files if objective == "kto" else pair_files
    data = {"train": str(train), "eval": str(unseen), "max_length": 64}
    run = train_here(objective=objective, data=data, duration="2 steps")
    known = _OF_PAIRS | {"kl"}
    steps = [set(line) & known for line in run.metrics if "loss" in line]
    evaluations = [
        {key.removeprefix("eval_") for key in line} & known for line in run.metrics if "eval_loss" in line
    ]
    assert steps == [_METRICS[objective]] * 2
    assert evaluations == [_METRICS[objective]]
    assert set(run.result["eval"]) & known == _METRICS[objective]


def test_a_batch_of_desirable_answers_has_no_metrics_of_others(
    train_here: Train, rated_files: tuple[Path, Path]
) -> None:
    data = {"train": str(rated_files[0]), "eval": str(rated_files[1]), "max_length": 64, "packing": False}
    run = train_here(
        objective="kto",
        data=data,
        batch={"global": 1},
        duration="12 steps",
        eval={"samples": 12, "every": "12 steps"},
    )
    steps = [line for line in run.metrics if "loss" in line]
    desirable = ["rewards_chosen" in line for line in steps]
    assert {True, False} == set(desirable)
    for line, is_desirable in zip(steps, desirable, strict=True):
        assert ("rewards_rejected" in line, "logps_rejected" in line) == (not is_desirable, not is_desirable)
        assert "reward_margin" not in line
        assert "kl" in line
    unseen = [json.loads(line) for line in rated_files[1].read_text().splitlines()]
    wanted = {row["completion"] for row in unseen if row["label"]}
    assert {sample["reference"] for sample in run.of_kind("sample")} == wanted


def test_pass_before_loss_is_rehearsed_seen_as_computing_and_ends_at_stop(
    train_here: Train, rated_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of KTO, for the divergence.

    Its phase decides how long it may take, and an evaluation is not worth the grace period.
    """
    beats, phases, own = Beats(), list[tuple[str, int]](), Kto.first
    stops: list[Any] = []

    def first(self: Kto, forward: Any, micro: Any) -> torch.Tensor:
        phases.append((beats.phase, beats.step))
        if beats.phase == "evaluate" and beats.step == 2:
            stops[0].outcome = "preempted"
        return own(self, forward, micro)

    monkeypatch.setattr(Kto, "first", first)
    monkeypatch.setattr(rank_run, "Beats", lambda: beats)
    run = train_here(
        objective="kto", data={"train": str(rated_files[0]), "eval": str(rated_files[1]), "max_length": 64, "packing": False},
        batch={"global": 8, "micro": 4}, eval={"every": "2 steps"}, duration="4 steps",
        on_message=lambda _, stop: stops.append(stop),
    )  # fmt: skip
    assert (run.result["outcome"], run.result["step"]) == ("preempted", 2)
    rehearsed, before = [("rehearse", 0)], [("evaluate", 0)] * 3
    steps = [("compute", step) for step in (1, 1, 2, 2)]
    assert phases == [*rehearsed, *before, *steps, ("evaluate", 2)]

"""The buffers of CUDA graphs: their shapes, and that padding changes nothing.

The graphs themselves are in tests/gpu/test_kernels.py.

Run: pytest tests/trainer/model/test_cuda_graphs.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from unisono.trainer.model.cuda_graphs import IGNORED, StepGraphs, ends_of, shape_for
from unisono.trainer.model.forward import Forward, Rows, choose_forward
from unisono.trainer.model.load import LoadedModel

LONGEST = 200


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=60),
    share=st.floats(0, 1),
    sequences=st.integers(1, 64),
)
def test_a_shape_has_room_for_its_rows_and_little_more(
    lengths: list[int], share: float, sequences: int
) -> None:
    tokens = sum(lengths)
    most_tokens = max(tokens, sequences * LONGEST)
    labels = max(1, round(share * tokens))
    shape = shape_for(lengths, labels, most_tokens=most_tokens, longest=LONGEST)
    assert tokens <= shape.tokens < tokens + most_tokens / 16 + 64
    assert labels <= shape.labels < labels + most_tokens / 16 + 64
    ends = ends_of(lengths, shape, longest=LONGEST)
    assert (ends.dtype, len(ends), ends[0], ends[-1]) == (np.int32, shape.rows + 1, 0, shape.tokens)
    found = np.diff(ends).tolist()
    assert found[: len(lengths)] == lengths
    assert all(0 <= length <= LONGEST for length in found)


@given(st.lists(st.integers(1, LONGEST), min_size=80, max_size=90))
def test_micro_batches_of_similar_rows_have_few_shapes(lengths: list[int]) -> None:
    lengths = lengths[: next((i for i in range(len(lengths)) if sum(lengths[: i + 1]) > 8000), len(lengths))]
    while sum(lengths) < 7900:
        lengths.append(min(LONGEST, 8000 - sum(lengths)))
    shapes = {
        shape_for(lengths, labels, most_tokens=8000, longest=LONGEST) for labels in range(4400, 4800, 50)
    }
    assert len(shapes) <= 2


@pytest.fixture
def forward() -> Forward:
    """A model on the CPU, all of whose weights are trained."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    base.config.use_cache = False
    loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 0)
    found = choose_forward(loaded, dtype="float32", quick_adapter=False, gradient_checkpointing=False)
    assert (found.layout, found.head) == ("flat", "chunked")
    return found


def _step(forward: Forward, lengths: list[int], seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.randint(0, 512, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    index = (positions[1:] > 0).nonzero()[:, 0]
    loss = forward.loss(Rows(ids, positions, lengths, index, ids[index + 1]), count=len(index))
    gradients = torch.autograd.grad(loss, list(forward.loaded.trainable.values()))
    return loss.detach(), list(gradients)


def test_rows_in_buffers_have_the_loss_and_gradients_they_have_alone(forward: Forward) -> None:
    batches = [([40, 7, 300, 1], 1), ([100, 240, 9], 2), ([5, 6], 3)]
    wanted = [_step(forward, *batch) for batch in batches]
    seen: list[Rows] = []

    def loss(rows: Rows, count: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        counts = rows.labels != IGNORED  # the kernels of a GPU ignore the others themselves
        real = replace(rows, label_index=rows.label_index[counts], labels=rows.labels[counts])
        return forward._loss(real, int(count), 0.0)

    parameters = list(forward.loaded.trainable.values())
    forward.graphs = StepGraphs(loss, parameters, most_tokens=1600, longest=300)
    for batch, (alone, gradients) in zip(batches, wanted, strict=True):
        found, others = _step(forward, *batch)
        torch.testing.assert_close(found, alone)
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)
    assert len(seen) == len(batches)
    assert all(len(rows.input_ids) > sum(lengths) for rows, (lengths, _) in zip(seen, batches, strict=True))


class _Unrecorded(StepGraphs):
    """There is no device that records."""

    def _has_room(self) -> bool:
        return False


def _graphs(forward: Forward) -> StepGraphs:
    def loss(rows: Rows, count: torch.Tensor) -> torch.Tensor:
        counts = rows.labels != IGNORED
        real = replace(rows, label_index=rows.label_index[counts], labels=rows.labels[counts])
        return forward._loss(real, int(count), 0.0)

    parameters = list(forward.loaded.trainable.values())
    return _Unrecorded(loss, parameters, most_tokens=1600, longest=300)


def test_two_losses_of_one_shape_get_gradients_after_both_are_computed(forward: Forward) -> None:
    """An objective of a user may compute two before it calls backward."""
    ids = [torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    place = torch.arange(90)
    both = [Rows(one, place, [90], place[:-1], one[1:]) for one in ids]
    parameters = list(forward.loaded.trainable.values())
    wanted = torch.autograd.grad(sum(forward.loss(rows, count=89) for rows in both), parameters)
    forward.graphs = _graphs(forward)
    found = torch.autograd.grad(sum(forward.loss(rows, count=89) for rows in both), parameters)
    for gradient, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)


def test_a_shape_that_came_once_gives_its_place_to_a_new_one(forward: Forward) -> None:
    graphs = forward.graphs = _graphs(forward)
    for number in range(1, 13):
        _step(forward, [100] * number, number)
    kept = list(graphs._recorded)
    assert len(kept) == 8
    assert kept[-1].tokens == 1280
    for one in graphs._recorded.values():  # as if each had been recorded
        one.graph = object()
    assert not graphs._has_place()


def test_rows_that_do_not_fit_are_computed_as_usual(forward: Forward) -> None:
    def loss(rows: Rows, count: torch.Tensor) -> torch.Tensor:
        raise AssertionError((rows, count))

    forward.graphs = StepGraphs(loss, list(forward.loaded.trainable.values()), most_tokens=1600, longest=299)
    _step(forward, [300, 5], 1)
    with torch.no_grad():
        ids = torch.arange(4)
        forward.loss(Rows(ids, ids, [4], ids[:-1], ids[1:]), count=3)


def test_a_cpu_has_no_graphs(forward: Forward) -> None:
    forward.use_graphs(most_tokens=1600, longest=300)
    assert forward.graphs is None

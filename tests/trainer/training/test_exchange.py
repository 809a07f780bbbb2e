"""Gradients of replicas are summed in buffers of fixed layout.

Run: pytest tests/trainer/training/test_exchange.py
"""

from collections.abc import Callable

import pytest
import torch

from unisono.trainer.training import gradient_sync
from unisono.trainer.training.gradient_sync import ReplicaSync


class Twins:
    """Two ranks that do the same: every sum is twice one's own.

    Keeps the order in which sums begin.
    """

    rank, world_size, is_main = 0, 2, True

    def __init__(self) -> None:
        self.begun: list[int] = []

    def sum(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        self.begun.append(tensor.data_ptr())
        return lambda: tensor.mul_(2)

    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def any(self, statement: bool) -> bool:  # noqa: FBT001 - as the protocol has it
        return statement

    def figures(self, summed: torch.Tensor) -> list[float]:
        return list(summed.tolist())

    def barrier(self) -> None: ...

    def leave_note(self, note: str) -> None: ...

    def has_note(self, note: str) -> bool:
        return False


class Layers(torch.nn.Module):
    """Three matrices in a row, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)])

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        for number, matrix in enumerate(self.matrices):
            if not (skip and number == 1):
                x = torch.tanh(x @ matrix)
        return x.sum()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Layers, Twins, ReplicaSync]:
    """A model whose every matrix has a buffer of its own."""
    monkeypatch.setattr(gradient_sync, "_BUCKET_ELEMENTS", 64)
    layers, group = Layers(), Twins()
    return layers, group, ReplicaSync(group, torch.device("cpu"), list(layers.parameters()), scalars=2)


def _gradients(layers: Layers, inputs: list[torch.Tensor], *, skip: bool = False) -> list[torch.Tensor]:
    fresh = Layers()
    fresh.load_state_dict(layers.state_dict())
    for x in inputs:
        fresh(x, skip=skip).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in fresh.parameters()]


def test_gradients_and_scalars_are_the_sums_over_ranks_and_micro_batches(
    made: tuple[Layers, Twins, ReplicaSync],
) -> None:
    layers, _, replicas = made
    inputs = [torch.randn(4, 8) for _ in range(3)]
    for _ in range(2):  # a second step begins at zero again
        replicas.begin()
        for number, x in enumerate(inputs):
            if number == len(inputs) - 1:
                replicas.before_last_backward()
            layers(x).backward()
        summed = replicas.finish(torch.tensor([1.5, 0.0]))
        replicas.wait_and_time()
        assert summed.tolist() == [3.0, 0.0]
        for parameter, wanted in zip(layers.parameters(), _gradients(layers, inputs), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, 2 * wanted)


def test_buffers_go_early_and_in_the_same_order_with_or_without_rows(
    made: tuple[Layers, Twins, ReplicaSync],
) -> None:
    layers, group, replicas = made
    replicas.begin()
    replicas.before_last_backward()
    layers(torch.randn(4, 8)).backward()
    assert len(group.begun) == 2, "all but the buffer that carries the scalars went during backward"
    replicas.finish(torch.zeros(2))
    busy = list(group.begun)
    group.begun.clear()
    replicas.begin()
    replicas.finish(torch.zeros(2))
    assert group.begun == busy
    assert len(busy) == 3


def test_what_no_rank_has_reached_has_no_gradient(made: tuple[Layers, Twins, ReplicaSync]) -> None:
    """So the optimizer leaves it alone, decay and moments included, as it does on one rank."""
    layers, _, replicas = made
    replicas.begin()
    replicas.before_last_backward()
    layers(torch.randn(4, 8), skip=True).backward()
    replicas.finish(torch.zeros(2))
    replicas.wait_and_time()
    assert [p.grad is None for p in layers.parameters()] == [False, True, False]


def test_one_adapter_has_one_buffer() -> None:
    layers, group = Layers(), Twins()
    replicas = ReplicaSync(group, torch.device("cpu"), list(layers.parameters()), scalars=2)
    replicas.begin()
    replicas.before_last_backward()
    layers(torch.randn(4, 8)).backward()
    assert group.begun == [], "the scalars of the step travel with the gradients"
    replicas.finish(torch.zeros(2))
    assert len(group.begun) == 1


def test_one_rank_opens_no_group(train_here: Callable[..., object]) -> None:
    train_here(duration="1 steps", on_message=lambda message, stop: _no_group())
    _no_group()


def _no_group() -> None:
    assert not torch.distributed.is_initialized()

"""The functions in Triton and the fast layers on a GPU, against torch's operations and the layers
of transformers.

Run: pytest -m gpu tests/gpu/test_kernels.py. The first two tests also run without a GPU, in
Triton's interpreter, which truncates bfloat16 values: TRITON_INTERPRET=1 pytest -W
ignore::DeprecationWarning -m gpu tests/gpu/test_kernels.py
"""

import importlib.util
import os
import time
from typing import TYPE_CHECKING

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unisono.trainer.model import forward as forwards
from unisono.trainer.model.cuda_graphs import IGNORED, StepGraphs
from unisono.trainer.model.directory import facts_of_shape
from unisono.trainer.model.forward import Forward, Rows, choose_forward
from unisono.trainer.model.kernels import AdamWFigures
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import estimate_memory
from unisono.trainer.training.optim import adamw_by_torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None
if TYPE_CHECKING or _HAS_TRITON:  # a skipped module would count as a test that was not run
    from unisono.trainer.model.cuda_kernels import CudaKernels, _rotate

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ON = "cpu" if _INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(not _INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_device = pytest.mark.skipif(_INTERPRETED, reason="needs a CUDA device")

_LENGTHS = [40, 7, 300, 1]


def _near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.01) -> None:
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= tolerance * wanted.norm(), (found - wanted).norm() / wanted.norm()


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=_ON).to(dtype)


def test_adamw_with_compact_moments_equals_torchs_operations() -> None:
    found: list[list[torch.Tensor]] = []
    for update in (CudaKernels().adamw, adamw_by_torch):
        torch.manual_seed(0)
        values, moments = torch.randn(5000, device=_ON), tuple(_values(5000).abs() for _ in range(2))
        for seed in (0, 12345, 2**31 - 1):
            update(
                values, torch.randn(5000, device=_ON), moments,
                AdamWFigures(decay=0.99, share1=0.1, share2=0.001, step_size=0.01, scale=0.5, eps=1e-8, seed=seed),
            )  # fmt: skip
        found.append([values, *moments])
    torch.testing.assert_close(*found, rtol=0.01, atol=1e-6)
    assert all((ours == theirs).float().mean() > 0.99 for ours, theirs in list(zip(*found, strict=True))[1:])


@pytest.mark.parametrize(("tokens", "width"), [(7, 48), (33, 576), (1, 4096)])
def test_norms_and_gates_equal_torchs_and_so_do_their_gradients(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    kernels = CudaKernels()
    grad = _values(tokens, width)
    for dtype in (torch.bfloat16, torch.float32):
        x = _values(tokens, width, dtype=dtype)
        weight = torch.rand(width, device=_ON).to(dtype) + 0.5
        wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
        wanted = torch.nn.functional.rms_norm(wide[0], (width,), wide[1], 1e-5)
        of_x, of_weight = torch.autograd.grad(wanted, wide, grad.double())
        if dtype == torch.bfloat16:
            y, factor = kernels.norm(x, weight, 1e-5)
            _near(kernels.norm_backward(grad, x, weight, factor), of_x)
        else:
            y, factor = kernels.wide_norm(x, weight, 1e-5)
            d_x, d_weight = kernels.wide_norm_backward(grad, x, weight, factor)
            _near(d_x, of_x, 1e-5)
            _near(d_weight, of_weight, 1e-5)
        assert y.dtype == torch.bfloat16
        _near(y, wanted)
    joint = _values(tokens, 2 * width + 24)
    gate, up = joint[:, :width], joint[:, width : 2 * width]
    both = [gate.double().requires_grad_(), up.double().requires_grad_()]
    wanted = torch.nn.functional.silu(both[0]) * both[1]
    grads = torch.autograd.grad(wanted, both, grad.double())
    _near(kernels.gate(gate, up), wanted)
    rest = joint[:, 2 * width :].clone()
    _near(kernels.gate_backward(grad, gate, up), wanted)
    for found, expected in zip((gate, up), grads, strict=True):  # in the place of the values
        _near(found, expected)
    assert torch.equal(joint[:, 2 * width :], rest)


@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 300), (3, 9001)])
def test_cross_entropy_and_its_gradient_equal_torchs(rows: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    kernels = CudaKernels()
    logits, labels = 3 * _values(rows, vocabulary), torch.randint(0, vocabulary, (rows,), device=_ON)
    wide = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum() / 100, wide)
    before = logits.clone()
    _near(kernels.cross_entropy(logits, labels, 0.0), wanted, 1e-4)
    assert torch.equal(logits, before)
    _near(kernels.cross_entropy(logits.clone(), labels, 0.01), wanted, 1e-4)
    labels[1] = IGNORED  # a label of no loss
    wanted[1], gradient[1] = 0.0, 0.0
    _near(kernels.cross_entropy(logits, labels, torch.tensor(0.01, device=_ON)), wanted, 1e-4)
    _near(logits, gradient)


def test_heads_are_rotated_and_gradients_back() -> None:
    torch.manual_seed(0)
    q = _values(9, 3 * 64 + 30)[:, :192].unflatten(1, (3, 64))
    cosine, sine = (torch.randn(9, 64, device=_ON) for _ in range(2))
    wide = q.double().requires_grad_()
    turned = torch.cat((-wide[..., 32:], wide[..., :32]), -1)
    wanted = wide * cosine[:, None] + turned * sine[:, None]
    grad = _values(9, 3, 64)
    (gradient,) = torch.autograd.grad(wanted, wide, grad.double())
    found = torch.empty_like(grad)
    _rotate(grad, found, (cosine, sine), back=True)
    _near(found, gradient)
    _rotate(q, q, (cosine, sine), back=False)
    _near(q, wanted)


def _forward(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, fast: bool, layers: int = 4, rank: int = 4
) -> Forward:
    """A model with the fast layers or without."""
    if not fast:
        monkeypatch.setattr(forwards, "speed_up_layers", lambda _model: [])
    torch.manual_seed(0)
    config: LlamaConfig = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    base: torch.nn.Module = LlamaForCausalLM(config)
    base.config.use_cache = False
    if kind == "full":
        base = base.to("cuda")
        loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 0)
    else:
        base = base.to("cuda", torch.bfloat16)
        settings = peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, settings)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data = 0.05 * torch.randn_like(parameter.data.float())
        loaded = LoadedModel(model, base, None, trained, 0)
    found = choose_forward(
        loaded, dtype="bfloat16", quick_adapter=kind == "lora", gradient_checkpointing=False
    )
    assert (found.layout, found.head) == ("flat", "chunked"), found.why
    assert (found.fast_layers > 0) == fast
    monkeypatch.undo()
    return found


def _step(
    forward: Forward, lengths: list[int] = _LENGTHS, seed: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (sum(lengths),), generator=generator).cuda()
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    index = (positions[1:] > 0).nonzero()[:, 0]
    loss = forward.loss(Rows(ids, positions, lengths, index, ids[index + 1]), count=len(index))
    loss.backward()
    trained = forward.loaded.trainable
    grads = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    assert set(grads) == set(trained)
    forward.loaded.model.zero_grad()
    return loss.detach(), grads


@on_device
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_fast_layers_give_the_loss_and_the_gradients_of_the_models_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = _forward(kind, monkeypatch, fast=True)
    slow = _forward(kind, monkeypatch, fast=False)
    (mine, grads), (theirs, wanted) = _step(fast), _step(slow)
    _near(mine, theirs, 1e-3)
    for name, gradient in grads.items():
        _near(gradient, wanted[name], 0.05)


@on_device
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_step_gives_the_same_bits_each_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming is exact only then; flash attention adds up the gradient of queries in any order
    unless told not to.
    """
    forward = _forward(kind, monkeypatch, fast=True)
    loss, grads = _step(forward)
    for _ in range(5):
        again, others = _step(forward)
        assert torch.equal(loss, again)
        assert all(torch.equal(gradient, others[name]) for name, gradient in grads.items())
    assert not torch.are_deterministic_algorithms_enabled()


@on_device
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_layers_keep_as_much_memory_for_backward_as_is_estimated(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, estimated = [], []
    lengths = [1000] * 16
    ids = torch.randint(0, 512, (sum(lengths),), device="cuda")
    positions = torch.arange(1000, device="cuda").repeat(16)
    index = torch.arange(0, len(ids), 2, device="cuda")
    rows = Rows(ids, positions, lengths, index, ids[index])
    for layers in (2, 6):
        forward = _forward(kind, monkeypatch, fast=True, layers=layers, rank=16)
        before = torch.cuda.memory_allocated()
        loss = forward.loss(rows, count=len(index))
        kept.append(torch.cuda.memory_allocated() - before)
        del loss
        estimate = estimate_memory(
            facts_of_shape(forward.loaded.base.config.to_dict()), dtype="bfloat16", adapter_rank=16 if kind == "lora" else None,
            micro_tokens=len(ids), longest_row=1000, gradient_checkpointing=False, on_gpu=True, fast_layers=True,
        )  # fmt: skip
        estimated.append(estimate.activations)
    ratio = (estimated[1] - estimated[0]) / (kept[1] - kept[0])
    assert 0.96 < ratio < 1.06, ratio


@on_device
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_graphs_give_the_losses_and_gradients_of_their_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = _forward(kind, monkeypatch, fast=True)
    batches = [(_LENGTHS, 1), ([100, 240, 9], 2), (_LENGTHS, 1), ([333], 3), ([5, 6], 4)]
    wanted = [_step(forward, *batch) for batch in batches]
    forward.use_graphs(most_tokens=400, longest=400)
    graphs = forward.graphs
    assert graphs is not None
    before: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
    for _ in range(3):  # of the same shape each, but the last: recorded at the second
        for (loss, grads), batch in zip(wanted, batches, strict=True):
            found, others = _step(forward, *batch)
            _near(found, loss, 1e-3)
            for name, gradient in grads.items():
                _near(others[name], gradient, 0.02)
            if before is not None and batch == batches[0]:  # first as usual, then from a graph
                assert torch.equal(found, before[0])
                assert all(torch.equal(value, before[1][name]) for name, value in others.items())
            before = before or (found, others)
    assert not graphs.why
    assert sum(one.graph is not None for one in graphs._recorded.values()) >= 2


@on_device
def test_a_forward_that_waits_for_the_device_is_computed_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = _forward("lora", monkeypatch, fast=True)
    (loss, grads), usual = _step(forward), forward._loss

    def waits(rows: Rows, count: torch.Tensor) -> torch.Tensor:
        assert rows.input_ids.sum().item() >= 0
        return usual(rows, count, 0.0)

    forward.graphs = StepGraphs(waits, list(forward.loaded.trainable.values()), most_tokens=400, longest=400)
    for _ in range(4):
        found, others = _step(forward)
        _near(found, loss, 1e-3)
        for name, gradient in grads.items():
            _near(others[name], gradient, 0.02)
    assert "captur" in forward.graphs.why, forward.graphs.why
    torch.manual_seed(5)
    drawn = torch.randn(3, device="cuda")  # the generator is as it was
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3, device="cuda"), drawn)


@on_device
def test_a_graph_launches_a_step_faster_than_python(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = _forward("lora", monkeypatch, fast=True, layers=24)

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            _step(forward)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds()
    usual = seconds()
    forward.use_graphs(most_tokens=400, longest=400)
    seconds()
    assert seconds() < 0.8 * usual

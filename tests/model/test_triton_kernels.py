"""The functions in Triton give the values of torch in float64, and the fast layers with them those of transformers and peft.

Triton comes with torch's builds for CUDA. Run: pytest -m gpu tests/model/test_triton_kernels.py; without a device they run in Triton's interpreter:
TRITON_INTERPRET=1 pytest tests/model/test_triton_kernels.py
"""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.model import test_decoder as of_cpu
from unisono.model import decoder, kernels, layers
from unisono.model.triton_kernels import TritonKernels, load_triton_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or TRITON_INTERPRET=1",
    ),
]


@pytest.fixture(scope="module")
def triton() -> TritonKernels:
    found = load_triton_kernels(DEVICE)
    assert found is not None
    return found


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(DEVICE)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.detach()).norm() / wanted.detach().norm())


ROUNDED = 0.005  # bfloat16 has eight bits


def test_a_norm_and_its_gradient(triton: TritonKernels) -> None:
    x, weight, grad = _random(7, 72), 1 + _random(72) / 8, _random(7, 72)
    y, factor = triton.norm(x, weight, 1e-5)
    exact = _exact(x)
    wanted = exact * (exact.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    wanted.backward(grad.double())
    assert _error(y, wanted) < ROUNDED
    assert exact.grad is not None
    assert _error(triton.norm_backward(grad, x, weight, factor), exact.grad) < ROUNDED


def test_a_gate_and_its_gradients_in_the_memory_of_its_inputs(triton: TritonKernels) -> None:
    joint, grad = _random(5, 3016), _random(5, 1500)
    rest = joint[:, 3000:].clone()
    gate, up = joint[:, :1500], joint[:, 1500:3000]
    of_gate, of_up = _exact(gate), _exact(up)
    wanted = torch.nn.functional.silu(of_gate) * of_up
    wanted.backward(grad.double())
    assert _error(triton.gate(gate, up), wanted) < ROUNDED
    assert _error(triton.gate_backward(grad, gate, up), wanted) < ROUNDED
    assert of_gate.grad is not None
    assert of_up.grad is not None
    assert _error(gate, of_gate.grad) < ROUNDED
    assert _error(up, of_up.grad) < ROUNDED
    assert torch.equal(joint[:, 3000:], rest)


@pytest.mark.parametrize(("heads", "kv", "size"), [(9, 3, 64), (8, 2, 32), (6, 6, 48)])
def test_a_rotation_and_its_gradients(triton: TritonKernels, heads: int, kv: int, size: int) -> None:
    width = (heads + 2 * kv) * size
    joint, cosine, sine = _random(11, width + 24), _random(11, size).float(), _random(11, size).float()
    exact = _exact(joint)
    wanted = []
    for part, turns in zip(
        exact[:, :width].split([heads * size, kv * size, kv * size], 1), (True, True, False), strict=True
    ):
        x = part.unflatten(1, (-1, size))
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        wanted.append(x * cosine.double()[:, None] + turned * sine.double()[:, None] if turns else x)
    grads = [_random(*part.shape) for part in wanted]
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    found = triton.rotate(joint, (cosine, sine), heads=heads, kv=kv, size=size)
    for mine, theirs in zip(found, wanted, strict=True):
        assert _error(mine, theirs) < ROUNDED
    into = torch.full_like(joint, 7.0)
    triton.rotate_back((grads[0], grads[1], grads[2]), (cosine, sine), into)
    assert exact.grad is not None
    assert _error(into[:, :width], exact.grad[:, :width]) < ROUNDED
    assert bool((into[:, width:] == 7).all())


@pytest.mark.parametrize("size", [97, 4096, 9001])
def test_cross_entropy_and_its_gradient_in_the_memory_of_the_logits(triton: TritonKernels, size: int) -> None:
    logits, labels = 3 * _random(6, size), torch.arange(6, device=DEVICE) * 13
    exact = _exact(logits)
    wanted = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (wanted.sum() * 0.25).backward()
    kept = logits.clone()
    assert _error(triton.cross_entropy(logits, labels, 0.0), wanted) < 1e-6
    assert torch.equal(logits, kept)
    assert _error(triton.cross_entropy(logits, labels, 0.25), wanted) < 1e-6
    assert exact.grad is not None
    assert _error(logits, exact.grad) < ROUNDED


def test_a_logit_that_is_no_number_shows_in_the_loss_of_its_row_alone(triton: TritonKernels) -> None:
    logits = _random(2, 97)
    logits[0, 5] = float("nan")
    losses = triton.cross_entropy(logits, torch.tensor([1, 2], device=DEVICE), 0.5)
    assert torch.isnan(losses).tolist() == [True, False]


@pytest.mark.parametrize("kind", of_cpu._MODELS)
def test_layers_are_as_near_to_float32_as_those_of_torch(
    kind: str, triton: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoder, layers):
        monkeypatch.setattr(module, "kernels_on", lambda _device: triton)
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    config, count = of_cpu._MODELS[kind]
    monkeypatch.setattr(of_cpu, "_LENGTHS", [5, 9, 40, 1])  # the interpreter is slow

    def model(dtype: torch.dtype) -> Any:
        return of_cpu._model(config, dtype=dtype).to(DEVICE)

    inputs = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in of_cpu._inputs().items()
    }
    monkeypatch.setattr(of_cpu, "_inputs", lambda: inputs)
    exact = of_cpu._outcome(model(torch.float32))
    slow, fast = (model(torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        fast(**inputs)  # attentions note their settings
    assert len(decoder.speed_up_layers(fast)) == count
    theirs, mine = of_cpu._outcome(slow), of_cpu._outcome(fast)
    assert mine.keys() == exact.keys()
    more = (
        1.3 if DEVICE.type == "cuda" else 2.0
    )  # the interpreter cuts float32 off to bfloat16, and does not round
    for name, wanted in exact.items():
        assert of_cpu._error(mine[name], wanted) < more * of_cpu._error(theirs[name], wanted) + 0.002, name

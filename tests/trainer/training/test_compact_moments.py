"""AdamW with moments in bfloat16: rounding keeps means, and the functions in C and of torch make
the same updates.

Run: pytest tests/trainer/training/test_compact_moments.py
"""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.model.kernels import AdamWFigures, load_kernels
from unisono.trainer.training import optim
from unisono.trainer.training.optim import adamw_by_torch, build_optimizers

USUAL = AdamWFigures(decay=1.0, share1=0.1, share2=0.001, step_size=0.01, scale=1.0, eps=1e-8, seed=7)


def _trained(
    dtype: Literal["float32", "bfloat16"], *, steps: int, grads: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A parameter after some steps of the optimizer of a config, and the optimizer's state for
    it.
    """
    section = OptimSection(lr=0.01, state_dtype=dtype, weight_decay=0.1)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 6000).view(60, 100).clone())
    optimizers = build_optimizers(section, {"weight": parameter}, not_matrices=set())
    for step in range(steps):
        parameter.grad = grads(step)
        optimizers.step()
    return parameter.detach(), dict(optimizers.parts["adamw"].state[parameter])


def test_the_two_functions_make_the_same_updates() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("needs a C compiler")
    torch.manual_seed(0)
    size = 50_001
    found = []
    for update in (kernels.adamw, adamw_by_torch):
        torch.manual_seed(0)
        values, moments = torch.randn(size), tuple(torch.zeros(size, dtype=torch.bfloat16) for _ in range(2))
        for seed in range(3):
            update(values, torch.randn(size), moments, USUAL._replace(decay=0.99, scale=0.5, seed=seed))
        found.append((values, *moments))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5 if ours.dtype == torch.float32 else 0.02, atol=1e-6
        )
        assert ours.dtype == torch.float32 or (ours == theirs).float().mean() > 0.999


@settings(max_examples=50, deadline=None)
@given(value=st.floats(2.0**-20, 2.0**20, width=32), seed=st.integers(0, 2**31 - 1))
def test_a_moment_becomes_one_of_its_two_neighbours_and_the_mean_stays(value: float, seed: int) -> None:
    size = 1 << 14
    for update in filter(None, (adamw_by_torch, getattr(load_kernels(), "adamw", None))):
        moments = tuple(torch.zeros(size, dtype=torch.bfloat16) for _ in range(2))
        update(
            torch.zeros(size),
            torch.full((size,), value),
            moments,
            USUAL._replace(share1=1.0, share2=0.0, seed=seed),
        )
        found = moments[0].unique().double()
        below = torch.tensor(value).view(torch.int32) >> 16 << 16
        low, high = (bits.view(torch.float32).double() for bits in (below, below + (1 << 16)))
        assert set(found.tolist()) <= {low.item(), high.item()}
        # The share that is rounded up has a standard deviation of at most 0.5 / √size.
        assert abs(moments[0].double().mean() - value) <= 5 * 0.5 / size**0.5 * (high - low)


def test_second_moments_follow_their_gradients_as_float32_does() -> None:
    """Rounded to nearest they would stop: with betas[1] 0.999 a change is below half of the
    distance between two values.
    """

    def grads(step: int) -> torch.Tensor:
        return torch.full((60, 100), 1.0 if step < 300 else 0.1)

    _, wide = _trained("float32", steps=600, grads=grads)
    _, compact = _trained("bfloat16", steps=600, grads=grads)
    assert compact["exp_avg_sq"].dtype == compact["exp_avg"].dtype == torch.bfloat16
    for name in ("exp_avg", "exp_avg_sq"):
        assert compact[name].double().mean().item() == pytest.approx(
            wide[name].double().mean().item(), rel=0.01
        )
    nearest = torch.tensor(wide["exp_avg_sq"].max().item(), dtype=torch.bfloat16)
    assert nearest * 0.999 + 0.001 * 0.01 == nearest, "or this test shows nothing"


def test_weights_stay_near_those_of_adamw_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    drift = torch.randn(60, 100, generator=generator)
    noise = [torch.randn(60, 100, generator=generator) for _ in range(200)]
    wide, _ = _trained("float32", steps=200, grads=lambda step: drift + noise[step])
    compact, _ = _trained("bfloat16", steps=200, grads=lambda step: drift + noise[step])
    start = torch.linspace(-1, 1, 6000).view(60, 100)
    assert (compact - wide).norm() < 0.01 * (wide - start).norm()
    assert not torch.equal(compact, wide)


def test_an_update_does_not_depend_on_the_number_of_threads() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("needs a C compiler")
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            values, moments = (
                torch.ones(100_000),
                tuple(torch.zeros(100_000, dtype=torch.bfloat16) for _ in range(2)),
            )
            kernels.adamw(values, torch.linspace(-1, 1, 100_000), moments, USUAL)
            found.append((values, *moments))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_gradients_that_are_widened_in_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of an element depends on its parameter, not on the block that the parameter is
    updated in.
    """
    section = OptimSection(lr=0.01, state_dtype="bfloat16")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setitem(optim._BLOCK_ELEMENTS, "cpu", 2500)
        parameters = {name: torch.nn.Parameter(torch.ones(30, 60)) for name in "abc"}
        optimizers = build_optimizers(section, parameters, not_matrices=set())
        torch.manual_seed(0)
        for parameter in parameters.values():
            parameter.grad_dtype = None
            parameter.grad = torch.randn(30, 60).bfloat16().to(dtype)
        optimizers.step()
        states = optimizers.parts["adamw"].state
        found.append([tensor for p in parameters.values() for tensor in (p.detach(), *states[p].values())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert not torch.equal(found[0][2], found[0][6]), "each parameter is rounded in its own way"

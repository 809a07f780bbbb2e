"""Properties of the losses of objectives. Run: pytest tests/trainer/objectives/test_losses.py"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.objectives.preference import (
    dft_losses,
    dpo_losses,
    kto_losses,
    orpo_losses,
    reward_losses,
    simpo_losses,
)

PairLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": lambda c, r: dpo_losses(c, r, beta=0.3),
    "smoothed": lambda c, r: dpo_losses(c, r, beta=0.3, label_smoothing=0.2),
    "hinge": lambda c, r: dpo_losses(c, r, beta=0.3, kind="hinge"),
    "ipo": lambda c, r: dpo_losses(c, r, beta=0.3, kind="ipo"),
    "orpo": lambda c, r: orpo_losses(c, r, beta=0.3),
    "simpo": lambda c, r: simpo_losses(c, r, beta=2.0, gamma=1.0),
    "reward": reward_losses,
}
BELOW_0 = st.floats(-40.0, -(2.0**-10), width=32)
PAIRS = st.lists(st.tuples(BELOW_0, BELOW_0), min_size=2, max_size=12)
BETA = st.floats(0.01, 5.0)


def tensors(pairs: list[tuple[float, float]], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.tensor(pairs, dtype=dtype).unbind(1)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_pairs_at_their_reference_have_a_known_loss(beta: float) -> None:
    zero = torch.zeros(3)
    assert dpo_losses(zero, zero, beta=beta).tolist() == pytest.approx([math.log(2)] * 3, rel=1e-6)
    smoothed = dpo_losses(zero, zero, beta=beta, label_smoothing=0.3)
    assert smoothed.tolist() == pytest.approx([math.log(2)] * 3, rel=1e-6)
    assert dpo_losses(zero, zero, beta=beta, kind="hinge").tolist() == [1.0] * 3
    ipo = dpo_losses(zero, zero, beta=beta, kind="ipo")
    assert ipo.tolist() == pytest.approx([1 / (4 * beta**2)] * 3, rel=1e-6)
    assert reward_losses(zero, zero).tolist() == pytest.approx([math.log(2)] * 3, rel=1e-6)
    rated = kto_losses(zero, torch.tensor([True, False, True]), beta=beta, kl=0.0, desirable_weight=2.0)
    assert rated.tolist() == [1.0, 0.5, 1.0]


@given(PAIRS, BETA, st.floats(0.0, 0.49))
def test_a_smoothed_loss_is_a_mean_of_a_pair_and_its_swap(
    pairs: list[tuple[float, float]], beta: float, smoothing: float
) -> None:
    chosen, rejected = tensors(pairs)
    plain, swapped = dpo_losses(chosen, rejected, beta=beta), dpo_losses(rejected, chosen, beta=beta)
    smoothed = dpo_losses(chosen, rejected, beta=beta, label_smoothing=smoothing)
    assert torch.allclose(smoothed, (1 - smoothing) * plain + smoothing * swapped, rtol=1e-5)
    assert torch.all(smoothed >= torch.minimum(plain, swapped) * (1 - 1e-5))
    assert torch.all(smoothed <= torch.maximum(plain, swapped) * (1 + 1e-5))
    # The swap changes the sign of the margin only: -ln σ(m) + ln σ(-m) = -m.
    assert torch.allclose(plain - swapped, -beta * (chosen - rejected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(st.data())
def test_a_loss_falls_when_the_chosen_answer_gets_likelier(name: str, data: st.DataObject) -> None:
    loss = PAIR_LOSSES[name]
    low, high = sorted((data.draw(BELOW_0), data.draw(BELOW_0)))
    other = torch.tensor([data.draw(BELOW_0)])
    if name in (
        "smoothed",
        "ipo",
    ):  # these two have a best margin: (ln 4) / 0.3 of smoothing 0.2, and 1 / 0.6
        low, high = (min(float(other) + x / 40, float(other) + 1.6) for x in (low, high))
    at_low, at_high = (loss(torch.tensor([x]), other).item() for x in (low, high))
    assert at_high <= at_low * (1 + 1e-5)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(PAIRS, st.integers(1, 11))
def test_a_sum_over_any_split_of_units_is_that_of_the_whole(
    name: str, pairs: list[tuple[float, float]], cut: int
) -> None:
    loss = PAIR_LOSSES[name]
    chosen, rejected = tensors(pairs)
    parts = loss(chosen[:cut], rejected[:cut]).sum() + loss(chosen[cut:], rejected[cut:]).sum()
    assert torch.allclose(parts, loss(chosen, rejected).sum(), rtol=1e-5)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_of_pairs_equal_finite_differences(name: str) -> None:
    # Values on both sides of every branch: of 1 - exp(x) at -ln 2, and of the hinge at a margin of
    # 1.
    pairs = [(-0.01, -0.3), (-0.68, -0.70), (-3.0, -0.2), (-0.5, -9.0), (-30.0, -1.0)]
    chosen, rejected = (t.requires_grad_() for t in tensors(pairs, torch.float64))
    assert torch.autograd.gradcheck(PAIR_LOSSES[name], (chosen, rejected))


def test_gradients_of_rated_answers_equal_finite_differences() -> None:
    ratios = torch.tensor([-3.0, 0.5, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    desirable = torch.tensor([True, False, True, False])
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    assert torch.autograd.gradcheck(
        lambda r: kto_losses(r, desirable, beta=0.4, kl=0.8, **weights).double(), (ratios,)
    )


@given(st.lists(st.floats(-20.0, 20.0, width=32), min_size=1, max_size=8), st.floats(0.0, 5.0), BETA)
def test_rated_answers_have_mirrored_losses_within_their_weight(
    ratios: list[float], kl: float, beta: float
) -> None:
    values = torch.tensor(ratios)
    wanted = kto_losses(values, torch.ones(len(ratios), dtype=torch.bool), beta=beta, kl=kl)
    unwanted = kto_losses(values, torch.zeros(len(ratios), dtype=torch.bool), beta=beta, kl=kl)
    assert torch.allclose(wanted + unwanted, torch.ones(len(ratios)), rtol=1e-5)
    assert torch.all((wanted >= 0) & (wanted <= 1))


@pytest.mark.parametrize("beta", [0.1, 2.5])
def test_the_odds_ratio_is_that_of_probabilities(beta: float) -> None:
    p, q = torch.tensor([0.9, 0.3, 0.501, 1e-4]), torch.tensor([0.2, 0.8, 0.499, 0.99])
    odds = (p / (1 - p)) / (q / (1 - q))
    wanted = -beta * torch.log(odds / (1 + odds))
    assert torch.allclose(orpo_losses(p.log(), q.log(), beta=beta), wanted, rtol=1e-5)


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-200.0, -1e-9)])
def test_the_odds_ratio_is_finite_at_a_probability_of_one(chosen: float, rejected: float) -> None:
    at = [torch.tensor([x], requires_grad=True) for x in (chosen, rejected)]
    losses = orpo_losses(*at, beta=0.1)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in at)


def test_gamma_is_a_margin_of_rewards() -> None:
    # At a difference of gamma / beta the rewards differ by gamma, and the loss is that of a tie.
    chosen = torch.tensor([-1.0])
    assert simpo_losses(chosen, chosen - 0.25, beta=2.0, gamma=0.5).item() == pytest.approx(
        math.log(2), rel=1e-6
    )


def test_a_token_is_weighted_by_its_probability_without_a_gradient() -> None:
    log_probs = torch.tensor([-0.1, -2.0, -50.0], requires_grad=True)
    losses = dft_losses(log_probs)
    assert torch.allclose(losses, -log_probs * log_probs.exp())
    losses.sum().backward()
    assert log_probs.grad is not None
    assert torch.allclose(log_probs.grad, -log_probs.detach().exp())

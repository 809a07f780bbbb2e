"""Properties of the losses of sampled answers, and values of other suites for the same losses.

Run: pytest tests/trainer/objectives/test_policy.py
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.trainer.config.rollout_sections import GrpoSection
from unisono.trainer.objectives.policy import (
    LARGEST,
    POLICY_METRICS,
    PolicyBatch,
    cispo_losses,
    clipped_losses,
    correction_weights,
    k3,
    policy_loss,
)

LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo")
LONGEST = 9  # max_new_tokens
LOG_PROB = st.floats(-4.0, -(2.0**-10), width=32)


@dataclass(frozen=True)
class Answer:
    """An answer: of each token its log-probability now, when sampled, and under the reference."""

    tokens: list[tuple[float, float, float]]
    advantage: float
    has_loss: bool


ANSWERS = st.lists(
    st.builds(
        Answer,
        st.lists(st.tuples(LOG_PROB, LOG_PROB, LOG_PROB), min_size=1, max_size=LONGEST),
        st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=7,
)


def _batch(answers: Sequence[Answer], *, reference: bool, dtype: torch.dtype = torch.float32) -> PolicyBatch:
    new, old, under = torch.tensor([t for answer in answers for t in answer.tokens], dtype=dtype).unbind(1)
    return PolicyBatch(
        new.clone().requires_grad_(), old, under if reference else None,
        torch.tensor([answer.advantage for answer in answers], dtype=dtype), [len(answer.tokens) for answer in answers],
        torch.tensor([answer.has_loss for answer in answers]),
    )  # fmt: skip


def _section(loss: str, **settings: Any) -> GrpoSection:
    return GrpoSection.model_validate({"loss": loss, **settings})


def _totals(answers: Sequence[Answer]) -> dict[str, int]:
    """The counts of a step of these answers."""
    tokens = sum(len(answer.tokens) for answer in answers if answer.has_loss)
    return {"answers": len(answers), "loss_tokens": tokens, "max_new_tokens": LONGEST}


def _gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, of)
    return gradient


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40)
@given(answers=ANSWERS, cuts=st.sets(st.integers(1, 6)), beta=st.sampled_from([0.0, 0.4]))
def test_the_parts_of_any_split_into_micro_batches_add_up(
    loss: str, answers: list[Answer], cuts: set[int], beta: float
) -> None:
    section, totals = _section(loss, beta=beta, dual_clip=3.0), _totals(answers)
    whole = _batch(answers, reference=beta > 0)
    one = policy_loss(whole, section, **totals)
    ends = [0, *sorted(cut for cut in cuts if cut < len(answers)), len(answers)]
    batches = [_batch(answers[a:b], reference=beta > 0) for a, b in itertools.pairwise(ends)]
    parts = [policy_loss(batch, section, **totals) for batch in batches]
    assert torch.allclose(torch.stack([part.loss for part in parts]).sum(), one.loss, rtol=1e-6, atol=1e-6)
    assert torch.allclose(sum(part.sums for part in parts), one.sums, rtol=1e-6, atol=1e-5)
    gradients = [_gradient(part.loss, batch.new) for part, batch in zip(parts, batches, strict=True)]
    assert torch.allclose(torch.cat(gradients), _gradient(one.loss, whole.new), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40)
@given(answers=ANSWERS)
def test_an_answer_without_a_loss_counts_but_adds_nothing(loss: str, answers: list[Answer]) -> None:
    """It may as well be absent from the micro batch."""
    section, totals = _section(loss, beta=0.4), _totals(answers)
    batch = _batch(answers, reference=True)
    part = policy_loss(batch, section, **totals)
    gradient = _gradient(part.loss, batch.new)
    assert not gradient[~batch.spread(batch.has_loss)].any()
    kept = [answer for answer in answers if answer.has_loss]
    if kept:
        rest = policy_loss(_batch(kept, reference=True), section, **totals)
        assert torch.allclose(rest.loss, part.loss, rtol=1e-6, atol=1e-6)
        assert torch.allclose(rest.sums, part.sums, rtol=1e-6, atol=1e-5)
    else:
        assert part.loss.item() == 0.0
        assert not part.sums.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_an_answer_without_tokens_adds_nothing(loss: str) -> None:
    full = Answer([(-1.0, -1.2, -0.9), (-2.0, -1.9, -2.2)], 1.5, has_loss=True)
    batch = _batch([full], reference=True)
    counts, both = [2, 0], {"advantages": torch.tensor([1.5, -3.0]), "has_loss": torch.tensor([True, True])}
    with_empty = PolicyBatch(batch.new, batch.old, batch.reference, counts=counts, **both)
    section = _section(loss, beta=0.4)
    part, wanted = (
        policy_loss(b, section, answers=2, loss_tokens=2, max_new_tokens=4) for b in (with_empty, batch)
    )
    assert part.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    assert part.sums.tolist() == pytest.approx(wanted.sums.tolist(), rel=1e-6)
    assert torch.isfinite(_gradient(part.loss, batch.new)).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_at_the_weights_that_sampled_the_gradient_is_that_of_reinforce(loss: str) -> None:
    """-a of each token, by its weight in the mean; nothing is clipped."""
    answers = [
        Answer([(x, x, x) for x in (-1.0, -0.5, -2.0)], 1.5, has_loss=True),
        Answer([(-0.7, -0.7, -0.7)], -0.5, has_loss=True),
    ]
    batch = _batch(answers, reference=True)
    part = policy_loss(batch, _section(loss, beta=0.4, dual_clip=3.0), **_totals(answers))
    of_token = {"dr_grpo": [18, 18], "grpo": [6, 2], "gspo": [6, 2], "rloo": [2, 2]}.get(loss, [4, 4])
    wanted = [-1.5 / of_token[0]] * 3 + [0.5 / of_token[1]]
    assert _gradient(part.loss, batch.new).tolist() == pytest.approx(wanted, rel=1e-6)
    figures = dict(zip(POLICY_METRICS, part.sums[::2].tolist(), strict=True))
    assert figures == {
        "ratio": pytest.approx(2 if loss in ("gspo", "rloo") else 4),
        **dict.fromkeys(POLICY_METRICS[1:], 0),
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_finite_differences(loss: str) -> None:
    # Ratios on both sides of every bound, for both signs.
    tokens = [(-1.0, -1.5, -1.1), (-1.0, -0.6, -0.5), (-2.0, -2.05, -2.1), (-0.5, -2.0, -3.0)]
    answers = [
        Answer(tokens[:3], 1.5, has_loss=True),
        Answer(tokens[1:], -0.7, has_loss=True),
        Answer(tokens, 0.0, has_loss=True),
    ]
    batch = _batch(answers, reference=True, dtype=torch.float64)
    section = _section(loss, beta=0.4, dual_clip=2.0)
    if loss == "cispo":  # its ratio has no gradient, so that the loss is another function
        ratios = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
        advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
        new = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda x: cispo_losses(x, ratios, advantages, clip=(0.2, 0.28)), (new,)
        )
        return
    assert torch.autograd.gradcheck(
        lambda new: policy_loss(replace(batch, new=new), section, **_totals(answers)).loss, (batch.new,)
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_loss_and_its_gradient_are_finite_at_any_ratio(loss: str, advantage: float, shift: float) -> None:
    answers = [Answer([(-400.0, -400.0 + shift, -400.0 - shift)] * 3, advantage, has_loss=True)]
    batch = _batch(answers, reference=True)
    part = policy_loss(batch, _section(loss, beta=0.4), **_totals(answers))
    assert torch.isfinite(part.loss)
    assert torch.isfinite(part.sums).all()
    assert torch.isfinite(_gradient(part.loss, batch.new)).all()
    assert part.sums[0] <= 3 * math.exp(LARGEST) * (1 + 1e-5)


@given(st.floats(-5.0, 5.0), st.floats(-3.0, 3.0), st.floats(1.5, 4.0))
def test_only_ratios_that_went_too_far_in_the_wanted_direction_have_no_gradient(
    log_ratio: float, advantage: float, dual_clip: float
) -> None:
    ratio = torch.tensor([math.exp(log_ratio)], requires_grad=True)
    loss = clipped_losses(ratio, torch.tensor([advantage]), clip=(0.2, 0.28), dual_clip=dual_clip)
    gradient = _gradient(loss.sum(), ratio).item()
    r = ratio.item()
    is_clipped = (advantage > 0 and r > 1.28) or (advantage < 0 and (r < 0.8 or r > dual_clip))
    assert gradient == (0.0 if is_clipped else pytest.approx(-advantage))


@given(st.lists(st.floats(-10.0, 10.0, width=32), min_size=1, max_size=9))
def test_an_estimate_of_a_divergence_is_not_negative(log_ratios: list[float]) -> None:
    estimates = k3(torch.tensor(log_ratios))
    assert (estimates >= 0).all()
    assert estimates.tolist() == pytest.approx([math.exp(x) - 1 - x for x in log_ratios], rel=1e-4, abs=1e-6)


def test_the_gradient_of_the_divergence_is_exact_in_expectation() -> None:
    """Over all tokens of a vocabulary, weighted by their probability when sampled."""
    logits = torch.tensor([0.3, -1.0, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.4, 0.0], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.0, -0.5, 0.6, 0.4], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    batch = PolicyBatch(
        new, old, reference, torch.zeros(4, dtype=torch.float64), [1] * 4, torch.ones(4, dtype=torch.bool)
    )
    # Each token's loss, times the probability with which it is sampled.
    parts = [
        policy_loss(
            replace(batch, new=new[i : i + 1], old=old[i : i + 1], reference=reference[i : i + 1], advantages=batch.advantages[:1], counts=[1], has_loss=batch.has_loss[:1]),
            _section("dapo", beta=1.0), answers=1, loss_tokens=1, max_new_tokens=1,
        ).loss
        for i in range(4)
    ]  # fmt: skip
    estimate = (torch.stack(parts) * old.exp()).sum()
    divergence = (new.exp() * (new - reference)).sum()
    assert estimate.item() == pytest.approx(divergence.item(), rel=1e-9)
    wanted = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(estimate, logits)[0], wanted, rtol=1e-9)


def test_the_divergence_of_rloo_is_that_of_the_whole_answer() -> None:
    answers = [Answer([(-1.0, -1.1, -0.6), (-2.0, -1.7, -2.5)], 0.0, has_loss=True)]
    part = policy_loss(_batch(answers, reference=True), _section("rloo", beta=0.5), **_totals(answers))
    of_tokens = [math.exp(0.4) - 1.4, math.exp(-0.5) - 0.5]
    assert part.loss.item() == pytest.approx(0.5 * math.exp(-0.2) * sum(of_tokens), rel=1e-5)


def test_a_divergence_without_a_reference_is_a_mistake_but_in_rloo() -> None:
    answers = [Answer([(-1.0, -1.0, -1.0)], 1.0, has_loss=True)]
    batch = _batch(answers, reference=False)
    policy_loss(batch, _section("rloo", beta=0.1), **_totals(answers))
    with pytest.raises(AssertionError):
        policy_loss(batch, _section("dapo", beta=0.1), **_totals(answers))


# ---- Values of other suites. A loss v >= 1 of a token is one of ratio v and advantage -1.

_SKYRL = "SkyRL, tests/train/algorithms/test_losses.py"
_NEMO = "NeMo-RL, tests/unit/algorithms/test_loss_functions.py"
_VERL = "verl, tests/trainer/ppo/test_loss_aggregation_on_cpu.py"
_OPENRLHF = "OpenRLHF, tests/test_loss_aggregation.py"
_ROWS = [[1.0, 2.0], [5.0, 6.0, 7.0], [9.0]]


@dataclass(frozen=True)
class Mean:
    """Losses of tokens of each answer, and their mean.

    Attributes:
        source: the suite and the test.
        masked: numbers of the answers without a loss.
        longest: max_new_tokens.
        answers: of the step, if not those given.
    """

    source: str
    loss: str
    rows: list[list[float]]
    mean: float
    masked: tuple[int, ...] = ()
    longest: int = 1
    answers: int | None = None


MEANS = [
    Mean(f"{_VERL}: matches_single_dp_oracle", "dr_grpo", _ROWS, 2.5, longest=4),
    Mean(f"{_VERL}: respects_loss_scale_factor", "dr_grpo", _ROWS, 1.0, longest=10),
    Mean(f"{_VERL}: dp_average_matches_full_batch", "dr_grpo", [[1.0, 2.0], [4.0], [7.0, 8.0, 9.0], [10.0, 12.0]], 53 / 24, longest=6),
    Mean(f"{_VERL}: empty_rows_are_explicit", "dr_grpo", [[1.0, 2.0], [4.0, 5.0, 6.0], [7.0]], 10 / 9, masked=(1,), longest=3),
    Mean(f"{_OPENRLHF}: token_mean_aggregation", "dapo", [[1.0, 2.0], [3.0, 4.0, 5.0], [7.0]], 22 / 6),
    Mean(f"{_OPENRLHF}: grad_accum_global_norm", "bnpo", [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0]], 28 / 7),
    Mean(f"{_OPENRLHF}: seq_mean_token_mean_aggregation", "grpo", [[1.0, 3.0], [2.0, 4.0], [8.0]], 13 / 3),
    # It does not count masked answers; TRL, and so the objective, counts them.
    Mean(f"{_OPENRLHF}: excludes_fully_masked_sequences", "grpo", [[1.0, 3.0], [5.0, 7.0]], 2.0, masked=(1,), answers=1),
]  # fmt: skip


def _rated(rows: list[list[float]], masked: tuple[int, ...]) -> PolicyBatch:
    answers = [
        Answer([(math.log(v), 0.0, 0.0) for v in row], -1.0, has_loss=i not in masked)
        for i, row in enumerate(rows)
    ]
    return _batch(answers, reference=False)


@pytest.mark.parametrize("case", MEANS, ids=lambda case: case.source)
def test_a_mean_over_tokens_or_answers_is_that_of_other_suites(case: Mean) -> None:
    section = _section(case.loss)
    totals = {
        "answers": case.answers or len(case.rows),
        "loss_tokens": sum(len(row) for i, row in enumerate(case.rows) if i not in case.masked),
        "max_new_tokens": case.longest,
    }
    whole = policy_loss(_rated(case.rows, case.masked), section, **totals)
    assert whole.loss.item() == pytest.approx(case.mean, rel=1e-6)
    ranks = [
        _rated(case.rows[:1], tuple(i for i in case.masked if i < 1)),
        _rated(case.rows[1:], tuple(i - 1 for i in case.masked if i >= 1)),
    ]
    parts = [policy_loss(rank, section, **totals).loss.item() for rank in ranks]
    assert sum(parts) == pytest.approx(case.mean, rel=1e-6)


RATIOS = [0.5, 1.5, 3.0, 5.0, 0.8, 1.2, 2.5, 4.0]


@pytest.mark.parametrize(
    ("kind", "cap", "ratios", "counts", "expected"),
    [
        ("token_truncate", 2.0, RATIOS, [4, 4], [0.5, 1.5, 2.0, 2.0, 0.8, 1.2, 2.0, 2.0]),
        ("token_mask", 2.0, RATIOS[:4], [4], [0.5, 1.5, 0.0, 0.0]),
        ("sequence_truncate", 2.0, [3.0] * 4 + [1.0] * 4, [4, 4], [2.0] * 4 + [1.0] * 4),
        ("sequence_mask", 2.0, [3.0] * 4 + [1.0] * 4, [4, 4], [0.0] * 4 + [1.0] * 4),
        ("token_truncate", 2.0, [0.5, 1.0, 1.5], [3], [0.5, 1.0, 1.5]),
        ("token_truncate", 2.0, [3.0, 4.0, 5.0], [3], [2.0] * 3),
        ("token_truncate", 2.0, [math.exp(60.0), math.exp(-60.0), 1.0], [3], [2.0, math.exp(-LARGEST), 1.0]),
        ("sequence_truncate", 3.0, [0.5, 4.0, 1.5, 0.5], [2, 2], [2.0, 2.0, 0.75, 0.75]),  # TRL: the product
    ],
)
def test_weights_of_a_correction_are_those_of_ms_swift_and_trl(
    kind: str, cap: float, ratios: list[float], counts: list[int], expected: list[float]
) -> None:
    """ms-swift, tests/train/test_vllm_importance_sampling_basic.py, but the last."""
    weights = correction_weights(torch.tensor(ratios).log(), counts, kind=kind, cap=cap)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_multiply_the_losses_and_leave_the_divergence(loss: Any) -> None:
    answers = [
        Answer([(-1.0, -1.2, -0.9), (-0.5, -0.4, -0.7)], 0.5, True),
        Answer([(-2.0, -2.2, -2.1)], -1.0, True),
    ]
    plain, weighted = _batch(answers, reference=True), _batch(answers, reference=True)
    weighted = replace(weighted, weights=torch.full((3,), 0.25))

    def loss_of(batch: PolicyBatch, beta: float) -> float:
        section = GrpoSection(loss=loss, beta=beta)
        batch = batch if beta else replace(batch, reference=None)
        part = policy_loss(batch, section, answers=2, loss_tokens=3, max_new_tokens=LONGEST)
        return part.loss.item()

    divergence = loss_of(plain, 0.1) - loss_of(plain, 0.0)
    assert divergence > 0
    assert loss_of(weighted, 0.1) == pytest.approx(0.25 * loss_of(plain, 0.0) + divergence, abs=1e-6)


def test_the_gradient_of_dr_grpo_is_that_of_verl() -> None:
    """test_seq_mean_token_sum_norm_gradient_scale, of the same file: 1 / (3 · 8) for each token."""
    batch = _rated(_ROWS, ())
    loss = policy_loss(batch, _section("dr_grpo"), answers=3, loss_tokens=6, max_new_tokens=8).loss
    of_losses = _gradient(loss, batch.new) / batch.new.exp()  # d v / d log v = v
    assert of_losses.tolist() == pytest.approx([1 / 24] * 6, rel=1e-6)


@dataclass(frozen=True)
class Sum:
    """Answers of one token, their log-probabilities and advantages; the sum of their losses."""

    source: str
    settings: dict[str, Any]
    total: float
    new: tuple[float, ...] = (-1.69315, -1.0, -0.69741)  # ratios of about 0.5, 1 and 10
    old: tuple[float, ...] = (-1.0, -1.0, -3.0)
    advantages: tuple[float, ...] = (1.0, -1.0, -4.0)


SUMS = [
    Sum(f"{_SKYRL}: dual_clip (after NeMo-RL)", {"loss": "dapo", "dual_clip": 3.0}, 12.5),
    Sum(f"{_SKYRL}: cispo", {"loss": "cispo"}, -2.9930),
    Sum(f"{_NEMO}: ppo_clipping", {"loss": "bnpo"}, -1.9, new=(-1.69315, -1.0, -0.59453), old=(-1.0, -1.0, -1.0), advantages=(1.0, -1.0, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", SUMS, ids=lambda case: case.source)
def test_a_sum_of_losses_is_that_of_other_suites(case: Sum) -> None:
    answers = [
        Answer([(new, old, 0.0)], advantage, has_loss=True)
        for new, old, advantage in zip(case.new, case.old, case.advantages, strict=True)
    ]
    section = GrpoSection.model_validate({"clip": [0.2, 0.2], **case.settings})
    part = policy_loss(_batch(answers, reference=False), section, answers=1, loss_tokens=1, max_new_tokens=1)
    assert part.loss.item() == pytest.approx(case.total, abs=1e-4)


def test_the_ratios_of_cispo_are_those_of_skyrl() -> None:
    """test_policy_loss_cispo_support_sums_add_across_micro_batches, of the same file."""
    micros = [
        ([0.5, 1.0, 2.0, 1.0], [True, True, True, False], [1.0, 0.0, -1.0, 1.0]),
        ([4.0, 1.0, 1.0, 1.0], [True, False, False, False], [1.0] * 4),
        ([1.0] * 4, [False] * 4, [1.0] * 4),
    ]
    total = torch.zeros(2 * len(POLICY_METRICS))
    for ratios, has_loss, advantages in micros:
        answers = [
            Answer([(math.log(r), 0.0, 0.0)], a, has_loss=h)
            for r, h, a in zip(ratios, has_loss, advantages, strict=True)
        ]
        section = GrpoSection.model_validate({"loss": "cispo", "clip": [0.2, 0.2]})
        total += policy_loss(
            _batch(answers, reference=False), section, answers=12, loss_tokens=4, max_new_tokens=1
        ).sums
    sums = dict(zip(POLICY_METRICS, zip(total[::2].tolist(), total[1::2].tolist(), strict=True), strict=True))
    assert sums["ratio"] == pytest.approx((7.5, 4.0))
    assert sums["clip_low"][0] + sums["clip_high"][0] == 3.0  # cap_hit_weight_sum

"""Losses of sampled answers, their gradients, and advantages are those of TRL's trainers.

Run: pytest tests/trainer/objectives/test_policy_parity.py
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer.objectives.parity import run_trl
from unisono.trainer.config.rollout_sections import GrpoSection
from unisono.trainer.objectives.advantages import RewardSums, group_advantages
from unisono.trainer.objectives.policy import POLICY_METRICS, PolicyBatch, policy_loss

pytestmark = pytest.mark.slow  # a process that imports TRL

LONGEST = 12  # tokens of an answer
PARAMETERS = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
)


@dataclass(frozen=True)
class Case:
    """Settings here, and those of TRL for the same."""

    section: dict[str, Any]
    of_trl: dict[str, Any]
    trainer: str = "grpo"
    truncated: bool = False
    micros: int = 1


def _case(loss: str, *, truncated: bool = False, micros: int = 1, **section: float) -> Case:
    clip = (1.0, 0.4) if loss == "cispo" else (0.2, 0.28)  # TRL's cispo has no lower bound
    of_here = {"loss": loss, "clip": clip, **section}
    settings: dict[str, Any] = {
        "epsilon": clip[0],
        "epsilon_high": 1 + clip[1] if loss == "cispo" else clip[1],
        "max_completion_length": LONGEST,
        "beta": section.get("beta", 0.0),
    }
    if loss == "rloo":  # its divergence is in the rewards, which are given
        return Case(of_here, settings, "rloo", truncated, micros)
    settings |= {"delta": section.get("dual_clip"), "loss_type": "grpo" if loss == "gspo" else loss}
    settings["importance_sampling_level"] = "sequence" if loss == "gspo" else "token"
    return Case(of_here, settings, "grpo", truncated, micros)


LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo")
CASES = {
    **{loss: _case(loss) for loss in LOSSES},
    **{f"{loss} with β": _case(loss, beta=0.3) for loss in LOSSES if loss != "rloo"},
    **{f"{loss}, truncated": _case(loss, truncated=True) for loss in LOSSES},
    **{f"{loss}, dual clip": _case(loss, dual_clip=1.5) for loss in LOSSES if loss not in ("cispo", "rloo")},
    # TRL's bnpo is another loss for several micro batches.
    **{
        f"{loss}, 2 micro batches": _case(loss, truncated=True, micros=2) for loss in LOSSES if loss != "bnpo"
    },
}


@dataclass
class Answers:
    """Eight answers, the same in all cases. The log-probabilities are those of the model."""

    prompts: list[list[int]]
    answers: list[list[int]]
    new: list[torch.Tensor] = field(default_factory=list)
    advantages: tuple[float, ...] = (1.2, -0.7, 0.4, -0.9, 0.0, 0.8, -1.5, 0.7)
    truncated: tuple[bool, ...] = (False, False, True, False, False, False, True, False)

    @classmethod
    def sample(cls) -> "Answers":
        draw = random.Random(5)

        def tokens(low: int, high: int) -> list[int]:
            return [draw.randrange(5, 300) for _ in range(draw.randint(low, high))]

        return cls([tokens(2, 7) for _ in range(8)], [tokens(1, LONGEST) for _ in range(8)])

    def old(self) -> list[list[float]]:
        """Those at sampling: so far from the model's that ratios are clipped on both sides."""
        noise = torch.Generator().manual_seed(1)
        return [(new.detach() + 0.4 * torch.randn(len(new), generator=noise)).tolist() for new in self.new]

    def reference(self) -> list[list[float]]:
        noise = torch.Generator().manual_seed(2)
        return [(new.detach() + 0.5 * torch.randn(len(new), generator=noise)).tolist() for new in self.new]


def _score(model: Any, answers: Answers) -> None:
    """Each answer alone, without padding."""
    answers.new = []
    for prompt, answer in zip(answers.prompts, answers.answers, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.float().log_softmax(-1)
        answers.new.append(log_probs[torch.arange(len(answer)), torch.tensor(answer)])


def _counts(case: Case, answers: Answers) -> list[int]:
    """Loss tokens of each answer that has a loss."""
    return [
        0 if case.truncated and cut else len(answer)
        for answer, cut in zip(answers.answers, answers.truncated, strict=True)
    ]


def _spec(case: Case, answers: Answers, model_dir: Path) -> dict[str, Any]:
    old, reference = answers.old(), answers.reference() if case.section.get("beta") else None
    size = 8 // case.micros
    micros = [
        {
            "prompts": answers.prompts[at], "answers": answers.answers[at], "old": old[at], "reference": reference and reference[at],
            "advantages": answers.advantages[at], "items": sum(_counts(case, answers)),
            "truncated": [case.truncated and cut for cut in answers.truncated[at]],
        }
        for at in (slice(i, i + size) for i in range(0, 8, size))
    ]  # fmt: skip
    return {"model": str(model_dir), "trainer": case.trainer, "settings": case.of_trl, "parameters": PARAMETERS, "micros": micros}  # fmt: skip


def _here(case: Case, answers: Answers, model: Any) -> tuple[float, dict[str, list[float]], dict[str, float]]:
    """The loss, gradients and metrics of one micro batch of all answers."""
    model.zero_grad()
    _score(model, answers)
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (answers.old(), answers.reference())]
    batch = PolicyBatch(
        torch.cat(answers.new), flat[0], flat[1] if case.section.get("beta") else None, torch.tensor(answers.advantages),
        [len(answer) for answer in answers.answers], torch.tensor([not (case.truncated and cut) for cut in answers.truncated]),
    )  # fmt: skip
    part = policy_loss(
        batch, GrpoSection.model_validate(case.section), answers=8, loss_tokens=sum(_counts(case, answers)), max_new_tokens=LONGEST
    )  # fmt: skip
    part.loss.backward()
    gradients = {
        name: p.grad.flatten().tolist() for name, p in model.named_parameters() if name in PARAMETERS
    }
    sums = part.sums.tolist()
    figures = {
        name: total / number
        for name, total, number in zip(POLICY_METRICS, sums[::2], sums[1::2], strict=True)
        if number
    }
    return part.loss.item(), gradients, figures


GROUPS: list[list[float | None]] = [
    [1.0, 0.0, 0.3, None],
    [0.5, 0.5, 0.5, 0.5],
    [2.0, None, None, None],
    [-1.0, 4.0, 4.0, 0.1],
]
REWARDS = [reward for group in GROUPS for reward in group]
SCALES: dict[str, tuple[str, dict[str, Any]]] = {
    "group": ("grpo", {"scale_rewards": "group"}),
    "batch": ("grpo", {"scale_rewards": "batch"}),
    "none": ("grpo", {"scale_rewards": "none"}),
    "leave one out": ("rloo", {}),
}


@pytest.fixture(scope="module")
def trl(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL gives for each case; all in one process."""
    model, answers = transformers.AutoModelForCausalLM.from_pretrained(model_dir), Answers.sample()
    _score(model, answers)
    specs = [_spec(case, answers, model_dir) for case in CASES.values()]
    specs += [
        {
            "model": str(model_dir), "trainer": trainer, "rewards": REWARDS,
            "settings": {**settings, "max_completion_length": 2, "beta": 0.0},
        }
        for trainer, settings in SCALES.values()
    ]  # fmt: skip
    results = run_trl(tmp_path_factory.mktemp("policy"), specs, module="trl_policy")
    return dict(zip([*CASES, *SCALES], results, strict=True))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradients_are_those_of_trl(trl: dict[str, Any], model: Any, name: str) -> None:
    case, answers, theirs = CASES[name], Answers.sample(), trl[name]
    loss, gradients, _ = _here(case, answers, model)
    wanted = theirs["loss"]
    if case.trainer == "rloo" and case.truncated:  # a constant there, which has no gradient
        cut = [a for a, is_cut in zip(answers.advantages, answers.truncated, strict=True) if is_cut]
        wanted += sum(cut) / 8
    # RLOOTrainer subtracts sums of up to 70, whose rounding is 4e-6 each; here tokens are subtracted.
    limit = 5e-5 if case.trainer == "rloo" else 1e-5
    assert loss == pytest.approx(wanted, rel=limit, abs=1e-6)
    for parameter in PARAMETERS:
        mine, other = torch.tensor(gradients[parameter]), torch.tensor(theirs["gradients"][parameter])
        largest = other.abs().max()
        assert largest > 1e-4
        assert (mine - other).abs().max() < limit * largest, parameter


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].truncated])
def test_the_metrics_are_those_of_trl(trl: dict[str, Any], model: Any, name: str) -> None:
    case, theirs = CASES[name], trl[name]["metrics"]
    _, _, figures = _here(case, Answers.sample(), model)
    if case.section["loss"] != "cispo":  # TRL counts positive advantages only
        assert figures["clip_low"] == pytest.approx(theirs["clip_ratio/low_mean"][0], abs=1e-6)
        assert figures["clip_high"] == pytest.approx(theirs["clip_ratio/high_mean"][0], abs=1e-6)
        assert figures["clip_low"] + figures["clip_high"] > 0
    if case.section.get("beta"):
        assert figures["kl"] == pytest.approx(theirs["kl"][0], rel=1e-5)


@pytest.mark.parametrize("name", SCALES)
def test_the_advantages_are_those_of_trl(trl: dict[str, Any], name: str) -> None:
    mine = [
        advantage
        for rewards in GROUPS
        for advantage in group_advantages(
            rewards,
            scale="group" if name == "group" else "batch" if name == "batch" else "none",
            batch_std=RewardSums.of(REWARDS).std,
            leave_one_out=name == "leave one out",
        )
    ]
    theirs = trl[name]["advantages"]
    assert any(theirs)
    # TRL's advantages are float32, and 0 for an answer without a reward.
    assert [advantage or 0.0 for advantage in mine] == pytest.approx(theirs, rel=1e-5, abs=1e-5)

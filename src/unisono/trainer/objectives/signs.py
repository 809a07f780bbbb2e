"""Signs of trouble in the figures of a run that goes wrong without an error, and for how long they
last. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.trainer.config.rollout_sections import RolloutSection

_LASTS = 10
"""Steps in a row that show a sign of nothing being learned."""
_NEARLY_ALL = 0.95
_KL_STEPS = 3
_LARGEST_DIFFERENCE = 0.1
"""Of log-probabilities with the same weights: 4e-7 in float32, and up to 1e-3 in bfloat16, were
measured with the built-in model.
"""
_LARGEST_SAMPLER_KL = 1.0
_LARGEST_KL = 10.0
"""Nats per token. Runs that learn stay below 0.1 in a rollout, and below 1 from the reference."""


@dataclass(frozen=True)
class Sign:
    """Something in the figures of a step that means trouble if it lasts.

    Attributes:
        cause: id of the cause that it is a sign of.
        text: what the figures show, e.g. `no answer ended within 128 tokens`.
        steps: consecutive steps that must show it before it is reported.
        ends_run: whether the run ends then, since further steps do harm; else it is a warning.
    """

    cause: str
    text: str
    steps: int
    ends_run: bool = False


class SignCounts:
    """For how many steps in a row each cause has shown."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def lasting(self, signs: Sequence[Sign]) -> list[Sign]:
        """The signs of a step that have lasted just as long as they may; each is given once until
        it has disappeared.
        """
        by_cause = {sign.cause: sign for sign in signs}
        self._steps = {cause: self._steps.get(cause, 0) + 1 for cause in by_cause}
        return [sign for cause, sign in by_cause.items() if self._steps[cause] == sign.steps]


def policy_signs(figures: Mapping[str, float], rollout: RolloutSection) -> list[Sign]:
    """The signs of trouble in a step's figures."""
    signs = []
    if figures.get("truncated", 0.0) >= _NEARLY_ALL:
        share = f"{100 * figures['truncated']:.0f} %"
        text = f"{share} of the answers reach {rollout.max_new_tokens} tokens without a stop token"
        signs.append(Sign("answers_never_stop", text, _LASTS))
    if figures.get("same_answers") == 1.0:
        entropy = figures.get("entropy", 0.0)
        text = f"all answers to a prompt are the same (entropy {entropy:.1e} nats per token)"
        signs.append(Sign("entropy_collapsed", text, _LASTS))
    elif figures.get("equal_groups") == 1.0:
        mean = figures.get("reward", 0.0)
        text = f"all answers to a prompt get the same reward (mean {mean:.4g}), so none becomes likelier"
        signs.append(Sign("no_reward_signal", text, _LASTS))
    is_first = (int(figures.get("step", 1)) - 1) % rollout.steps == 0
    if is_first and figures.get("sampler_difference", 0.0) > _LARGEST_DIFFERENCE:
        text = (
            "the log-probabilities of sampled tokens differ from those in training by"
            f" {figures['sampler_difference']:.3g} on average, with the same weights"
        )
        signs.append(Sign("sampler_mismatch", text, 1, ends_run=True))
    sampler_kl, kl = figures.get("sampler_kl", 0.0), figures.get("kl", 0.0)
    if sampler_kl > _LARGEST_SAMPLER_KL:
        text = f"the divergence from the model that sampled is {sampler_kl:.3g} nats per token"
        signs.append(Sign("kl_exploded", text, _KL_STEPS, ends_run=True))
    elif kl > _LARGEST_KL:
        text = f"the divergence from the reference is {kl:.3g} nats per token"
        signs.append(Sign("kl_exploded", text, _KL_STEPS, ends_run=True))
    return signs

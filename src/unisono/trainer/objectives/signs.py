"""What the figures of sampled answers say about a run that goes wrong without an error. Pure."""

from collections.abc import Mapping

from unisono.trainer.config.rollout_sections import RolloutSection
from unisono.trainer.objectives.objective import Sign

_LASTS = 10
"""Steps in a row that show a sign of nothing being learned."""
_NEARLY_ALL = 0.95
_KL_STEPS = 3
_LARGEST_SAMPLER_KL = 1.0
_LARGEST_KL = 10.0
"""Nats per token. Runs that learn stay below 0.1 in a rollout, and below 1 from the reference."""


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
    sampler_kl, kl = figures.get("sampler_kl", 0.0), figures.get("kl", 0.0)
    if sampler_kl > _LARGEST_SAMPLER_KL:
        text = f"the divergence from the model that sampled is {sampler_kl:.3g} nats per token"
        signs.append(Sign("kl_exploded", text, _KL_STEPS, ends_run=True))
    elif kl > _LARGEST_KL:
        text = f"the divergence from the reference is {kl:.3g} nats per token"
        signs.append(Sign("kl_exploded", text, _KL_STEPS, ends_run=True))
    return signs

"""What a rank of another program for reinforcement learning does, by its stack. Pure."""

import re
from collections.abc import Sequence

_ACTIVITIES = (
    (
        "waiting for the reward",
        r"""trl/trainer/\w+_trainer\.py:\d+\ in\ _calculate_rewards$
          | verl/(?:workers/reward_manager|trainer/ppo/reward|experimental/reward)""",
    ),
    (
        "sending weights to the sampler",
        r"""trl/generation/\w+\.py:\d+\ in\ (?:sync_weights|init_communicator|\w*weight_update|update_\w+)$
          | verl/(?:workers/sharding_manager|checkpoint_engine)/""",
    ),
    (
        "sampling answers",
        r"""trl/trainer/\w+_trainer\.py:\d+\ in\ _generate_single_turn$
          | trl/generation/
          | verl/workers/rollout/""",
    ),
)
_PATTERNS = tuple((text, re.compile(pattern, re.VERBOSE)) for text, pattern in _ACTIVITIES)
"""Frames of TRL 1.16 and of verl in 2026, each with what is done in the calls inside them."""


def rl_activity(stack: Sequence[str]) -> str | None:
    """What the innermost frame of a trainer that is known does: `waiting for the reward`; None if
    there is none.

    Args:
        stack: innermost call first, as "file:line in function".
    """
    for frame in stack:
        for text, pattern in _PATTERNS:
            if pattern.search(frame):
                return text
    return None

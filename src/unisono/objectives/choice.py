"""The objective of a config."""

from collections.abc import Callable

from unisono.config.schema import RunConfig
from unisono.objectives.dpo import Dpo
from unisono.objectives.kto import Kto
from unisono.objectives.objective import Objective
from unisono.objectives.orpo import Orpo
from unisono.objectives.reward import Reward
from unisono.objectives.sft import TokenObjective
from unisono.objectives.simpo import Simpo


def objective_of(config: RunConfig) -> Objective:
    """The objective that a config names, with its settings."""
    return _MADE[config.objective](config)


def _diffusion(config: RunConfig) -> Objective:
    from unisono.diffusion.pipeline import trains_text
    from unisono.objectives.diffusion import Diffusion

    return Diffusion(config.diffusion, trains_text=trains_text(config))


def _tokens(config: RunConfig) -> Objective:
    return TokenObjective(config.optim.label_smoothing, dft=config.optim.loss_weight == "dft")


_MADE: dict[str, Callable[[RunConfig], Objective]] = {
    "sft": _tokens,
    "pretrain": _tokens,
    "reward": lambda config: Reward(),
    "dpo": lambda config: Dpo(config.preference),
    "kto": lambda config: Kto(config.preference),
    "orpo": lambda config: Orpo(config.preference),
    "simpo": lambda config: Simpo(config.preference),
    "diffusion": _diffusion,
}

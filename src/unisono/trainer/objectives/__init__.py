"""What a run minimizes: the objectives by their names.

Importing this loads no torch and no pydantic: `objectives.rewards` has processes that are started
often.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.trainer.config.schema import RunConfig
    from unisono.trainer.config.sections import PreferenceSection
    from unisono.trainer.objectives.objective import Objective
    from unisono.trainer.plan.run_plan import DataSummary


def _preference(config: "RunConfig") -> "Objective":
    from unisono.trainer.objectives import preference

    named: dict[str, Callable[[PreferenceSection], Objective]] = {
        "dpo": preference.Dpo,
        "kto": preference.Kto,
        "orpo": preference.Orpo,
        "simpo": preference.Simpo,
    }
    return named[config.objective](config.preference)


def _reward(config: "RunConfig") -> "Objective":
    from unisono.trainer.objectives.preference import Reward

    del config
    return Reward()


def _grpo(config: "RunConfig") -> "Objective":
    from unisono.trainer.objectives.grpo import Grpo

    return Grpo(config.rollout, config.grpo)


def _tokens(config: "RunConfig") -> "Objective":
    from unisono.trainer.objectives.preference import TokenObjective

    return TokenObjective(config.optim.label_smoothing, dft=config.optim.loss_weight == "dft")


def _classify(config: "RunConfig", data: "DataSummary") -> "Objective":
    from unisono.trainer.objectives.classify import Classify, weights_of

    labels = data.labels
    assert labels is not None
    return Classify(len(labels.names), labels.multi_label, weights_of(config.classify, labels))


def _embed(config: "RunConfig", data: "DataSummary") -> "Objective":
    from unisono.trainer.objectives.embed import Embed

    return Embed(config.embed, tuple(range(data.sides)))


# Those of other families than text are in `plan.families`; two need to know their rows.
_MADE: dict[str, "Callable[[RunConfig], Objective]"] = {
    "sft": _tokens,
    "pretrain": _tokens,
    "reward": _reward,
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo"), _preference),
    "grpo": _grpo,
}


def objective_of(config: "RunConfig", *, digest: str = "", data: "DataSummary | None" = None) -> "Objective":
    """The objective that a config names, with its settings.

    Args:
        digest: of the file of an own objective, as the plan has it.
        data: the rows, if they are classified or embedded.

    Raises:
        ConfigError: if an own objective is refused.
    """
    from unisono.trainer.config.own_code import own_code_of
    from unisono.trainer.plan.families import family_for

    for code in own_code_of(config):
        if code.key == "objective":
            from unisono.trainer.objectives.user_objective import load_objective

            return load_objective(code, config, digest)
    of_family = family_for(config.objective).objectives
    if config.objective in of_family:
        module, _, name = of_family[config.objective].partition(":")
        made: Objective = getattr(import_module(module), name).of(config)
        return made
    if data is not None and data.labels is not None:
        return _classify(config, data)
    if data is not None and config.objective == "embed":
        return _embed(config, data)
    return _MADE[config.objective](config)

"""Objectives, and the section `preference`: which objective uses which of its keys."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from unisono.config.fields import NotNegative, Positive, Section, float_of_yaml

Objective = Literal["sft", "pretrain", "reward", "dpo", "kto", "orpo", "simpo", "diffusion"]

PAIRS = ("reward", "dpo", "orpo", "simpo")
"""Objectives whose rows are a chosen and a rejected answer."""

RATINGS = ("kto",)
"""Objectives whose rows are one answer with a label."""

PREFERENCE = (*PAIRS, *RATINGS)
"""All objectives of preference rows."""

USED: dict[str, tuple[str, ...]] = {
    "dpo": ("loss", "beta", "label_smoothing", "sft_weight", "reference"),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "sft_weight", "reference"),
    "orpo": ("beta", "sft_weight"),
    "simpo": ("beta", "gamma", "sft_weight"),
}
"""The keys of `preference` that each objective uses; the others use none."""


class PreferenceSection(Section):
    """The loss of preference objectives."""

    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        default="sigmoid",
        description="for dpo: the loss function; hinge: arXiv:2305.10425; ipo (arXiv:2310.12036): squared, on log-probabilities per token",
    )
    beta: Positive = Field(
        default=0.1,
        description="dpo, kto: how strongly deviations from the reference are penalized; orpo: weight of the odds ratio; simpo: scale of the reward",
    )
    label_smoothing: Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0, lt=0.5)] = Field(
        default=0.0,
        description="for dpo with `loss: sigmoid`: share of pairs that are assumed to have swapped labels",
    )
    sft_weight: NotNegative = Field(
        default=0.0,
        description="weight of an added term: the mean cross entropy per token of the chosen (kto: desirable) answers",
    )
    gamma: NotNegative = Field(default=0.5, description="for simpo: the target reward margin")
    desirable_weight: Positive = Field(default=1.0, description="for kto: weight of rows with `label: true`")
    undesirable_weight: Positive = Field(
        default=1.0, description="for kto: weight of rows with `label: false`"
    )
    reference: str = Field(
        default="auto",
        min_length=1,
        description="for dpo and kto: the reference model, a path; auto: the model without its adapter (also with adapter.from; adapters of"
        " adapter.merge are part of the model), or with full fine-tuning the starting weights",
    )


def keys_of(objective: str) -> tuple[str, ...]:
    """The keys of `preference` that an objective uses."""
    return USED.get(objective, ())


def sides_of(objective: str) -> int:
    """The number of rows of tokens that a unit of an objective has: 2 for a pair, and for a rated answer with the mismatched one."""
    return 2 if objective in PREFERENCE else 1


assert set(get_args(Objective)) == {"sft", "pretrain", "diffusion", *PREFERENCE}

"""The base class of config sections and the types of their fields; objectives, and the section `preference`: which objective uses which of its keys."""

import re
from datetime import date
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from unisono.config.yaml_file import Takes
from unisono.text import Duration, Warmup, parse_bytes, parse_seconds


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _check_duration(text: str) -> str:
    Duration.parse(text)
    return text


def _check_warmup(text: str) -> str:
    Warmup.parse(text)
    return text


def _check_seconds(text: str) -> str:
    parse_seconds(text)
    return text


def _check_bytes(text: str) -> str:
    parse_bytes(text)
    return text


def _text_of_yaml(value: Any) -> Any:
    """The text where YAML reads a date."""
    return value.isoformat() if isinstance(value, date) else value


def _check_date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        raise ValueError(f"{text!r} is not a date; write YYYY-MM-DD")
    date.fromisoformat(text)
    return text


def _check_storage(text: str) -> str:
    scheme, found, place = text.partition("://")
    if not found or not scheme or not place.strip("/"):
        raise ValueError(f"{text!r} is not a URL; write s3://bucket/runs or file:///mnt/copies")
    if scheme in ("file", "local") and not place.startswith("/"):
        raise ValueError(f"{text!r} has no absolute path; write {scheme}:///{place}")
    return text


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: `a{99999999999}`, and (((…
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from error
    return text


def float_of_yaml(value: Any) -> Any:
    """The number where YAML 1.1 reads a string, e.g. `1e-4`."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


DurationText = Annotated[
    str,
    AfterValidator(_check_duration),
    Takes("an amount with its unit, e.g. `3 epochs`, `500 steps` or `2M tokens`"),
]
WarmupText = Annotated[
    str, AfterValidator(_check_warmup), Takes("a share or a number of steps, e.g. `3%` or `100 steps`")
]
SecondsText = Annotated[
    str, AfterValidator(_check_seconds), Takes("a time, e.g. `25 seconds` or `2 minutes`")
]
PatienceText = Annotated[
    str,
    AfterValidator(lambda text: text if text == "auto" else _check_seconds(text)),
    Takes("`auto`, or a time, e.g. `5 minutes`"),
]
BytesText = Annotated[str, AfterValidator(_check_bytes), Takes("a size, e.g. `1 GB` or `50 MB`")]
StorageText = Annotated[
    str, AfterValidator(_check_storage), Takes("a URL, e.g. `s3://bucket/runs` or `file:///mnt/copies`")
]
DateText = Annotated[
    str, BeforeValidator(_text_of_yaml), AfterValidator(_check_date), Takes("a date as YYYY-MM-DD")
]
Pattern = Annotated[str, AfterValidator(_check_pattern), Takes("a regular expression")]
Share = Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, BeforeValidator(float_of_yaml), Field(gt=0.0)]
NotNegative = Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0)]


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

"""The base class of config sections, and the types of their fields."""

import re
from datetime import date
from typing import Annotated, Any

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

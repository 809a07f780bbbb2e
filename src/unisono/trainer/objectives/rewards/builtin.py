"""The built-in rewards. Each maker gets the settings of an entry of `rewards`, and gives a function
like those of users.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.base.text import one_line
from unisono.trainer.objectives.rewards.calls import Text, text_of

if TYPE_CHECKING:
    from unisono.base.errors import ConfigError

RewardFunction = Callable[..., Any]


class UnusableValueError(ValueError):
    """A value that a function needs or gives is not usable, for all answers of the group."""


def _expected(settings: Mapping[str, Any], columns: Mapping[str, Sequence[object]]) -> str:
    """The text of the column that answers are compared with.

    Raises:
        UnusableValueError: if the row has no such column, or neither text nor number in it.
    """
    name = settings["column"]
    if name not in columns:
        names = ", ".join(f"`{column}`" for column in columns) or "none"
        raise UnusableValueError(f"the row has no column `{name}`; its other columns: {names}")
    value = columns[name][0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        shown = one_line(repr(value), limit=60)
        raise UnusableValueError(f"the column `{name}` is {shown}, which is neither text nor number")
    return str(value).strip()


def _exact(settings: Mapping[str, Any]) -> RewardFunction:
    def reward(completions: Sequence[Text], **columns: Any) -> list[float]:
        expected = _expected(settings, columns)
        return [float(text_of(completion).strip() == expected) for completion in completions]

    return reward


def _contains(settings: Mapping[str, Any]) -> RewardFunction:
    def reward(completions: Sequence[Text], **columns: Any) -> list[float]:
        expected = _expected(settings, columns)
        if not expected:
            raise UnusableValueError(f"the column `{settings['column']}` is empty, which every text contains")
        return [float(expected in text_of(completion)) for completion in completions]

    return reward


def _regex(settings: Mapping[str, Any]) -> RewardFunction:
    pattern = re.compile(settings["pattern"])

    def reward(completions: Sequence[Text]) -> list[float]:
        return [float(pattern.search(text_of(completion)) is not None) for completion in completions]

    return reward


def _length(settings: Mapping[str, Any]) -> RewardFunction:
    fewest, most = settings["min"], settings["max"]

    def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [float(fewest <= len(ids) and (most is None or len(ids) <= most)) for ids in completion_ids]

    return reward


def _format(settings: Mapping[str, Any]) -> RewardFunction:
    def reward(completions: Sequence[Text]) -> list[float]:
        return [float(_consists_of(text_of(completion), settings["tags"])) for completion in completions]

    return reward


def _consists_of(text: str, tags: Sequence[str]) -> bool:
    """Whether a text consists of these tags, in order, each with a text and without tags in it."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        before, is_open, text = text.partition(opening)
        inside, is_closed, text = text.partition(closing)
        if before.strip() or not (is_open and is_closed and inside.strip()):
            return False
        if any(mark in inside for mark in marks):
            return False
    return not text.strip()


def _json_schema(settings: Mapping[str, Any]) -> RewardFunction:
    try:
        import jsonschema
        from referencing import Registry
    except ModuleNotFoundError as error:
        raise _missing("json_schema", error, "schema") from None
    schema = settings["schema"]
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        from unisono.base.errors import ConfigError

        raise ConfigError.of(
            f"the file of the reward json_schema is not a JSON Schema: {one_line(error.message, limit=200)}",
            where=f"{settings['path']}#/{'/'.join(map(str, error.path))}",
            fix="fix the file",
        ) from None
    # A registry without a way to retrieve: by default, references to URLs would be downloaded.
    validator = kind(schema, registry=Registry())

    def reward(completions: Sequence[Text]) -> list[float]:
        return [float(_is_valid(validator, text_of(completion))) for completion in completions]

    return reward


def _is_valid(validator: Any, text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # the latter for thousands of brackets
        return False
    return bool(validator.is_valid(value))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_valid(settings: Mapping[str, Any]) -> RewardFunction:
    del settings

    def reward(completions: Sequence[Text]) -> list[float]:
        return [float(_is_json(text_of(completion))) for completion in completions]

    return reward


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _rouge_l(settings: Mapping[str, Any]) -> RewardFunction:
    from unisono.trainer.objectives.text_scores import rouge_l

    def reward(completions: Sequence[Text], **columns: Any) -> list[float]:
        expected = _expected(settings, columns)
        return [rouge_l([(text_of(completion), expected)]) for completion in completions]

    return reward


def _bleu(settings: Mapping[str, Any]) -> RewardFunction:
    from unisono.trainer.objectives.text_scores import sentence_bleu

    def reward(completions: Sequence[Text], **columns: Any) -> list[float]:
        expected = _expected(settings, columns)
        return [sentence_bleu(text_of(completion), expected) for completion in completions]

    return reward


def _math(settings: Mapping[str, Any]) -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise _missing("math", error, "math") from None
    # It warns that there is no time limit: the deadline of the call is one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def reward(completions: Sequence[Text], **columns: Any) -> list[float]:
        text = _expected(settings, columns)
        expected = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
        if not expected:
            raise UnusableValueError(
                f"the column `{settings['column']}` has no expression: {one_line(text, limit=60)}"
            )
        answers = [parse(text_of(completion), parsing_timeout=None) for completion in completions]
        return [float(bool(verify(expected, answer, timeout_seconds=None))) for answer in answers]

    return reward


def _missing(reward: str, error: ModuleNotFoundError, extra: str) -> "ConfigError":
    from unisono.base.errors import ConfigError

    return ConfigError.of(
        f"the reward {reward} needs {error.name}",
        where="rewards",
        why="this package is not installed",
        fix=f"pip install 'unisono[{extra}]'",
    )


BUILT_IN: dict[str, Callable[[Mapping[str, Any]], RewardFunction]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "length": _length,
    "format": _format,
    "json_valid": _json_valid,
    "json_schema": _json_schema,
    "math": _math,
    "rouge_l": _rouge_l,
    "bleu": _bleu,
}
"""A function by the name of a built-in reward."""

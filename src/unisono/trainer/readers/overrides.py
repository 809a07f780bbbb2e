"""Overrides from the command line in the names of another tool, or in ours."""

from collections.abc import Container, Mapping

from unisono.base.errors import ConfigError, Problem
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import KeyPlaces, parse_value


def with_overrides(
    raw: Mapping[str, object], overrides: tuple[str, ...], places: KeyPlaces, *, keys: Container[str]
) -> tuple[dict[str, object], tuple[str, ...], list[Problem]]:
    """The mapping with the overrides of its keys applied, the overrides of ours, and the problems.

    Args:
        raw: the mapping in the file.
        overrides: `key=value`; those with a dot, or with a name that only we have, are ours.
        places: of its keys.
        keys: those of the tool.
    """
    merged, ours, problems = dict(raw), list[str](), list[Problem]()
    for text in overrides:
        key, equals, value = text.partition("=")
        if "." in key or not equals or (key not in keys and key in RunConfig.model_fields):
            ours.append(text)  # what is not `key=value` is refused with ours
            continue
        try:
            merged[key] = parse_value(value, name="command line")
            places.override((key,))
        except ConfigError as error:
            problems += error.problems
    return merged, tuple(ours), problems

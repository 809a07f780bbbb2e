"""A file of LLaMA-Factory where a command takes RUN|MODEL, with the options of the command laid
over it.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unisono.base.errors import ConfigError, UsageError
from unisono.trainer.plan.task_requests import RequestedModel, SamplingParams

if TYPE_CHECKING:
    from unisono.trainer.readers.llamafactory.inference_file import InferenceFile

_SUFFIXES = (".yaml", ".yml", ".json")


def read_inference_request(
    context: typer.Context,
    target: str,
    overrides: list[str] | None,
    *,
    max_tokens: int | None,
    sampling: SamplingParams,
) -> tuple[RequestedModel, int | None, SamplingParams]:
    """What to load, tokens of an answer and how to choose them, for `generate` and `chat`.

    Options on the command line win over the file's keys.

    Args:
        context: of the command, which knows the options that were given.
        target: RUN|MODEL.
        overrides: as for `read_inference_file`.
        max_tokens: the command's option.
        sampling: the command's other options.
    """
    given = read_inference_file(target, overrides or [])
    if given is None:
        return RequestedModel(target), max_tokens, sampling
    file = given.translation
    typed = {name: value for name, value in asdict(sampling).items() if is_typed(context, name)}
    limit = max_tokens if is_typed(context, "max_tokens") else file.max_tokens
    return given.model, limit, replace(file.sampling, **typed)


def is_typed(context: typer.Context, option: str) -> bool:
    """Whether the command line has an option."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def read_inference_file(target: str, overrides: list[str]) -> "InferenceFile | None":
    """The file of LLaMA-Factory that is given as RUN|MODEL; None if it is no file.

    Args:
        overrides: `key=value` from the command line, in LLaMA-Factory's names.

    Raises:
        ConfigError: with all that is wrong with the file.
        UsageError: if overrides are given without such a file, or the file is one of our configs.
    """
    path = Path(target)
    if path.suffix.lower() not in _SUFFIXES or path.is_dir():
        if overrides:
            raise UsageError.of(
                f"{overrides[0]!r} is not expected",
                where="command line",
                why="key=value follows only a file of LLaMA-Factory",
                fix="remove it; `--help` lists the options",
            )
        return None
    from unisono.front.cli.output import output
    from unisono.trainer.config.yaml_file import read_yaml
    from unisono.trainer.readers.llamafactory.inference_file import InferenceFile
    from unisono.trainer.readers.llamafactory.reader import recognizes, to_config

    raw, lines = read_yaml(path)
    if not recognizes(raw, path):
        raise UsageError.of(
            f"{target} is a config",
            where=target,
            why="the file describes a training, not a trained model",
            fix=f"pass its run, {raw.get('output_dir') or 'the output_dir in it'}",
        )
    words = [text for text in overrides if "=" not in text]
    if words:
        raise UsageError.of(
            f"{words[0]!r} is not key=value",
            where="command line",
            fix=f"write it before key=value, directly behind {target}",
        )
    translated = to_config(raw, lines, path, tuple(overrides))
    if translated.problems:
        raise ConfigError(*translated.problems)
    if translated.our_overrides and translated.verb != "predict":
        raise UsageError.of(
            f"{translated.our_overrides[0]!r} has no effect here",
            where="command line",
            why="it is a key of training, and no rows are read",
            fix="remove it; keys of LLaMA-Factory have no dot",
        )
    for note in translated.notes():
        output().notify(note)
    return InferenceFile(translated)


def split_prompt(prompt: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """PROMPT and the overrides behind a file of LLaMA-Factory, whose first may stand where a prompt
    would.
    """
    words = list(overrides or ())
    if prompt is None or "=" not in prompt:
        return prompt, words
    from unisono.trainer.readers.llamafactory.keys import KEYS

    return (None, [prompt, *words]) if prompt.partition("=")[0] in KEYS else (prompt, words)

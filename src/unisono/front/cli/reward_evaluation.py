"""`unisono eval --rewards`: rewards of the command line, and what is shown of the evaluation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer
import yaml
from pydantic import TypeAdapter, ValidationError

from unisono.base.errors import Problem, UsageError
from unisono.base.files import write_text
from unisono.base.text import one_line, show_count
from unisono.front.cli.llamafactory_file import is_typed
from unisono.front.cli.output import output
from unisono.trainer.config.answer_functions import AnswerFunction, function_contradictions
from unisono.trainer.config.problems import problems_of
from unisono.trainer.config.yaml_file import KeyPlaces
from unisono.trainer.plan.task_requests import RewardsEvaluated

Function = TypeVar("Function", bound=AnswerFunction)
_OF_REWARDS = ("samples", "threshold", "temperature", "max_tokens")
_LABELS = {"answer_tokens": "answer tokens", "no_reward": "without reward"}
_SHARES = ("truncated", "no_reward")


def refuse_options_of_rewards(context: typer.Context) -> None:
    """Refuses options of an evaluation of rewards in another one.

    Raises:
        UsageError: if one is given.
    """
    for name in _OF_REWARDS:
        if is_typed(context, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError.of(
                f"{option} has no effect here",
                where=option,
                why="it is for an evaluation of rewards",
                fix="add --rewards, or remove it",
            )


def read_functions(kind: type[Function], texts: Sequence[str], option: str) -> tuple[Function, ...]:
    """The functions of `--reward` or `--metric`, each a name, or the section of a config in one
    line.

    Raises:
        UsageError: if one is not such a function.
    """
    name = option.removeprefix("--")
    try:
        raw: dict[str, object] = {name: [yaml.safe_load(text) for text in texts]}
    except yaml.YAMLError:
        raise UsageError.of(
            f"a {name} is not YAML", where=option, fix=f"write e.g. {option} '{{use: length, max: 60}}'"
        ) from None
    try:
        functions = TypeAdapter(dict[str, list[kind]]).validate_python(raw)[name]  # type: ignore[valid-type]
    except ValidationError as error:
        by_key = problems_of(error, raw, KeyPlaces({}, option))
        raise UsageError(*(problem for of_key in by_key.values() for problem in of_key)) from None
    problems = [text for one in functions for text in function_contradictions(one, option)]
    if problems:
        raise UsageError(*(_problem(text, option) for text in problems))
    return tuple(functions)


def _problem(text: str, option: str) -> Problem:
    what, _, fix = text.partition("; ")
    return Problem(one_line(what), option, "", one_line(fix))


def show_rewards(result: RewardsEvaluated, out: Path | None) -> None:
    """Writes the answers to a file if one is given, and the figures to stdout."""
    printer = output()
    if out is not None:
        write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result["rows"]))
        printer.notify(f"wrote {len(result['rows'])} answers to {out}")
    if printer.json:
        others = {name: value for name, value in result.items() if name not in ("figures", "rows")}
        printer.emit({"schema": 1, **result["figures"], **others})
        return
    for text in reward_lines(result):
        printer.result(text)


def reward_lines(result: RewardsEvaluated) -> list[str]:
    """The figures as lines for people."""
    lines = [f"{one_line(result['description'])}, evaluated on {one_line(result['source'])}"]
    lines += [f"  {text}" for text in result["formats"]]
    width = max(17, *(len(_label(name)) for name in result["figures"]))
    return lines + [
        f"  {_label(name):<{width}} {_shown(name, value)}{_note(name, result)}"
        for name, value in result["figures"].items()
    ]


def _label(name: str) -> str:
    return _LABELS.get(name, one_line(name.removeprefix("reward_"), limit=40) if _is_part(name) else name)


def _is_part(name: str) -> bool:
    """Whether it is the figure of one of several reward functions."""
    return name.startswith("reward_")


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _SHARES or name.startswith("pass@"):
        return f"{100 * value:.1f} %"
    return show_count(value) if isinstance(value, int) else f"{value:.4g}"


def _note(name: str, result: RewardsEvaluated) -> str:
    notes: Mapping[str, str] = {
        "prompts": _lost(result["ledger"]),
        "answers": f"{result['samples']} to each prompt, temperature {result['temperature']:g}"
        if result["temperature"]
        else "the most likely one to each prompt",
        "pass@1": f"reward of at least {result['threshold']:g}",
    }
    note = notes.get(name, "")
    return f"   ({note})" if note else ""


def _lost(ledger: Mapping[str, int]) -> str:
    lost = {name: ledger.get(name, 0) for name in ("dropped", "bad")}
    return ", ".join(f"{count} {name}" for name, count in lost.items() if count)

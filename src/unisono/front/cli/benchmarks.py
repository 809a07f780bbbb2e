"""`unisono eval --tasks`: its options, and how its figures are shown."""

import json
from pathlib import Path

import typer

from unisono.base.errors import UsageError
from unisono.base.files import write_text
from unisono.base.text import one_line
from unisono.front.cli.llamafactory_file import is_typed
from unisono.front.cli.output import output
from unisono.trainer.plan.task_requests import TasksEvaluated

_OF_OTHERS = ("data", "rewards", "reward", "samples", "threshold", "temperature", "max_tokens", "metric")
_OF_TASKS = ("shots", "chat_template")


def refuse_other_options(context: typer.Context) -> None:
    """Refuses options of other evaluations beside --tasks.

    Raises:
        UsageError: if one is given.
    """
    _refuse(context, _OF_OTHERS, why="--tasks evaluates benchmarks", fix="remove it, or --tasks")


def refuse_options_of_tasks(context: typer.Context) -> None:
    """Refuses options of benchmarks in another evaluation.

    Raises:
        UsageError: if one is given.
    """
    _refuse(context, _OF_TASKS, why="it is for benchmarks", fix="add --tasks, or remove it")


def _refuse(context: typer.Context, names: tuple[str, ...], *, why: str, fix: str) -> None:
    name = next((name for name in names if is_typed(context, name)), None)
    if name is not None:
        option = f"--{name.replace('_', '-')}"
        raise UsageError.of(f"{option} has no effect here", where=option, why=why, fix=fix)


def show_tasks(result: TasksEvaluated, out: Path | None) -> None:
    """Writes lm-eval's results to a file if one is given, and the figures to stdout."""
    printer = output()
    if out is not None:
        body = {**result["results"], "samples": result["samples"]}
        write_text(out, json.dumps(body, ensure_ascii=False, indent=1) + "\n")
        printer.notify(f"wrote the results to {out}")
    if printer.json:
        printer.emit({"schema": 1, "description": result["description"], "tasks": result["figures"]})
        return
    for text in lines_of(result):
        printer.result(text)


def lines_of(result: TasksEvaluated) -> list[str]:
    """The figures of each task as lines for people, each with its standard error."""
    lines = [one_line(result["description"])]
    for task, figures in result["figures"].items():
        lines.append(f"  {one_line(task, limit=60)}")
        for name, value in figures.items():
            if "_stderr" in name:
                continue
            head, _, kind = name.partition(",")
            error = figures.get(f"{head}_stderr" + (f",{kind}" if kind else ""))
            shown = f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")
            lines.append(f"    {one_line(name, limit=40):<24} {shown}")
    return lines

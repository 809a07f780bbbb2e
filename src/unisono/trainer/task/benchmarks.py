"""The task `eval_tasks`: benchmarks of lm-eval, answered by a model of ours."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unisono.base.errors import DataError, UsageError
from unisono.base.events import Reporter
from unisono.base.files import expand, fault_of
from unisono.base.text import nearest, one_line
from unisono.trainer.plan.task_requests import EvaluateTasksRequest, TasksEvaluated
from unisono.trainer.task.inference import open_requested, refuse_code

_FILES = (".yaml", ".yml")
_KEPT = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better")


def run(request: EvaluateTasksRequest, report: Reporter) -> TasksEvaluated:
    """Evaluates.

    Raises:
        UsageError: if lm-eval is missing, there is no such task, or a task file is not trusted.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError.of(
            "benchmarks need the package lm-eval", where="--tasks", fix="pip install 'unisono[lm-eval]'"
        )
    files = [_file_of(name) for name in request.tasks if name.endswith(_FILES)]
    if not request.trust_code:
        refuse_code([str(file) for file in files], where="--tasks")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from unisono.trainer.task.harness_model import HarnessModel

    report.phase("tasks", "looking for the tasks")
    manager = TaskManager()
    tasks = [*_configs(files), *_known(request.tasks, manager.all_tasks)]
    opened = open_requested(request.model, report)
    show = partial(_show, report)
    evaluated: Mapping[str, Any] = simple_evaluate(
        model=HarnessModel(opened, show),
        tasks=tasks,
        num_fewshot=request.shots,
        limit=request.limit,
        apply_chat_template=request.chat,
        task_manager=manager,
        confirm_run_unsafe_code=request.trust_code,
        log_samples=request.samples,
    )
    return {
        "description": opened.target.description,
        "figures": _figures(evaluated),
        "results": {name: _plain(evaluated[name]) for name in _KEPT if name in evaluated},
        "samples": _plain(evaluated.get("samples", {})),
    }


def _show(report: Reporter, text: str, done: int, total: int) -> None:
    report.phase("tasks", text, done=done, total=total)


def _file_of(name: str) -> Path:
    """The task file of a name.

    Raises:
        DataError: if it cannot be read.
    """
    path = expand(name)
    fault = fault_of(path, name)
    if fault is not None:
        raise DataError.of(fault.what, where="--tasks", why=fault.why, fix=fault.fix)
    return path.absolute()


def _configs(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The tasks of files.

    Raises:
        UsageError: if one cannot be read.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    tasks = []
    for file in files:
        try:
            tasks.append(load_yaml(file, resolve_func=True))
        except Exception as error:  # noqa: BLE001 - a file of the user's, with functions of theirs
            raise UsageError.of(
                "the task file cannot be read",
                where=str(file),
                why=one_line(f"{type(error).__name__}: {error}", limit=300),
                fix="see lm-eval's guide to new tasks",
            ) from None
    return tasks


def _known(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The tasks of lm-eval among the names.

    Raises:
        UsageError: if there is no such task.
    """
    tasks = [name for name in names if not name.endswith(_FILES)]
    unknown = next((name for name in tasks if name not in known), None)
    if unknown is not None:
        near = nearest(unknown, list(known))
        raise UsageError.of(
            f"lm-eval has no task {one_line(unknown, limit=80)}",
            where="--tasks",
            fix=f"did you mean {near}?" if near else "`lm_eval ls tasks` lists them",
        )
    return tasks


def _figures(evaluated: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of each task, by their names in lm-eval without filter `none`."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
        }
        for task, figures in evaluated["results"].items()
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it: functions and other objects become their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", None) or str(value)

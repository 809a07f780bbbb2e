"""Entry of a task process: runs the task of a name on the request."""

import importlib
import json
from typing import Any, Protocol

from unisono.base.child import loading_modules, parse_child_arguments, run_child
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.trainer.readers import register_templates

# Name on the command line: the module in this room, and its function `(request, report) -> result`.
TASKS = {
    "contents": ("input_digests", "run"),
    "collective": ("collective", "run"),
    "prepare": ("data_tasks", "prepare"),
    "preview": ("data_tasks", "preview"),
    "survey": ("data_tasks", "survey_data"),
    "generate": ("generation", "run_generate"),
    "chat": ("generation", "run_chat"),
    "serve": ("serving", "run"),
    "eval": ("evaluate", "run"),
    "predict": ("evaluate", "run_predict"),
    "export": ("export", "run"),
    "gguf": ("gguf_export", "run"),
    "draw": ("picture_tasks", "run_generate"),
    "storage": ("checkpoint_tasks", "run_storage"),
    "read_back": ("read_back", "run"),
    "rehearsed": ("checkpoint_tasks", "run_rehearsed"),
    "rows": ("data_tasks", "row_origins"),
}


class Task(Protocol):
    """The function of a task."""

    def __call__(self, request: dict[str, Any], report: Reporter) -> dict[str, Any]:
        """Does the work; gives the fields of the `result` message."""
        ...


def main(argv: list[str]) -> int:
    """Runs one task; gives the exit code."""
    arguments = parse_child_arguments(argv, named=True)
    register_templates()

    def body(report: Reporter) -> dict[str, Any]:
        if arguments.name not in TASKS:
            raise UsageError.of(f"there is no task {arguments.name!r}", fix=f"one of {', '.join(TASKS)}")
        module, function = TASKS[arguments.name]
        with loading_modules():
            task: Task = getattr(importlib.import_module(f"unisono.trainer.task.{module}"), function)
        return task(json.loads(arguments.file.read_text(encoding="utf-8")), report)

    return run_child(body, arguments)

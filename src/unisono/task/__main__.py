"""Entry of a task process: finds the task by its name and runs it on the request."""

import importlib
import json
import sys
from typing import Any, Protocol

from unisono.child import leave, loading_modules, parse_child_arguments, run_child
from unisono.errors import UsageError
from unisono.events import Reporter

# Name on the command line: the module in this room with `run(request, report) -> result`.
TASKS = {
    "contents": "contents",
    "collective": "collective",
    "prepare": "prepare",
    "preview": "preview",
    "generate": "generate",
    "chat": "chat",
    "eval": "evaluate",
    "export": "export",
    "storage": "storage",
    "rehearsed": "rehearsed",
    "rows": "rows",
}


class Task(Protocol):
    """What a task's module offers."""

    def run(self, request: dict[str, Any], report: Reporter) -> dict[str, Any]:
        """Does the work; gives the fields of the `result` message."""
        ...


def main(argv: list[str]) -> int:
    """Runs one task; gives the exit code."""
    arguments = parse_child_arguments(argv, named=True)

    def body(report: Reporter) -> dict[str, Any]:
        if arguments.name not in TASKS:
            raise UsageError.of(f"there is no task {arguments.name!r}", fix=f"one of {', '.join(TASKS)}")
        with loading_modules():
            task: Task = importlib.import_module(f"unisono.task.{TASKS[arguments.name]}")
        return task.run(json.loads(arguments.file.read_text(encoding="utf-8")), report)

    return run_child(body, arguments)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

"""Entry of a task process: runs the task of a name on the request."""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from unisono.base.child import loading_modules, parse_child_arguments, run_child
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.base.files import read_json
from unisono.guard.supervise.codec import decode
from unisono.guard.supervise.task_requests import CollectiveRequest, RowsRequest
from unisono.trainer.plan import task_requests as requests
from unisono.trainer.readers import register_templates

# Name on the command line: the type of its request, and the module in this room with its function.
TASKS: dict[str, tuple[Any, str, str]] = {
    "contents": (requests.ContentsRequest, "input_digests", "run"),
    "collective": (CollectiveRequest, "collective", "run"),
    "prepare": (requests.PrepareRequest, "data_tasks", "prepare"),
    "preview": (requests.PreviewRequest, "data_tasks", "preview"),
    "survey": (requests.SurveyRequest, "data_tasks", "survey_data"),
    "generate": (requests.GenerateRequest, "generation", "run_generate"),
    "chat": (requests.ConversationRequest, "generation", "run_chat"),
    "serve": (requests.ServeRequest, "serving", "run"),
    "eval": (requests.EvaluateRequest, "evaluate", "run"),
    "eval_rewards": (requests.EvaluateRewardsRequest, "reward_evaluation", "run"),
    "eval_tasks": (requests.EvaluateTasksRequest, "benchmarks", "run"),
    "predict": (requests.PredictRequest, "evaluate", "run_predict"),
    "export": (requests.ExportRequest, "export", "run"),
    "gguf": (requests.GgufRequest, "gguf_export", "run"),
    "draw": (requests.DrawRequest, "picture_tasks", "run_generate"),
    "storage": (requests.StorageRequest, "checkpoint_tasks", "run_storage"),
    "read_back": (requests.ReadBackRequest, "read_back", "run"),
    "rehearsed": (requests.RehearsedRequest, "checkpoint_tasks", "run_rehearsed"),
    "rows": (RowsRequest, "data_tasks", "row_origins"),
}


class Task(Protocol):
    """The function of a task."""

    def __call__(self, request: Any, report: Reporter) -> Mapping[str, object]:
        """Does the work; gives the fields of the `result` message."""
        ...


def main(argv: list[str]) -> int:
    """Runs one task; gives the exit code."""
    arguments = parse_child_arguments(argv, named=True)
    register_templates()

    def body(report: Reporter) -> Mapping[str, object]:
        if arguments.name not in TASKS:
            raise UsageError.of(f"there is no task {arguments.name!r}", fix=f"one of {', '.join(TASKS)}")
        kind, module, function = TASKS[arguments.name]
        with loading_modules():
            task: Task = getattr(importlib.import_module(f"unisono.trainer.task.{module}"), function)
        return task(decode(kind, read_json(arguments.file)), report)

    return run_child(body, arguments)

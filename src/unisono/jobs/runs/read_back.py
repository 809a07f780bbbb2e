"""Has the result of a run read back after its ranks have ended: files that hold another model than
the trained one are damage.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from unisono.base.errors import IntegrityError, RankDied, UnisonoError
from unisono.base.messages import Show
from unisono.guard.rundir.records import ReadBackResult
from unisono.guard.supervise.child_process import child_environment
from unisono.guard.supervise.interrupts import Interrupts, Stopped
from unisono.guard.supervise.task_process import TaskProcess, cannot_start
from unisono.jobs.runs.run_records import Ending
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.plan import RunPlan

_SILENCE_S = 1800.0
"""A large model on a slow disk is loaded in one piece, without a message."""


def read_back_result(
    plan: RunPlan,
    ending: Ending,
    *,
    request: TrainRequest,
    leftovers: dict[str, str],
    interrupts: Interrupts,
    show: Show,
) -> Ending:
    """The ending of a run whose result was read back in a process of its own, with `read_back` in
    its fields; of any other run the same.

    Args:
        plan: of the run, whose ranks have ended.
        ending: how they ended.
        request: whose programs are started.
        leftovers: variables of other launchers.
        interrupts: a signal ends it; the result stays.
        show: receives its phase, and a warning if it was not done.
    """
    if ending.outcome != "completed" or not ending.progress.weights or not plan.config.checkpoint.read_back:
        return ending
    began = time.monotonic()
    environment = child_environment(threads=plan.threads, without=leftovers, device=plan.device)
    try:
        with interrupts.raising():
            comparison = _run({"output_dir": plan.output_dir}, request, environment, show)
    except Stopped:
        _warn(show, "the result was not read back: the run was stopped meanwhile", "")
        return ending
    except IntegrityError as error:
        return replace(ending, exit_code=error.exit_code, error=error)
    except UnisonoError as error:  # it says nothing about the files
        _warn(show, f"the result was not read back: {error}", error.problems[0].fix)
        return ending
    compared = ReadBackResult.model_validate({**comparison, "seconds": round(time.monotonic() - began, 3)})
    return replace(ending, progress=replace(ending.progress, read_back=compared))


def _run(
    body: dict[str, str], request: TrainRequest, environment: dict[str, str], show: Show
) -> Mapping[str, object]:
    try:
        task = TaskProcess("read_back", body, programs=request.programs, environment=environment)
    except OSError as error:
        raise cannot_start("read_back", error) from error
    with task:
        for message in task.messages(silence_s=_SILENCE_S):
            if message["kind"] == "result":
                return message
            if message["kind"] == "phase":
                show(message)
    raise RankDied.of("the task read_back ended without a result")


def _warn(show: Show, text: str, fix: str) -> None:
    show({"kind": "warning", "time": time.time(), "code": "not_read_back", "text": text, "fix": fix})

"""Entry of a rank."""

import faulthandler
import json
import signal
from typing import TYPE_CHECKING

from unisono.base import child
from unisono.base.child import leave, loading_modules, parse_child_arguments, run_child
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.base.text import one_line
from unisono.guard.watch import Beats, Pulse, beat_while_collecting
from unisono.trainer.plan import RunPlan
from unisono.trainer.readers import register_templates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from unisono.trainer.training.hooks import RunHook

_GOOD_ENDS = (0, 75, 130)


def main(argv: list[str]) -> int:
    """Runs one rank to its end; gives the exit code."""
    closing: list[Callable[..., bool]] = []
    arguments = parse_child_arguments(argv, named=False)
    register_templates()
    beats, pulse = _begin_to_beat(arguments.beat_fds)

    def body(report: Reporter) -> dict[str, object]:
        with loading_modules():  # torch, seconds; a signal until then simply ends the process
            from unisono.trainer.training.front_io import StopRequest

        beats.enter("start")
        stop = StopRequest()
        has_front = arguments.report_fd is not None
        stop.install((lambda name: report.send({"kind": "asked", "signal": name})) if has_front else None)
        try:
            plan = RunPlan.model_validate(json.loads(arguments.file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError.of(
                "the plan cannot be read", where=str(arguments.file), why=one_line(str(error))
            ) from error
        started = "exec" if child.forked_by is None else "fork"
        report.send(
            {
                "kind": "phase",
                "phase": "start",
                "text": "loading torch",
                "done": None,
                "total": None,
                "started": started,
            }
        )
        with loading_modules():
            from unisono.base.torch_internals import flight_record
            from unisono.trainer.training.process_group import close_group
            from unisono.trainer.training.rank_run import run_plan

            hooks: Sequence[RunHook] = ()
            if plan.faults:  # of a drill or a test
                from unisono.trainer.worker.injected_faults import faults_of

                hooks = faults_of(plan)

        closing.append(close_group)
        pulse.answer = flight_record
        return run_plan(plan, report, stop, snapshot_fd=arguments.snapshot_fd, beats=beats, hooks=hooks)

    code = run_child(body, arguments)
    if code in _GOOD_ENDS:  # else its last sign of life stays that of what failed
        beats.enter("close")
    if not all(close(orderly=code in _GOOD_ENDS) for close in closing):
        leave(code, orderly=False)  # a group that stays open does not hold the process
    return code


def _begin_to_beat(fds: str | None) -> tuple[Beats, Pulse]:
    """Signs of life in the front's memory, and Python's stacks there at a signal; without a front
    for nobody.

    The signal is not SIGUSR1, which is preemption. It is not chained: SIGUSR2's own default ends
    the process.
    """
    if fds is None:
        beats = Beats()
        return beats, beats.pulse()
    record, stacks, answers = map(int, fds.split(","))
    beats = Beats.inherited(record)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)
    pulse = beats.pulse(answers_fd=answers)
    pulse.start()
    beat_while_collecting(beats)
    return beats, pulse

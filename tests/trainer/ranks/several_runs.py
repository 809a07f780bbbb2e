"""One rank that does several runs, one after the other, so that one import of torch serves many:
`python -m tests.trainer.ranks.several_runs PLAN... --report-fd N`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from unisono.base.child import end_with_front
from unisono.base.events import Reporter
from unisono.base.messages import ResultMessage, message_of
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.memory import KEPT_WHOLE_BYTES
from unisono.trainer.training import sharding
from unisono.trainer.training.front_io import StopRequest
from unisono.trainer.training.process_group import close_group
from unisono.trainer.training.rank_run import run_plan
from unisono.trainer.worker.injected_faults import faults_of


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--front-pid", type=int)
    parser.add_argument("--kept-whole-bytes", type=int, default=KEPT_WHOLE_BYTES)
    arguments = parser.parse_args()
    end_with_front(arguments.front_pid)
    vars(sharding)["KEPT_WHOLE_BYTES"] = arguments.kept_whole_bytes  # 0: layers as in a large model
    for file in arguments.plans:
        report = Reporter(arguments.report_fd, fallback=sys.stderr)
        plan = RunPlan.model_validate(json.loads(file.read_text()))
        result = run_plan(plan, report, StopRequest(), hooks=faults_of(plan))
        report.send(message_of(ResultMessage, result))
        assert close_group(orderly=True)
        assert close_group(orderly=True), "closing twice is once"
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

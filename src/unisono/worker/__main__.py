"""Entry of a rank."""

import json
import sys
from typing import Any

from unisono.child import parse_child_arguments, run_child
from unisono.errors import UsageError
from unisono.events import Reporter
from unisono.plan import RunPlan
from unisono.text import one_line


def main(argv: list[str]) -> int:
    """Runs one rank to its end; gives the exit code."""
    arguments = parse_child_arguments(argv, named=False)

    def body(report: Reporter) -> dict[str, Any]:
        from unisono.train.stop import (
            StopRequest,
        )  # with torch, seconds; a signal until then simply ends the process

        stop = StopRequest()
        stop.install()
        try:
            plan = RunPlan.model_validate(json.loads(arguments.file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError.of(
                "the plan cannot be read", where=str(arguments.file), why=one_line(str(error))
            ) from error
        report.phase("start", "loading torch")
        from unisono.train.whole import run_plan

        return run_plan(plan, report, stop)

    return run_child(body, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

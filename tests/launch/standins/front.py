"""The front with other programs behind it: `python front.py FAULTS-JSON train CONFIG …`, as tests start it."""

import dataclasses
import json
import sys
from pathlib import Path

import unisono.launch.asked
from unisono.cli.app import main
from unisono.launch.command import Programs

HERE = Path(__file__).parent
PROGRAMS = Programs(
    worker=(sys.executable, str(HERE / "worker.py")), task=(sys.executable, str(HERE / "task.py"))
)


class Request(unisono.launch.asked.TrainRequest):
    """The same request, with the stand-ins as programs and with faults in the plan."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        object.__setattr__(self, "programs", PROGRAMS)
        object.__setattr__(self, "faults", json.loads(sys.argv[1]))


assert dataclasses.is_dataclass(Request)
unisono.launch.asked.TrainRequest = Request  # type: ignore[misc]
main(sys.argv[2:])

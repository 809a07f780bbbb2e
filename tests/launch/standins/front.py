"""The front with other programs behind it: `python front.py FAULTS-JSON train CONFIG …`, as tests start it.

Two entries are no faults: `rhythm` hurries the reading of old checkpoints, `real` leaves worker and tasks as they are.
"""

import dataclasses
import json
import sys
from pathlib import Path

import unisono.launch.train_request
from unisono.cli.app import main
from unisono.remote_checkpoint.verification import ReadingRate
from unisono.supervise.child_process import Programs

HERE = Path(__file__).parent
PROGRAMS = Programs(
    worker=(sys.executable, str(HERE / "worker.py")), task=(sys.executable, str(HERE / "task.py"))
)


class Request(unisono.launch.train_request.TrainRequest):
    """The same request, with the stand-ins as programs and with faults in the plan."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        faults = json.loads(sys.argv[1])
        object.__setattr__(self, "rhythm", ReadingRate(**faults.pop("rhythm", {})))
        if not faults.pop("real", False):
            object.__setattr__(self, "programs", PROGRAMS)
        object.__setattr__(self, "faults", faults)


assert dataclasses.is_dataclass(Request)
unisono.launch.train_request.TrainRequest = Request  # type: ignore[misc]
main(sys.argv[2:])

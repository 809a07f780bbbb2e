"""The front with other programs behind it: `python front.py FAULTS-JSON train CONFIG …`, as tests
start it.

Two entries are no faults: `rhythm` hurries the reading of old checkpoints, `real` leaves worker and
tasks as they are. The other programs are forked by the session's server where it can fork them, as
real ranks are by their front's.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import unisono.jobs.runs.session
import unisono.jobs.runs.train_request
from tests.shared_fork_server import SharedOnly
from unisono.front.cli.app import main
from unisono.guard.supervise import fork_server
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.fork_server import Forked
from unisono.jobs.remote_checkpoint.verification import ReadingRate

HERE = Path(__file__).parent
PROGRAMS = Programs(
    worker=(sys.executable, str(HERE / "worker.py")), task=(sys.executable, str(HERE / "task.py"))
)
_MODULES = {str(HERE / f"{name}.py"): f"tests.jobs.runs.standins.{name}" for name in ("worker", "task")}


class StandinServer(SharedOnly):
    """Forks the stand-ins, too, but does not import torch for them."""

    def __init__(self, *arguments: Any) -> None:
        del arguments
        super().__init__()

    def start(self, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], *, waits: bool) -> Forked | None:  # fmt: skip
        """As the module that it is: a server forks no scripts."""
        program, what, *words = command
        command = [program, "-m", _MODULES[what], *words] if what in _MODULES else command
        return super().start(command, environment, fds, waits=waits)


class Request(unisono.jobs.runs.train_request.TrainRequest):
    """The same request, with the stand-ins as programs and with faults in the plan."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        faults = json.loads(sys.argv[1])
        object.__setattr__(self, "rhythm", ReadingRate(**faults.pop("rhythm", {})))
        if not faults.pop("real", False):
            programs = dataclasses.replace(PROGRAMS, fork_server=self.programs.fork_server)
            object.__setattr__(self, "programs", programs)
            setattr(unisono.jobs.runs.session, "ForkServer", StandinServer)  # noqa: B010 - a class is replaced on purpose
        object.__setattr__(self, "faults", faults)


assert dataclasses.is_dataclass(Request)
fork_server._SERVED = (*fork_server._SERVED, *_MODULES.values())
unisono.jobs.runs.train_request.TrainRequest = Request  # type: ignore[misc]
main(sys.argv[2:])

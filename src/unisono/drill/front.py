"""A front of a drill's run: `python -m unisono.drill.front REQUEST.json`. It speaks JSON lines, as `unisono train --json` does.

Faults and a clock that jumps cannot come by the command line of `unisono train`, by a config, or by the environment; so a drill has this
entry of its own. Its ranks are started as all ranks are.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from unisono.child import end_with_front
from unisono.errors import UnisonoError
from unisono.events import Message
from unisono.facts import Probes
from unisono.launch.outcome import refused_result
from unisono.launch.session import train
from unisono.launch.train_request import TrainRequest


@dataclasses.dataclass(frozen=True)
class JumpingClock:
    """The wall clock of this machine, which is off as soon as a rank has left its mark."""

    marks: Path
    seconds: float

    def wall(self) -> float:
        """Seconds since 1970, or what this clock takes for them."""
        return time.time() + (self.seconds if any(self.marks.iterdir()) else 0.0)

    def monotonic(self) -> float:
        """Does not jump."""
        return time.monotonic()


def main(path: Path) -> int:
    """Trains as the file asks; gives the exit code of DESIGN A2."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    end_with_front(asked.pop("parent"))
    try:
        return int(train(_request(asked), _show)["exit_code"])
    except UnisonoError as error:
        body = error.to_json()
        verdict = error.verdict.to_json() if error.verdict else None
        if verdict:
            _show({"kind": "verdict", **verdict})
        _show({"kind": "result", **refused_result(error.exit_code, body["problems"], verdict)})  # type: ignore[arg-type]
        return error.exit_code


def _request(asked: dict[str, Any]) -> TrainRequest:
    """The start that is asked for: fields of TrainRequest, and `clock_jump_s`."""
    jump_s = asked.pop("clock_jump_s")
    request = TrainRequest(Path(asked.pop("config_path")), rehearse=False, **asked)
    if not jump_s:
        return request
    clock = JumpingClock(Path(request.faults["marks"]), jump_s)
    return dataclasses.replace(request, probes=dataclasses.replace(Probes(), clock=clock))


def _show(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

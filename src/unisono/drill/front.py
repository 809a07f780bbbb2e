"""The front of a drill's run: `python -m unisono.drill.front REQUEST.json`. It prints JSON lines, as `unisono train --json` does.

Faults and a jumping clock cannot be set by the command line of `unisono train`, by a config or by the environment, so a drill has this
entry of its own. Its ranks start like all ranks.
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
    """The wall clock of this machine, which jumps as soon as a rank has created its mark."""

    marks: Path
    seconds: float

    def wall(self) -> float:
        """Seconds since 1970, plus the jump."""
        return time.time() + (self.seconds if any(self.marks.iterdir()) else 0.0)

    def monotonic(self) -> float:
        """The real monotonic clock, without the jump."""
        return time.monotonic()


def main(path: Path) -> int:
    """Trains as the request file says; returns the exit code."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    end_with_front(fields.pop("parent"))
    try:
        return int(train(_request(fields), _show)["exit_code"])
    except UnisonoError as error:
        body = error.to_json()
        verdict = error.verdict.to_json() if error.verdict else None
        if verdict:
            _show({"kind": "verdict", **verdict})
        _show({"kind": "result", **refused_result(error.exit_code, body["problems"], verdict)})  # type: ignore[arg-type]
        return error.exit_code


def _request(fields: dict[str, Any]) -> TrainRequest:
    """The TrainRequest of the file: its fields, and `clock_jump_s`."""
    jump_s = fields.pop("clock_jump_s")
    request = TrainRequest(Path(fields.pop("config_path")), rehearse=False, **fields)
    if not jump_s:
        return request
    clock = JumpingClock(Path(request.faults["marks"]), jump_s)
    return dataclasses.replace(request, probes=dataclasses.replace(Probes(), clock=clock))


def _show(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

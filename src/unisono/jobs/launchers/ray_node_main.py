"""`python -m unisono.jobs.launchers.ray_node_main REQUEST.json PID`: a node's front under Ray.

It writes its messages to stdout, one on each line.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from unisono.base.child import end_with_front
from unisono.base.errors import UnisonoError
from unisono.base.events import Reporter
from unisono.base.messages import StartRefusedMessage, message_of
from unisono.guard.rendezvous.party import watch_lifeline
from unisono.jobs.launchers.ray_node_fronts import RayLossFiles
from unisono.jobs.runs.session import train
from unisono.jobs.runs.train_request import TrainRequest

LIFELINE = "-"


def main(request: dict[str, Any], guard: int) -> int:
    """The exit code of the node's front, run to its end.

    Args:
        request: the config, and in `options` the fields of a TrainRequest; or in `look` the
            arguments of `unisono`, null in place of the config.
        guard: the pid of the process that started this one; this front ends with it.
    """
    end_with_front(guard)
    if "look" in request:  # the program writes its own output
        words = [request["config"] if word is None else word for word in request["look"]]
        os.execv(sys.executable, [sys.executable, "-m", "unisono", *words])  # noqa: S606 - no shell
    reporter = Reporter(_own_stdout())
    config = Path(request["config"])
    training = TrainRequest(
        config_path=config,
        token_file=LIFELINE,
        lost_node_source=RayLossFiles(config.parent),
        **request["options"],
    )
    if training.nodes == "1":  # with several nodes the reader of the token watches it
        watch_lifeline()
    try:
        return train(training, reporter.send).exit_code
    except UnisonoError as error:
        reporter.send(message_of(StartRefusedMessage, error.to_json()))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of a process: reported, with traceback
        traceback.print_exc()
        reporter.send(
            {
                "kind": "start_refused",
                "exit_code": 1,
                "verdict": None,
                "problems": [
                    {
                        "what": f"a bug in unisono: {error!r}",
                        "fix": "see the traceback in the log of that front",
                    }
                ],
            }
        )
        return 1


def _own_stdout() -> int:
    """A descriptor for messages. Other output to stdout is redirected to stderr."""
    fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return fd


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])))

"""The front with another ssh: `python ssh_front.py SSH-JSON train CONFIG … --hosts …`, as tests
start it.
"""

import json
import sys

import unisono.jobs.runs.train_request
from unisono.front.cli.app import main


class Request(unisono.jobs.runs.train_request.TrainRequest):
    """The same request, with the test's port and keys."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        object.__setattr__(self, "ssh", tuple(json.loads(sys.argv[1])))


unisono.jobs.runs.train_request.TrainRequest = Request  # type: ignore[misc]
main(sys.argv[2:])

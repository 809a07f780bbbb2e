"""A front that has one process forked and one executed, and prints the facts of both: python -m
tests.jobs.runs.standins.shared_front
"""

import contextlib
import json
import os
import signal
import sys
import tempfile

from tests import shared_fork_server
from tests.jobs.runs.standins import reported_facts
from unisono.guard.supervise import child_process, fork_server
from unisono.guard.supervise.child_process import ChildProcess

_LIGHT = "tests.jobs.runs.standins.light_server"


def main() -> None:
    execute = child_process.start_process
    shared_fork_server.install()
    child_process.start_process = execute
    fork_server._SERVER, fork_server._SERVED = _LIGHT, (reported_facts.__name__,)
    with (
        tempfile.TemporaryFile() as log,
        contextlib.closing(fork_server.ForkServer(lambda _: None)) as server,
    ):
        for forks in (True, False):
            child = ChildProcess(
                lambda fd: [sys.executable, "-m", reported_facts.__name__, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
                environment=dict(os.environ), output=log, has_input=True,
                fork_server=server if forks else None, waits=True,
            )  # fmt: skip
            found = child.read(0.05)
            while not found:
                found = child.read(0.05)
            sys.stdout.write(
                json.dumps(
                    {"server": server.process and server.process.pid, "front": os.getpid(), **found[0]}
                )
                + "\n"
            )
            sys.stdout.flush()
        if "--stays" in sys.argv:
            signal.pause()


if __name__ == "__main__":
    main()

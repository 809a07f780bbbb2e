"""`python -m unisono.front.api REQUEST.json --report-fd N`: the front of a Python program.

It reports on a pipe, and ends with the program.

The commands are those of `unisono train --json` and `unisono doctor --json`, with all messages that
the screen gets.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from unisono.base.errors import UnisonoError, storage_failure, unusable_path
from unisono.base.events import Reporter
from unisono.base.files import read_json
from unisono.base.messages import ReportMessage, Show, StartRefusedMessage, message_of
from unisono.front.api.front import FrontRequest
from unisono.guard.supervise.codec import decode
from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of

STOP = {"kind": "stop"}
"""On stdin: save, then end. The end of stdin is the end of the program: then as after SIGTERM."""


def main(arguments: list[str]) -> int:
    """Serves one request; the exit code is that of the command line."""
    parser = argparse.ArgumentParser(prog="python -m unisono.front.api")
    parser.add_argument("request", type=Path)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--front-pid", type=int, help="of the program; shown by ps only")
    given = parser.parse_args(arguments)
    request = decode(FrontRequest, read_json(given.request))
    reporter = Reporter(given.report_fd)
    try:
        threading.Thread(target=_follow_program, name="program", daemon=True).start()
        return (_doctor if request.command == "doctor" else _train)(request, reporter.send)
    except KeyboardInterrupt:  # before there was anything to save
        reporter.send({"kind": "stopped", "exit_code": 130})
        return 130
    except Exception as error:  # noqa: BLE001 - the edge of a process: reported, with the traceback of a bug
        return _refused(error, reporter)


def _train(request: FrontRequest, show: Show) -> int:
    from unisono.jobs.launchers.launchers import run_launcher, with_launcher_options
    from unisono.jobs.runs.train_request import TrainRequest

    options = with_launcher_options(request.options)
    options["allow"] = tuple(options.get("allow") or ())
    training = TrainRequest(Path(request.config or ""), request.overrides, **options)
    return run_launcher(training, show).exit_code


def _doctor(request: FrontRequest, show: Show) -> int:
    from unisono.front.checks.check import DoctorRequest
    from unisono.front.checks.cluster_doctor import examine_with_launcher
    from unisono.jobs.launchers.launchers import with_launcher_options

    config, options = request.config, with_launcher_options(request.options)
    strict = options.pop("strict", False)
    try:
        with Interrupts():
            examination = examine_with_launcher(
                DoctorRequest(
                    Path(config or ""),
                    request.overrides,
                    has_config=bool(config),
                    show=show,
                    **options,
                )
            )
    except Stopped as stopped:
        show({"kind": "stopped", "exit_code": exit_code_of(stopped.number)})
        return exit_code_of(stopped.number)
    code = examination.exit_code(strict=strict)
    show(message_of(ReportMessage, {"exit_code": code, "host": examination.host, **examination.to_json()}))
    return code


def _refused(error: Exception, reporter: Reporter) -> int:
    if not isinstance(error, UnisonoError):
        error = unusable_path(error, has_started=True) or storage_failure(error) or error
    if isinstance(error, UnisonoError):
        reporter.send(message_of(StartRefusedMessage, {"type": type(error).__name__, **error.to_json()}))
        return error.exit_code
    text = "".join(traceback.format_exception(error))
    reporter.send({"kind": "crashed", "error": repr(error), "traceback": text})
    return 1


def _follow_program() -> None:
    """Turns the program's messages, and its end, into the signals that a terminal or a scheduler
    would send.
    """
    fd = sys.stdin.fileno()  # not through the buffer, whose lock Python needs at its exit
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(fd, 4096):
            for _ in range(data.count(b"\n")):
                os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

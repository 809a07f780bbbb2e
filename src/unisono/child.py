"""Runs the body of a process that a front started: ties it to the front's life, and reports how it ended."""

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError
from unisono.events import Reporter
from unisono.text import one_line

_PR_SET_PDEATHSIG = 1
_PEER_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "NCCL communicator was aborted",
    "remote process exited",
)


def parse_child_arguments(argv: list[str], *, named: bool) -> argparse.Namespace:
    """The command line of a worker (`plan.json`) or, with `named`, of a task (`NAME request.json`)."""
    parser = argparse.ArgumentParser(description="Started by unisono's front; see `unisono --help`.")
    if named:
        parser.add_argument("name")
    parser.add_argument("file", type=Path, help="plan.json of a worker, request.json of a task")
    parser.add_argument(
        "--report-fd", type=int, default=None, help="where messages for the front go; else lines on stderr"
    )
    if not named:
        parser.add_argument(
            "--snapshot-fd",
            type=int,
            default=None,
            help="memory of the front, in which this rank keeps its newest step",
        )
    parser.add_argument("--events", default=None, help="a file that keeps the messages, too")
    parser.add_argument("--front-pid", type=int, default=None, help="the front, with which this process ends")
    return parser.parse_args(argv)


def end_with_front(front_pid: int | None) -> None:
    """Has the kernel end this process when its front dies, also by kill -9 (prctl(2), Linux)."""
    if front_pid is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != front_pid:  # it died before the call above
        os._exit(1)


def run_child(body: Callable[[Reporter], dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Runs `body`, and reports its result, its refusal, or its crash. Gives the exit code.

    The last message is `result` (with what `body` gave), `refused` or `crashed`.
    """
    end_with_front(arguments.front_pid)
    reporter = Reporter(arguments.report_fd, fallback=sys.stderr, log_path=arguments.events)
    try:
        result = body(reporter)
    except UnisonoError as error:
        reporter.send("refused", **error.to_json())
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of a process: recorded, and told to the front
        text = traceback.format_exc()
        sys.stderr.write(text)  # the log keeps it also where the front is gone
        place = _innermost(error)
        reporter.send(
            "crashed",
            exit_code=5,
            error=one_line(f"{type(error).__name__}: {error}"),
            where=place,
            traceback=text,
            peer_lost=is_peer_loss(error),
        )
        return 5
    reporter.send("result", **result)
    return int(result.get("exit_code", 0))


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is the consequence of another rank's death, as torch, gloo and NCCL tell it.

    Errors of the same words that no collective has raised (a download, a pipe of one's own) are not.
    """
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _PEER_ERRORS:
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _PEER_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _innermost(error: BaseException) -> str:
    """file:line where the exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""

"""Runs the body of a process that a front started: ties it to the front's life, and reports how it
ended.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from unisono.base.errors import UnisonoError, storage_failure, unusable_path
from unisono.base.events import Reporter, describe_crash, is_peer_loss
from unisono.base.messages import CrashedMessage, RefusedMessage, ResultMessage, message_of

_PR_SET_PDEATHSIG = 1
TEMPLATE_HAS_NO_END = signal.SIGVTALRM
"""What the kernel ends a process with whose chat template cannot be interrupted (data.template);
its front knows it by that.
"""
TOKENIZER_HAS_NO_END = signal.SIGPROF
"""The signal that ends a process whose tokenizer exceeds its CPU time (data.text_encoder)."""

forked_by: int | None = None
"""The fork server (unisono.trainer.worker.fork_server) that this process was forked by; None in a
process that exec has begun.
"""


def parse_child_arguments(argv: list[str], *, named: bool) -> argparse.Namespace:
    """The command line of a worker (`plan.json`) or, with `named`, of a task (`NAME
    request.json`).
    """
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
        parser.add_argument(
            "--beat-fds",
            default=None,
            metavar="N,N,N",
            help="memory of the front: this rank's signs of life, its stacks, its answers",
        )
    parser.add_argument("--events", default=None, help="a file that keeps the messages, too")
    parser.add_argument("--front-pid", type=int, default=None, help="the front, with which this process ends")
    return parser.parse_args(argv)


def end_with_front(front_pid: int | None) -> None:
    """Has the kernel end this process when its front dies, also by kill -9 (prctl(2), Linux).

    A process that was forked ends with the fork server, which ends with the front.
    """
    if front_pid is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != (forked_by or front_pid):  # it died before the call above
        os._exit(1)


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Python's garbage collector rests while modules are imported, and never looks at what they
    left.

    Nearly all that an import makes stays; scanning it again at each threshold took a fifth of the
    seconds that torch, transformers and peft cost, and later made each full collection within
    training longer.
    """
    gc.disable()
    # On CPUs bitsandbytes 0.50 reports a kernel that it can do without, in every process.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_child(body: Callable[[Reporter], Mapping[str, object]], arguments: argparse.Namespace) -> int:
    """Runs `body`, and reports its result, its refusal, or its crash. Gives the exit code.

    The last message is `result` (with what `body` gave), `refused` or `crashed`. An error of the
    storage that nobody foresaw is a refusal with exit code 6.
    """
    end_with_front(arguments.front_pid)
    reporter = Reporter(arguments.report_fd, fallback=sys.stderr, log_path=arguments.events)
    try:
        return _ended(body, reporter, is_task="name" in arguments)
    finally:
        reporter.close()


def leave(code: int, *, orderly: bool = True) -> NoReturn:
    """Ends this process with its exit code, once everything has been reported, without finalizing
    the interpreter.

    While that is done, a thread or a static object of torch's may abort the process ("terminate
    called without an active exception", torch 2.13, one end in some fifty on a busy machine); a
    rank that had reported its result then counted as crashed.

    Args:
        code: of the exit.
        orderly: whether what was registered with atexit is called: not where something that it
            waits for may hang.
    """
    if orderly:
        # No public function of Python 3.14 calls them without the rest of the interpreter's end.
        atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _result(body: Callable[[Reporter], Mapping[str, object]], reporter: Reporter) -> Mapping[str, object]:
    """What `body` gives; an import that fails because the trainer is not installed is a refusal."""
    try:
        return body(reporter)
    except ImportError as error:
        from unisono.base.requirements import refuse_without_trainer

        refuse_without_trainer(f"import {error.name}")
        raise


def _ended(body: Callable[[Reporter], Mapping[str, object]], reporter: Reporter, *, is_task: bool) -> int:
    try:
        result = _result(body, reporter)
    except UnisonoError as error:
        reporter.send(message_of(RefusedMessage, error.to_json()))
        return error.exit_code
    except Exception as error:  # noqa: BLE001
        # This is the edge of a process: the error is recorded, and reported to the front.
        crash = describe_crash(error)
        # A task has its paths from a person; those of a rank were usable when its run began.
        failure = unusable_path(error, has_started=not is_task) or (
            None if is_peer_loss(error) else storage_failure(error)
        )
        if failure is not None:
            reporter.send(message_of(RefusedMessage, failure.to_json()))
        else:
            reporter.send(message_of(CrashedMessage, {"exit_code": 5, **crash}))
        # The log keeps it also where the front is gone; last, for its disk may hang.
        with contextlib.suppress(OSError):
            sys.stderr.write(crash["traceback"])
        return failure.exit_code if failure is not None else 5
    reporter.send(message_of(ResultMessage, result))
    code = result.get("exit_code", 0)
    return code if isinstance(code, int) else 0

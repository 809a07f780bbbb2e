"""Lets a test make a living rank fail: Python imports this file where PYTHONPATH names its
folder.

Real-time signal +1 raises an exception wherever the rank is, +2 leaves with exit status 0, +3
refuses.
"""

import os
import signal
import sys

RAISE, LEAVE, REFUSE = (signal.SIGRTMIN + number for number in (1, 2, 3))


def _raise(*_: object) -> None:
    raise ZeroDivisionError("a batch of nothing")


def _raise_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Where the rank was in a finalizer or a callback of the collector, Python has dropped the
    exception.
    """
    sys.__unraisablehook__(dropped)
    if isinstance(dropped.exc_value, ZeroDivisionError):
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # not at once, which would be in here


def _leave(*_: object) -> None:
    os._exit(0)


def _refuse(*_: object) -> None:
    from unisono.base.errors import DataError

    raise DataError.of("a row that nobody wants", where="rows.jsonl:7", fix="take it out")


if {"unisono.worker", "unisono.trainer.worker.fork_server"} & {
    *sys.orig_argv
}:  # a rank, or what ranks are forked from
    signal.signal(RAISE, _raise)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _raise_again
    signal.signal(LEAVE, _leave)
    signal.signal(REFUSE, _refuse)

"""Stacks of processes that a rank of a foreign program starts, e.g. of a loader: each writes them
into its memory.

Such a process is not a rank and leaves no file in the border, since a program may start thousands.
Its memory has no path; the front finds it among the process's open files by its name, which has the
number of the signal.
"""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unisono.guard.watch.views import WorkerProcess

_NAME = "unisono-worker-stacks-"
_MOST_WORKERS = 32
_MOST_FILES = 1024


def show_stacks(number: int) -> int:
    """Makes this process write its stacks at a signal; returns the descriptor of its memory.

    Args:
        number: of the signal, which the process does not use itself.
    """
    import faulthandler

    fd = os.memfd_create(f"{_NAME}{number}", os.MFD_CLOEXEC)
    # Never chained: the default action of a real-time signal kills the process.
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return fd


def workers_below(pid: int) -> "list[WorkerProcess]":
    """The workers among the descendants of a process, at most 32, for the front, which closes their
    files.
    """
    from unisono.guard.facts.processes import children_of

    workers: list[WorkerProcess] = []
    todo = [pid]
    while todo and len(workers) < _MOST_WORKERS:
        for child in children_of(todo.pop(0)):
            todo.append(child)
            workers += _worker(child)
    return workers


def _worker(pid: int) -> "Iterator[WorkerProcess]":
    from unisono.guard.watch.views import StacksFile, WorkerProcess

    folder = f"/proc/{pid}/fd"
    with suppress(OSError):  # it has ended, or belongs to a different user
        # pathlib would make paths of what are names alone.
        for name in sorted(os.listdir(folder), key=int)[:_MOST_FILES]:  # noqa: PTH208
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - its text is not a path
            number = link.removeprefix(f"/memfd:{_NAME}").partition(" ")[0]
            if number != link and number.isdecimal():
                fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                yield WorkerProcess(pid, int(number), StacksFile(fd))
                return

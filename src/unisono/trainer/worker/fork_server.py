"""The fork server: imports once what ranks and tasks need, and forks one for each request.

It has one thread and opens neither a device nor a process group; docs/decisions/0018-fork-server.md
lists what a forked process resets.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import mmap
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import unisono.base.child

_WITH_PEFT = "unisono.trainer.training.rank_run"
_MODULES: tuple[str, ...] = (
    "torch",
    "unisono.trainer.training.process_group",
    "unisono.base.torch_internals",
    "unisono.trainer.task.data_tasks",
    "transformers.models.llama.modeling_llama",
    _WITH_PEFT,
)
"""What ranks and the tasks beside them load. Another model's code is loaded by its ranks."""

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Numpy's BLAS and Arrow's allocator else start threads at their import, which no fork has."""

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MM_MAP = struct.Struct("=11QQIi")  # struct prctl_mm_map of linux/prctl.h
_IN_STAT = (23, 24, 42, 43, 44, 25)  # where proc(5) has what stays: code, data, heap, stack
_shown: list[mmap.mmap] = []  # the kernel reads it as long as the process lives


class Request(NamedTuple):
    """A process that the front wants."""

    command: Sequence[str]  # as for exec: interpreter, `-m`, module, its arguments
    environment: Mapping[str, str]
    fds: Mapping[int, int]  # a file descriptor here by the number that it has there
    channel: socket.socket  # to the front; says that the process has begun, and how it ended


def serve(control: socket.socket) -> Request | None:
    """Serves a front until it is gone; None then. In each fork it returns what that is to become.

    A process that has ended stays a zombie until the front asks how, so its number is not reused.
    If the front closes the channel before, the process is killed.
    """
    forked: dict[int, tuple[int, socket.socket]] = {}  # by the number of the channel
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != control.fileno():
                poll.unregister(fd)
                _end(*forked.pop(fd))
                continue
            fds = socket.recv_fds(control, 16, 64)[1]
            if not fds:
                return None
            request = _read(fds)
            pid = _fork(request)
            if pid == 0:
                for one in (control, *(channel for _, channel in forked.values())):
                    one.close()
                return request
            if pid is not None:
                forked[request.channel.fileno()] = pid, request.channel
                poll.register(request.channel, select.POLLIN)


def _read(fds: Sequence[int]) -> Request:
    """A request: its channel, its words in memory, and what it hands over."""
    channel, words, *handed = fds
    with os.fdopen(words, "rb") as file:
        file.seek(0)
        body = json.load(file)
    numbers = dict(zip(body["fds"], handed, strict=True))
    return Request(body["command"], body["environment"], numbers, socket.socket(fileno=channel))


def _fork(request: Request) -> int | None:
    """The number of the process; 0 in it, None if there is none."""
    server, pid = os.getpid(), None
    try:
        pid = os.fork()
    except OSError as error:
        send(request.channel, refused=str(error))
    if pid == 0:
        os.setsid()
        unisono.base.child.forked_by = server
        unisono.base.child.end_with_front(server)
    else:
        for fd in request.fds.values():
            os.close(fd)
    return pid


def _end(pid: int, channel: socket.socket) -> None:
    """The front asks how a process has ended, or has closed its channel."""
    with channel, contextlib.suppress(OSError):
        if channel.recv(16):
            send(channel, returncode=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def send(channel: socket.socket, **words: Any) -> None:
    """Sends a message to a front, which may be gone."""
    with contextlib.suppress(OSError):
        channel.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)


def become(request: Request) -> None:
    """Makes this fork what a fresh process is: descriptors, environment, names, random state."""
    printed = os.pread(2, 1 << 16, 0)  # by the imports; it begins the process's log, as without a fork
    with _placed(request) as channel:
        with contextlib.suppress(OSError):
            os.write(2, printed)
        coerced = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}
        os.environ.clear()
        os.environ.update(coerced | {**request.environment})  # the interpreter sets it at its start
        sys.argv[:] = request.command[2:]  # behind the interpreter and -m
        sys.orig_argv[:] = request.command
        _show_as(request.command, request.environment)
        tempfile.tempdir = None  # as TMPDIR says now
        if numpy := sys.modules.get("numpy"):  # Python reseeds its own; torch's seed is fixed
            numpy.random.seed()
        if "torch" in sys.modules and (threads := request.environment.get("OMP_NUM_THREADS")):
            sys.modules["torch"].set_num_threads(int(threads))
        send(channel, pid=os.getpid())


def _placed(request: Request) -> socket.socket:
    """Gives each descriptor its number, and the channel one that is not taken."""
    above = max({*request.fds, *request.fds.values(), request.channel.fileno()}) + 1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in request.fds.items()}
    channel = socket.socket(fileno=fcntl.fcntl(request.channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above))
    request.channel.close()
    for fd in request.fds.values():
        os.close(fd)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)
    return channel


def _show_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Has /proc/PID/cmdline and environ show these, by which people and fronts find ranks."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    *segments, stack = (int(fields[index]) for index in _IN_STAT)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    layout = _MM_MAP.pack(*segments, libc.sbrk(0), stack, start, middle, middle, end, 0, 0, -1)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(layout), ctypes.c_ulong(len(layout)), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
    _shown.append(memory)


def load() -> str:
    """Imports; gives why nothing can be forked, empty if it can."""
    environment = {**os.environ}
    os.environ.update(_ONE_THREAD)
    try:
        with unisono.base.child.loading_modules():
            for name in _MODULES:
                # peft imports bitsandbytes, which opens the GPUs, and then nothing can be forked.
                if name != _WITH_PEFT or not (
                    find_spec("bitsandbytes") and sys.modules["torch"].version.cuda
                ):
                    importlib.import_module(name)
        _show_as(sys.orig_argv, environment)
    except Exception as error:  # noqa: BLE001 - a fresh process meets the same, and says so as it always did
        return f"{type(error).__name__}: {error}"
    if (threads := len([*Path("/proc/self/task").iterdir()])) != 1:
        return f"{threads} threads run after the imports"
    has_cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    return "CUDA is initialized after the imports" if has_cuda else ""


def main(argv: list[str]) -> None:
    """Serves the front with the pid in `argv`; in a fork, runs its module."""
    # A signal to all processes of a job asks the ranks to stop, and must not end the server.
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    unisono.base.child.end_with_front(int(argv[0]))
    control = socket.socket(fileno=0)
    refusal = load()
    send(control, **({"refused": refusal} if refusal else {"ready": True}))
    request = serve(control) if not refusal else None
    if request is None:
        os._exit(0)
    become(request)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

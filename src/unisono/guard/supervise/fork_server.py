"""The fork server of a front, which starts ranks and tasks without their imports; and what it has
started, as the front sees it.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from unisono.base._version import PACKAGE
from unisono.base.text import is_left_by_launcher, one_line

_SERVER = "unisono.trainer.worker.fork_server"
_SERVED: tuple[str, ...] = ("unisono.worker", "unisono.task")
SHARED = "UNISONO_FORK_SERVER"
"""The environment variable with the socket of a server that many fronts share; set by a suite of
tests, as its starts are many and short.
"""
_LIMIT_S = 120.0  # of imports, on a machine with much to do
_GREETING_S = 10.0  # of a shared server, which has imported everything
_MESSAGE_BYTES = 4096
_PRINTED_BYTES = 4000


class Forked:
    """A process that the fork server has forked. It offers what ChildProcess needs of a process.

    Attributes:
        pid: of the process; no other gets the number before `wait` has given how it ended.
        stdin: the writing end of its input, if it has one.
    """

    def __init__(self, pid: int, channel: socket.socket, stdin: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)
        self._returncode: int | None = None

    def has_ended(self) -> bool:
        """Whether the process is dead."""
        return self._returncode is not None or bool(select.select([self._pidfd], [], [], 0)[0])

    def wait(self, timeout: float) -> int:
        """The exit status; negative: the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: if it lives on.
        """
        if self._returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self._returncode = self._status()
            self._channel.close()  # the number is free from here on
            os.close(self._pidfd)
        return self._returncode

    def _status(self) -> int:
        """As its parent says, or the kernel where that is dead, with which its processes are
        killed.
        """
        status = _receive(self._channel, limit_s=1.0).get("returncode")
        if not isinstance(status, int):
            from unisono.guard.facts.processes import (
                exit_status,  # not at the top: takes as long as the other imports
            )

            status = exit_status(self._pidfd, self.pid)
        return status if status is not None else -signal.SIGKILL


class _SharedServer:
    """A server that a shared one has forked for this front.

    It offers what ForkServer uses of a subprocess.Popen.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """Ends it, and with it what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Returns once it has ended; its exit status is its parent's.

        Raises:
            subprocess.TimeoutExpired: if it lives on.
        """
        if self._pidfd >= 0:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a shared fork server", timeout or 0.0)
            os.close(self._pidfd)
            self._pidfd = -1
        return -signal.SIGKILL


class ForkServer:
    """One for a front; it begins with `begin`, or the first process that is started through it.

    Use it as a context, which ends it and all it has forked.

    Where nothing can be forked, that is said once, and `start` gives None: the caller starts a
    fresh interpreter.
    """

    def __init__(self, notify: Callable[[str], None], *, only_shared: bool = False) -> None:
        """Starts nothing yet.

        Args:
            notify: shows a person why nothing can be forked.
            only_shared: whether processes are forked by a shared server, or not at all.
        """
        self._only_shared = only_shared
        self.notify = notify
        self.waits = True  # ranks wait for its imports. A front that has to answer other nodes must not
        self._server: subprocess.Popen[bytes] | _SharedServer | None = None
        self._control: socket.socket | None = None
        self._printed: IO[bytes] | None = None
        self._is_disabled = not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open")
        self._is_ready = False
        self._has_forked = False
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the server's process, where it runs."""
        return self._server.pid if self._server is not None else None

    def begin(self) -> None:
        """Starts the server before it is needed: its imports take longer than all else of a start,
        so they run beside the front's own.
        """
        if self._is_disabled or SHARED in os.environ:
            return
        threads = os.environ.get("OMP_NUM_THREADS", "")
        count = int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
        without = [name for name in os.environ if is_left_by_launcher(name)]
        with self._starting:
            self._begin(base_environment(threads=count, without=without))

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: int,
        has_input: bool,
        inherits: Sequence[int],
        waits: bool,
    ) -> Forked | None:
        """Has a process forked, which leads a session of its own; None where it has to be started
        in another way.

        Args:
            command: as for exec; only ranks and tasks of this interpreter are forked.
            environment: all of it.
            has_input: whether it gets a pipe as its input.
            inherits: descriptors that it gets under the same numbers.
            waits: whether the server's imports are waited for, as ranks do, which need them all; a
                task begins sooner without.
        """
        if self._is_disabled or [*command[:2]] != [sys.executable, "-m"] or command[2] not in _SERVED:
            return None
        with self._starting:
            if self._server is None and not self._begin(environment):
                return None
            if not (waits and self.waits) and not self._has_imported():
                return None
            body = {"command": [*command], "environment": {**environment}, "fds": [0, 1, 2, *inherits]}
            with contextlib.ExitStack() as stack:
                began = time.monotonic()
                channel, stdin = self._request(body, [output, output, *inherits], stack, has_input=has_input)
                answer = _receive(channel, limit_s=_LIMIT_S)
                if isinstance(pid := answer.get("pid"), int):
                    stack.pop_all()
                    self._has_forked = True
                    return Forked(pid, channel, stdin)
            if answer.get("always", True):
                self._disable(str(answer.get("refused") or self._failure(time.monotonic() - began)))
        return None

    def _has_imported(self) -> bool:
        assert self._control is not None
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = bool(self._control.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT))
        return self._is_ready

    def _request(
        self, body: dict[str, Any], handed: Sequence[int], stack: contextlib.ExitStack, *, has_input: bool
    ) -> tuple[socket.socket, IO[bytes] | None]:
        """Sends a request; gives the channel on which the answer comes, and the writing end of the
        process's input.

        The stack closes both.
        """
        assert self._control is not None
        channel, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(channel)
        with contextlib.ExitStack() as here:
            here.enter_context(other_end)
            stdin = None
            if has_input:
                read_end, write_end = os.pipe()
                stdin = stack.enter_context(os.fdopen(write_end, "wb", buffering=0))
            else:
                read_end = os.open(os.devnull, os.O_RDONLY)
            here.callback(os.close, read_end)
            folder = os.open(".", os.O_PATH)
            here.callback(os.close, folder)
            words = here.enter_context(_written(body))
            with contextlib.suppress(OSError):  # it has ended, as the answer says
                socket.send_fds(
                    self._control, [b"start"], [other_end.fileno(), words.fileno(), folder, read_end, *handed]
                )
        return channel, stdin

    def close(self) -> None:
        """Ends the server, and with it what it has forked."""
        with self._starting:
            if self._server is not None:
                self._server.kill()
                self._server.wait()
                self._server = None
            if self._control is not None:
                self._control.close()
            if self._printed is not None:
                self._printed.close()

    def _begin(self, environment: Mapping[str, str]) -> bool:
        """Starts the server: the kernel ends it with the thread that does so, hence only of the
        thread that ends with the front.
        """
        if self._join(environment):
            return True
        if self._only_shared:
            self._is_disabled = True
            return False
        if threading.current_thread() is not threading.main_thread():
            return False
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        with other_end:
            command = [sys.executable, "-m", _SERVER, "--control-fd", str(other_end.fileno()), "--front-pid", str(os.getpid())]  # fmt: skip
            try:
                self._server = subprocess.Popen(
                    command, env=environment, pass_fds=(other_end.fileno(),), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=self._printed, stderr=subprocess.STDOUT,
                )  # fmt: skip
            except OSError as error:
                self._disable(str(error))
                return False
        return True

    def _join(self, environment: Mapping[str, str]) -> bool:
        """Gets a server from the shared one, if there is one and it can be this front's."""
        path = environment.get(SHARED)
        if not path:
            return False
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        greeting = {"python": sys.executable, "package": str(PACKAGE), "environment": {**environment}}  # fmt: skip
        try:
            control.connect(path)
            _, uid, _ = struct.unpack("3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():  # the environment has credentials
                control.close()
                return False
            with _written(greeting) as words:
                socket.send_fds(control, [b"front"], [words.fileno()])
            pid = _receive(control, limit_s=_GREETING_S).get("pid")
            if isinstance(pid, int) and _received(control, limit_s=_GREETING_S):
                self._is_ready = True
                self._server, self._control = _SharedServer(pid), control
        except OSError:  # it is not there, or has just ended
            self._is_ready = False
        if not self._is_ready:
            control.close()
        return self._is_ready

    def _disable(self, why: str) -> None:
        """Reports it once.

        From here on each process is a fresh interpreter, with its own imports.
        """
        self._is_disabled = True
        if self._server is not None and not self._has_forked:  # what it has forked ends with it
            self._server.kill()
        self.notify(
            "ranks are started without the fork server, each with its own imports:"
            f" {one_line(why, limit=300)}"
        )

    def _failure(self, waited_s: float) -> str:
        """Why the server did not answer."""
        assert self._server is not None
        try:
            code = self._server.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"it did not answer within {waited_s:.0f} s"
        if self._printed is None:
            return "it has ended"
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), _PRINTED_BYTES, max(0, size - _PRINTED_BYTES)).decode(
            "utf-8", "replace"
        )
        return f"it ended with {code}: {text.strip().rpartition(chr(10))[2]}"


def base_environment(*, threads: int, without: Iterable[str] = ()) -> dict[str, str]:
    """The environment of every child: this process's, with a thread count and without misleading
    variables, see `child_process.child_environment`.
    """
    gone = {*without, "UNISONO_TOKEN", "UNISONO_SERVE_KEY"}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last output of a killed worker reaches its log
        "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves its Python stack in the log
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin without a limit are fast only on an idle machine: beside other work, steps
    # took six times as long. 3,000 spins of GNU's OpenMP take 0.08 ms, about as long as waking a
    # thread, so a wait costs at most twice what it would with the better of both.
    if "OMP_WAIT_POLICY" not in environment:
        environment |= {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": environment.get("GOMP_SPINCOUNT", "3000"),
        }
    # peft 0.21 uses a deprecated name of transformers 5.23; the warning would be the last line of
    # every rank's log.
    environment.setdefault("PYTHONWARNINGS", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    return environment


def shared_fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """This process's part of the shared server, if the environment names one; it ends with this
    process.
    """
    return _part_of(path) if (path := environment.get(SHARED)) else None


@functools.cache
def _part_of(_path: str) -> ForkServer:
    return ForkServer(lambda _: None, only_shared=True)


def _written(body: Mapping[str, Any]) -> IO[bytes]:
    """A file in memory, which may be larger than a message of a socket."""
    file = os.fdopen(os.memfd_create("unisono-request", os.MFD_CLOEXEC), "wb", buffering=0)
    file.write(json.dumps(body).encode())
    return file


def _receive(channel: socket.socket, *, limit_s: float) -> dict[str, Any]:
    """One message; empty if none came, or the other end is gone."""
    data = _received(channel, limit_s=limit_s)
    value = json.loads(data) if data else {}
    return value if isinstance(value, dict) else {}


def _received(channel: socket.socket, *, limit_s: float) -> bytes:
    if not select.select([channel], [], [], limit_s)[0]:
        return b""
    try:
        return channel.recv(_MESSAGE_BYTES)
    except OSError:
        return b""

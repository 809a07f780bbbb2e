"""The fork server of a front, which starts ranks and tasks without their imports; and what it has started, as the front sees it."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from unisono.facts.processes import exit_status
from unisono.text import one_line

_SERVER = "unisono.worker.fork_server"
_SERVED = ("unisono.worker", "unisono.task")
_LIMIT_S = 120.0  # of imports, on a machine with much to do
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
        """As its parent says, or the kernel where that is dead, with which its processes are killed."""
        told = _receive(self._channel, limit_s=1.0).get("returncode")
        if not isinstance(told, int):
            told = exit_status(self._pidfd, self.pid)
        return told if told is not None else -signal.SIGKILL


class ForkServer:
    """One for a front; it begins with the first process that is started through it. Use it as a context, which ends it and all it has forked.

    Where nothing can be forked, that is said once, and `start` gives None: the caller starts a fresh interpreter.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Starts nothing yet.

        Args:
            say: for people.
        """
        self._say = say
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._printed: IO[bytes] | None = None
        self._is_out_of_order = not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open")
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
        """Has a process forked, which leads a session of its own; None where it has to be started in another way.

        Args:
            command: as for exec; only ranks and tasks of this interpreter are forked.
            environment: all of it.
            output: a descriptor for what it prints.
            has_input: whether it gets a pipe as its input.
            inherits: descriptors that it gets under the same numbers.
            waits: whether the server's imports are waited for, as ranks do, which need them all; a task begins sooner without.
        """
        if self._is_out_of_order or [*command[:2]] != [sys.executable, "-m"] or command[2] not in _SERVED:
            return None
        with self._starting:
            if self._server is None and not self._begin(environment):
                return None
            if not waits and not self._has_imported():
                return None
            body = {"command": [*command], "environment": {**environment}, "fds": [0, 1, 2, *inherits]}
            with contextlib.ExitStack() as stack:
                own, stdin = self._request(body, [output, output, *inherits], stack, has_input=has_input)
                answer = _receive(own, limit_s=_LIMIT_S)
                if isinstance(pid := answer.get("pid"), int):
                    stack.pop_all()
                    self._has_forked = True
                    return Forked(pid, own, stdin)
            if answer.get("always", True):
                self._out_of_order(str(answer.get("refused") or self._last_words()))
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
        """Sends a request; gives the channel on which the answer comes, and the writing end of the process's input. The stack closes both."""
        assert self._control is not None
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(own)
        with contextlib.ExitStack() as here:
            here.enter_context(theirs)
            stdin = None
            if has_input:
                read_end, write_end = os.pipe()
                stdin = stack.enter_context(os.fdopen(write_end, "wb", buffering=0))
            else:
                read_end = os.open(os.devnull, os.O_RDONLY)
            here.callback(os.close, read_end)
            folder = os.open(".", os.O_PATH)
            here.callback(os.close, folder)
            words = here.enter_context(
                os.fdopen(os.memfd_create("unisono-request", os.MFD_CLOEXEC), "wb", buffering=0)
            )
            words.write(json.dumps(body).encode())
            with contextlib.suppress(OSError):  # it has ended, as the answer says
                socket.send_fds(
                    self._control, [b"start"], [theirs.fileno(), words.fileno(), folder, read_end, *handed]
                )
        return own, stdin

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
        """Starts the server: the kernel ends it with the thread that does so, hence only of the thread that ends with the front."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        with theirs:
            command = [sys.executable, "-m", _SERVER, "--control-fd", str(theirs.fileno()), "--front-pid", str(os.getpid())]  # fmt: skip
            try:
                self._server = subprocess.Popen(
                    command, env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=self._printed, stderr=subprocess.STDOUT,
                )  # fmt: skip
            except OSError as error:
                self._out_of_order(str(error))
                return False
        return True

    def _out_of_order(self, why: str) -> None:
        """Says so once; from here on each process is started anew, with imports of its own."""
        self._is_out_of_order = True
        if self._server is not None and not self._has_forked:  # what it has forked ends with it
            self._server.kill()
        self._say(
            f"ranks are started without the fork server, each with its own imports: {one_line(why, limit=300)}"
        )

    def _last_words(self) -> str:
        """Why there is no answer."""
        assert self._server is not None
        assert self._printed is not None
        try:
            code = self._server.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"it has not answered for {_LIMIT_S:g} s"
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), _PRINTED_BYTES, max(0, size - _PRINTED_BYTES)).decode(
            "utf-8", "replace"
        )
        return f"it ended with {code}: {text.strip().rpartition(chr(10))[2]}"


def _receive(channel: socket.socket, *, limit_s: float) -> dict[str, Any]:
    """One message; empty if none came, or the other end is gone."""
    if not select.select([channel], [], [], limit_s)[0]:
        return {}
    try:
        data = channel.recv(_MESSAGE_BYTES)
    except OSError:
        return {}
    value = json.loads(data) if data else {}
    return value if isinstance(value, dict) else {}

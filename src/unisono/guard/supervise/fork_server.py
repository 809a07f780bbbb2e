"""The fork server of a front, which starts ranks and tasks without their imports."""

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
from typing import IO, Any

from unisono.base.text import one_line

_SERVER = "unisono.trainer.worker.fork_server"
_SERVED: tuple[str, ...] = ("unisono.worker", "unisono.task")
_LIMIT_S = 120.0  # of imports, on a machine with much to do
_MESSAGE_BYTES = 4096


class Forked:
    """A process that the fork server has forked. It offers what ChildProcess needs of a process."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        # No other process gets the number before `wait` has given how this one ended.
        self.pid = pid
        self.stdin: IO[bytes] | None = None
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)
        self._returncode: int | None = None

    def has_ended(self) -> bool:
        """Whether the process is dead."""
        return self._returncode is not None or bool(select.select([self._pidfd], [], [], 0)[0])

    def wait(self, timeout: float) -> int:
        """The exit status; negative: a signal. Raises TimeoutExpired if it lives on."""
        if self._returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            with contextlib.suppress(OSError):
                self._channel.send(b"end")
            # Without an answer the server is dead, with which the kernel kills what it has forked.
            answer = receive(self._channel, limit_s=1.0)
            self._returncode = int(answer.get("returncode", -signal.SIGKILL))
            self._channel.close()  # the number is free from here on
            os.close(self._pidfd)
        return self._returncode


class ForkServer:
    """A front has one. Its process begins with `begin` or the first `start`; `close` ends all.

    Where nothing can be forked, `notify` shows why, once, and `start` gives None.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        # Ranks wait for its imports. A front that has to answer other nodes must not.
        self.waits = True
        self.process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_disabled = not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open")
        self._has_imported = False
        self._starting = threading.RLock()

    def begin(self, environment: Mapping[str, str]) -> None:
        """Starts the server, whose imports may read `environment`: the sooner, the better."""
        # The kernel ends it with the thread that starts it.
        is_main = threading.current_thread() is threading.main_thread()
        with self._starting:
            if is_main and self._control is None and not self._is_disabled:
                try:
                    self.process, self._control = self.launch(environment)
                except OSError as error:
                    self._disable(str(error))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], *, waits: bool
    ) -> Forked | None:
        """Forks a process, which leads a session of its own; None where it must be started anew.

        Args:
            command: as for exec; only ranks and tasks of this interpreter are forked.
            environment: all of it.
            fds: descriptors of this process by their numbers there, of which 0, 1 and 2 are some.
            waits: whether to wait for the imports, as ranks do; a task begins sooner without.
        """
        if [*command[:2]] != [sys.executable, "-m"] or command[2] not in _SERVED:
            return None
        with self._starting:
            self.begin(environment)
            if self._control is None or not self._can_fork(self._control, waits=waits and self.waits):
                return None
            channel = send_request(self._control, command, environment, fds)
            answer = receive(channel, limit_s=_LIMIT_S)
            if "pid" in answer:
                return Forked(answer["pid"], channel)
            channel.close()
            if "refused" not in answer:
                self._disable(self._failure())
        return None

    def launch(self, environment: Mapping[str, str]) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        """Starts the server's process; gives the socket of its requests.

        The tests replace this method: their fronts share the imports of one process.
        """
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other_end:
            process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(os.getpid())],
                env=environment,
                stdin=other_end.fileno(),
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, control

    def close(self) -> None:
        """Ends the server, and with it what it has forked."""
        with self._starting:
            self._is_disabled = True
            if self.process is not None:
                self.process.kill()
                self.process.wait()
                self.process = None
            for file in (self._control, self._printed):
                if file is not None:
                    file.close()

    def _can_fork(self, control: socket.socket, *, waits: bool) -> bool:
        if not self._is_disabled and not self._has_imported:
            answer = receive(control, limit_s=_LIMIT_S if waits else 0)
            self._has_imported = "ready" in answer
            if "refused" in answer or (waits and not self._has_imported):
                self._disable(answer.get("refused") or self._failure())
        return self._has_imported and not self._is_disabled

    def _disable(self, why: str) -> None:
        self._is_disabled = True
        why = one_line(why, limit=300)
        self.notify(f"ranks are started without the fork server, each with its own imports: {why}")

    def _failure(self) -> str:
        """Why the server did not answer."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1.0)
            text = os.pread(self._printed.fileno(), 1 << 20, 0) if self._printed is not None else b""
            return f"it ended with {code}: {text.decode('utf-8', 'replace').strip().rpartition(chr(10))[2]}"
        return f"it did not answer within {_LIMIT_S:.0f} s"


def send_request(
    control: socket.socket, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int]
) -> socket.socket:
    """Asks a server for a process; gives the channel on which its answer comes."""
    body = {"command": [*command], "environment": {**environment}, "fds": [*fds]}
    channel, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("unisono-request", os.MFD_CLOEXEC)  # it may be larger than a message
    with other_end, os.fdopen(memory, "wb", buffering=0) as words:
        words.write(json.dumps(body).encode())
        with contextlib.suppress(OSError):  # it has ended, as the missing answer says
            socket.send_fds(control, [b"start"], [other_end.fileno(), memory, *fds.values()])
    return channel


def receive(channel: socket.socket, *, limit_s: float) -> dict[str, Any]:
    """One message; empty if none came, or the other end is gone."""
    with contextlib.suppress(OSError):
        if select.select([channel], [], [], limit_s)[0]:
            return dict(json.loads(channel.recv(_MESSAGE_BYTES) or b"{}"))
    return {}

"""One process of a pool of rewards: starting it, messages, its stack, its end."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from unisono.guard.supervise.base_environment import early_environment
from unisono.trainer.objectives.rewards.child import MOST_BYTES

_CHUNK = 1 << 16
_STACK_S = 0.3  # in which a process writes its stack
_KILLED_S = 5.0  # in which a killed process has ended, if the kernel can end it


class ProcessLink:
    """A socket to a process that answers lines of JSON with such lines."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """A link to a process.

        Args:
            connection: to it; closed by `end`.
            pid: its number.
        """
        connection.setblocking(False)
        self._socket, self.pid = connection, pid
        self._unsent, self._received = bytearray(), bytearray()

    def fileno(self) -> int:
        """Of the socket to it."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll its socket for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message, now or during `receive`."""
        self._unsent += encoded(message)
        self._flush()

    def receive(self) -> list[Any]:
        """The messages that have arrived.

        Raises:
            EOFError: if it has ended, or sends what is not a message.
        """
        self._flush()
        is_open = self._read()
        *messages, rest = bytes(self._received).split(b"\n")
        try:
            arrived = [json.loads(line) for line in messages]
        except ValueError as error:  # the stack of a fatal signal; see `line_in`
            raise EOFError from error
        if not arrived and (not is_open or len(rest) > MOST_BYTES or self._has_ended()):
            raise EOFError
        self._received = bytearray(rest)
        return arrived

    def line_in(self, path: str) -> str:
        """`FILE.py:LINE` in which it is now, or was at a fatal signal, also within C code; empty if
        it is not in the file.
        """
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        frame = re.compile(rf'File "{re.escape(path)}", line (\d+)'.encode())
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        is_open = True
        while is_open:
            is_open = bool(readable.poll(_STACK_S * 1000)) and self._read()
            if match := frame.search(self._received):
                return f"{path}:{int(match[1])}"
        return ""

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK])]

    def _read(self) -> bool:
        """Takes the bytes that have arrived; False at the end of the stream."""
        while len(self._received) <= MOST_BYTES:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            self._received += data
        return True

    def _has_ended(self) -> bool:
        """Whether it has ended; a process that it forked may still have the socket."""
        return has_ended(self.pid)


class RewardProcess(ProcessLink):
    """A process that has its own memory and session, and ends with the thread that started it.

    What its code prints goes to this process's stderr, and its stdin is empty.
    """

    module = "unisono.trainer.objectives.rewards.child"

    def __init__(self, setup: bytes, *, environment: Mapping[str, str] | None = None) -> None:
        """Starts it.

        Args:
            setup: the first line for it.
            environment: changes of its environment.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_environment() | dict(environment or {}),
            )
        super().__init__(ours, self._process.pid)
        self._unsent += setup

    def end(self, *, patience_s: float = 0.0) -> int:
        """Ends it and all processes that it has started. Returns its exit code, or the negative
        number of a signal.

        Args:
            patience_s: time for its own end, once its socket is closed.
        """
        self._socket.close()
        has_ended(self.pid, wait_s=patience_s)
        # Before it is reaped: until then, the number of its group belongs to it.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_KILLED_S)
        return -signal.SIGKILL


class ModelProcess(RewardProcess):
    """The process of a reward model, which imports torch."""

    module = "unisono.trainer.task.reward_model"


def encoded(message: Mapping[str, object]) -> bytes:
    """A message as a line."""
    return json.dumps(message, default=str).encode() + b"\n"


def has_ended(pid: int, *, wait_s: float = 0.0) -> bool:
    """Whether a process has ended, also if nobody has taken its exit code yet.

    Args:
        pid: its number.
        wait_s: to wait for its end.
    """
    ended = select.poll()
    try:
        watched = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        ended.register(watched, select.POLLIN)
        return bool(ended.poll(wait_s * 1000))
    finally:
        os.close(watched)


def _environment() -> dict[str, str]:
    """Without the key of a server that samples, which is not for the functions of the user."""
    environment = {
        name: value for name, value in early_environment().items() if name != "UNISONO_SAMPLER_KEY"
    }
    # Of many threads, e.g. of an event loop, each would map an arena.
    return environment | {"MALLOC_ARENA_MAX": "2"}

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

from unisono.guard.supervise.base_environment import early_environment
from unisono.trainer.objectives.rewards.calls import CallRequest, Reply
from unisono.trainer.objectives.rewards.child import MOST_BYTES

OF_FUNCTIONS = "unisono.trainer.objectives.rewards.child"
OF_MODEL = "unisono.trainer.task.reward_model"
"""Programs of processes; that of a model imports torch."""
_CHUNK = 1 << 16
_STACK_S = 0.3  # in which a process writes its stack
_KILLED_S = 5.0  # in which a killed process has ended, if the kernel can end it


class RewardProcess:
    """A process that has its own memory and session, and ends with the thread that started it.

    What its code prints goes to this process's stderr, and its stdin is empty.
    """

    def __init__(
        self, setup: bytes, *, program: str = OF_FUNCTIONS, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            setup: the first line for it.
            program: the module that it runs.
            environment: changes of its environment.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_environment() | dict(environment or {}),
            )
        self._unsent = bytearray(setup)
        self._received = bytearray()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Of the socket to it."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll its socket for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, message: CallRequest) -> None:
        """Sends a message, now or during `receive`."""
        self._unsent += json.dumps(message, default=str).encode() + b"\n"
        self._flush()

    def receive(self) -> list[Reply]:
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

    def end(self, *, patience_s: float = 0.0) -> int:
        """Ends it and all processes that it has started. Returns its exit code, or the negative
        number of a signal.

        Args:
            patience_s: time for its own end, once its socket is closed.
        """
        self._socket.close()
        ended = select.poll()
        with contextlib.suppress(OSError):
            watched = os.pidfd_open(self.pid)
            ended.register(watched, select.POLLIN)
            ended.poll(patience_s * 1000)
            os.close(watched)
        # Before it is reaped: until then, the number of its group belongs to it.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_KILLED_S)
        return -signal.SIGKILL

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
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _environment() -> dict[str, str]:
    """Without the key of a server that samples, which is not for the functions of the user."""
    environment = {
        name: value for name, value in early_environment().items() if name != "UNISONO_SAMPLER_KEY"
    }
    # Of many threads, e.g. of an event loop, each would map an arena.
    return environment | {"MALLOC_ARENA_MAX": "2"}

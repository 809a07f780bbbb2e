"""One child process: its messages on a pipe, what it prints in a file, and its certain end."""

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Self

from unisono.events import Message, read_message

_PIPE_BYTES = (
    1 << 20
)  # minutes of messages, so that a front that is stopped (Ctrl-Z) does not stop its worker
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.2
_KILLED_S = 3.0  # for the end after SIGKILL, also where much memory is given back


class ChildProcess:
    """A worker or a task. It leads a session of its own, so a terminal's Ctrl-C reaches the front alone.

    As a context manager it leaves no process behind: neither the child nor what the child started.

    Attributes:
        pid: of the process.
        returncode: None until it has ended; negative: the signal that ended it.
        is_beyond_reach: it was killed, and has not ended: it waits in the kernel. It is not waited for any more.
        started: monotonic seconds.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        *,
        environment: dict[str, str],
        output: int | IO[Any],
        talks: bool = False,
        inherits: Sequence[int] = (),
    ) -> None:
        """Starts it.

        Args:
            command: gives the command line from the number of the pipe that it reports on.
            environment: all of it.
            output: a file for what it prints; never a pipe, which could fill and block it.
            talks: whether `send` will be used; otherwise it reads from nowhere.
            inherits: file descriptors that it gets under the same numbers.
        """
        read_end, write_end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a smaller pipe works, too
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                command(write_end), env=environment, pass_fds=(write_end, *inherits), start_new_session=True,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except BaseException:  # no process, no pipe; raised again
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            os.set_blocking(self._process.stdin.fileno(), False)  # this end alone
        self._unsent = b""
        self._fd = read_end
        self._open = True
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self.pid = self._process.pid
        self.returncode: int | None = None
        self.is_beyond_reach = False
        self._killed_at: float | None = None
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(patience_s=0)

    def read(self, timeout_s: float = _POLL_S) -> list[Message]:
        """The messages that have come, after waiting for the first of them at most `timeout_s`."""
        self._send_more()
        if not self._open:
            self._reap(timeout_s)
            return []
        if not self._selector.select(timeout_s):
            if self._has_ended():  # a grandchild may hold the pipe open
                messages = self._drain()
                self._close()
                self._reap(timeout_s)
                return messages
            return []
        return self._drain()

    @property
    def ended(self) -> bool:
        """Whether it has ended and all its messages have been read."""
        return self.returncode is not None and not self._open

    @property
    def fileno(self) -> int | None:
        """The pipe that its messages come on, readable also when it dies; None once that is closed."""
        return self._fd if self._open else None

    def send(self, message: Message) -> None:
        """Writes a message to the child's stdin, as a line. A child that is gone is seen by `read`.

        It never waits for a child that is stopped or busy: what its pipe does not take follows with the next `read`.
        """
        assert self._process.stdin is not None
        self._unsent += (json.dumps(message, ensure_ascii=False) + "\n").encode()
        self._send_more()

    def _send_more(self) -> None:
        stdin = self._process.stdin
        while self._unsent and stdin is not None and not stdin.closed:
            try:
                self._unsent = self._unsent[os.write(stdin.fileno(), self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # the child is gone
                self._unsent = b""

    def close_input(self) -> None:
        """Tells the child that nothing more will be sent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child alone."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it and all that it started, and does not wait for the end."""
        if self.returncode is None:
            self._killed_at = self._killed_at or time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, patience_s: float) -> None:
        """Ends it: by SIGTERM if there is patience, at last by SIGKILL, with all that it started."""
        if self.returncode is None and patience_s > 0:
            self.signal(signal.SIGTERM)
            limit = time.monotonic() + patience_s
            while not self._has_ended() and time.monotonic() < limit:
                time.sleep(0.02)
        if self.returncode is None:
            self.kill()
            self._collect()
        self._close()
        if self._process.stdin is not None:
            self.close_input()

    def _drain(self) -> list[Message]:
        data = b""
        while len(data) < 16 * _CHUNK_BYTES:
            try:
                chunk = os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                self._close()
                break
            data += chunk
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = (read_message(line.decode("utf-8", "replace")) for line in lines)
        return [message for message in found if message is not None]

    def _has_ended(self) -> bool:
        """Whether the process is dead; it is not reaped yet, so its number cannot mean another one."""
        if self.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _reap(self, timeout_s: float) -> None:
        """Waits for a child whose pipe is closed, and ends what it left behind."""
        limit = time.monotonic() + timeout_s
        while not self._has_ended():
            if time.monotonic() >= limit:
                return
            time.sleep(0.01)
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # data loaders and the like; the leader is dead already
            self._collect()

    def _collect(self) -> None:
        """Takes the exit status. SIGKILL ends everything but a thread that waits for storage in the kernel: the wait is bounded."""
        since_s = time.monotonic() - (self._killed_at or time.monotonic())
        try:
            self.returncode = self._process.wait(max(0.1, _KILLED_S - since_s))
        except subprocess.TimeoutExpired:
            self.returncode, self.is_beyond_reach = -signal.SIGKILL, True

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._selector.close()
            os.close(self._fd)

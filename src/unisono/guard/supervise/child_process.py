"""A child process of the front: its command line and environment, its messages on a pipe, its
output in a file, and its guaranteed end.
"""

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, Self

from unisono.base.messages import Message, read_message
from unisono.guard.facts.network import is_loopback
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.supervise.base_environment import base_environment
from unisono.guard.supervise.fork_server import Forked, ForkServer


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that a front starts. Tests pass different ones.

    Attributes:
        worker: a rank, without its arguments.
        task: a task, without its arguments.
        fork_server: forks our own programs, if there is one.
    """

    worker: tuple[str, ...] = (sys.executable, "-m", "unisono.worker")
    task: tuple[str, ...] = (sys.executable, "-m", "unisono.task")
    fork_server: ForkServer | None = field(default=None, compare=False, repr=False)


def worker_command(
    programs: Programs,
    *,
    plan: Path,
    events: Path,
    report_fd: int,
    snapshot_fd: int | None = None,
    beat_fds: Sequence[int] = (),
) -> list[str]:
    """The command line of one rank."""
    kept = ["--snapshot-fd", str(snapshot_fd)] if snapshot_fd is not None else []
    beats = ["--beat-fds", ",".join(map(str, beat_fds))] if beat_fds else []
    return [*programs.worker, str(plan), "--events", str(events), *kept, *beats, *_link_args(report_fd)]


def task_command(programs: Programs, name: str, *, request: Path, report_fd: int) -> list[str]:
    """The command line of a task."""
    return [*programs.task, name, str(request), *_link_args(report_fd)]


def _link_args(report_fd: int) -> list[str]:
    return ["--report-fd", str(report_fd), "--front-pid", str(os.getpid())]


def option_args(options: Mapping[str, object]) -> list[str]:
    """Options as arguments of a command line.

    None leaves an option out; True gives a flag without a value.
    """
    words: list[str] = []
    for name, value in options.items():
        words += [] if value is None else [name] if value is True else [name, str(value)]
    return words


def child_environment(
    *, threads: int, without: Iterable[str] = (), device: DeviceChoice | None = None
) -> dict[str, str]:
    """The environment of a child: this process's, with the plan's thread count and without
    misleading variables.

    Args:
        threads: of OpenMP and MKL; a repeatable run needs the same number.
        without: names to leave out, e.g. RANK and MASTER_ADDR on one device.
        device: the only accelerator that the child sees, or a CPU; None leaves the visible ones as
            they are.
    """
    environment = base_environment(threads=threads, without=without)
    if device is not None:
        environment["TOKENIZERS_PARALLELISM"] = "false"  # it warns and stalls if a process forks
        environment["CUDA_VISIBLE_DEVICES"] = (device.uuid or "") if device.kind == "cuda" else ""
        # The indices that unisono shows are in this order.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_COMMUNICATION_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_")
DEBUG_COMM = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Set by --debug-comm for processes that communicate."""


def misleading_variables(leftovers: Iterable[str], *, world_size: int) -> list[str]:
    """Variables of other launchers that ranks must not inherit; several ranks keep those about
    communication.
    """
    if world_size == 1:
        return list(leftovers)
    return [name for name in leftovers if not name.startswith(_COMMUNICATION_PREFIXES)]


class HasAddresses(Protocol):
    """A network interface, from `facts.network` or from a report."""

    @property
    def name(self) -> str:
        """Its name in the system."""

    @property
    def addresses(self) -> Sequence[str]:
        """Its addresses, without prefix lengths."""

    @property
    def loopback(self) -> bool:
        """Whether it is the loopback interface."""


def interface_name(interfaces: Iterable[HasAddresses], address: str) -> str | None:
    """The interface that has the address; None if unknown, then the libraries choose.

    Addresses like 127.0.0.2 are not in any list, and belong to the loopback interface.
    """
    all_interfaces = list(interfaces)
    name = next((one.name for one in all_interfaces if address in one.addresses), None)
    if name is None and is_loopback(address):
        return next((one.name for one in all_interfaces if one.loopback), None)
    return name


# It holds minutes of messages: a front that is stopped (Ctrl-Z) does not block its worker.
_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.2
_KILLED_S = 3.0  # for the end after SIGKILL; freeing much memory takes time


class ChildProcess:
    """A worker or a task.

    It leads its own session, so a terminal's Ctrl-C reaches only the front.

    As a context manager it leaves no process behind: neither the child nor the child's descendants.

    Attributes:
        returncode: None until it has ended; negative: the signal that ended it.
        is_beyond_reach: whether it was killed and has not ended, as it waits in the kernel. Nothing
            waits for it any longer.
        started: monotonic seconds.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        *,
        environment: dict[str, str],
        output: int | IO[Any],
        has_input: bool = False,
        inherits: Sequence[int] = (),
        fork_server: ForkServer | None = None,
        waits: bool = False,
    ) -> None:
        """Starts the process.

        Args:
            command: gives the command line for the file descriptor of the pipe that it reports on.
            environment: all of it.
            output: a file for what it prints; never a pipe, which could fill and block it.
            has_input: whether `send` will be used; otherwise its stdin is empty.
            inherits: file descriptors that it inherits under the same numbers.
            fork_server: forks the process if it can; otherwise a fresh interpreter is started.
            waits: whether the imports of a fork server that has just started are waited for.
        """
        read_end, write_end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a smaller pipe works too
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = start_process(
                command(write_end),
                environment,
                output if isinstance(output, int) else output.fileno(),
                has_input=has_input,
                inherits=(write_end, *inherits),
                fork_server=fork_server,
                waits=waits,
            )
        except BaseException:  # raised again
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            os.set_blocking(self._process.stdin.fileno(), False)  # this end alone
        self._unsent = bytearray()
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
        """The messages that have arrived, after waiting at most `timeout_s` for the first."""
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
        """The pipe of its messages, readable also when it ends; None once that is closed."""
        return self._fd if self._open else None

    @property
    def unsent_fileno(self) -> int | None:
        """The child's stdin while it has not taken all that was sent; else None."""
        stdin = self._process.stdin
        return stdin.fileno() if self._unsent and stdin is not None and not stdin.closed else None

    def send(self, message: Mapping[str, object]) -> None:
        """Writes a message to the child's stdin, as a line. `read` notices a child that is gone.

        Never waits for a child that is stopped or busy: what its pipe does not take is sent with
        the next `read`.
        """
        assert self._process.stdin is not None
        self._unsent += (json.dumps(message, ensure_ascii=False) + "\n").encode()
        self._send_more()

    def _send_more(self) -> None:
        stdin = self._process.stdin
        while self._unsent and stdin is not None and not stdin.closed:
            try:
                del self._unsent[: os.write(stdin.fileno(), self._unsent)]
            except BlockingIOError:
                return
            except OSError:  # the child is gone
                self._unsent.clear()

    def close_input(self) -> None:
        """Closes the child's stdin: nothing more will be sent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child alone."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the child and its descendants, without waiting for their end."""
        if self.returncode is None:
            self._killed_at = self._killed_at or time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, patience_s: float) -> None:
        """Ends the child and its descendants: with SIGTERM if `patience_s` is above 0, then with
        SIGKILL.
        """
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
        messages = (read_message(line.decode("utf-8", "replace")) for line in lines)
        return [message for message in messages if message is not None]

    def _has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped yet, so its pid cannot belong to a
        different process.
        """
        return self.returncode is not None or self._process.has_ended()

    def _reap(self, timeout_s: float) -> None:
        """Waits for a child whose pipe is closed, and ends what it left behind."""
        limit = time.monotonic() + timeout_s
        while not self._has_ended():
            if time.monotonic() >= limit:
                return
            time.sleep(0.01)
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Others of the group, e.g. data loaders, may run on after the leader has ended.
                os.killpg(self.pid, signal.SIGKILL)
            self._collect()

    def _collect(self) -> None:
        """Takes the exit status.

        SIGKILL ends everything except a thread that waits for storage in the kernel, so the wait is
        bounded.
        """
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


class _Executed(subprocess.Popen[bytes]):
    """A fresh interpreter, which imports everything again."""

    def has_ended(self) -> bool:
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None


def start_process(
    command: list[str],
    environment: dict[str, str],
    output: int,
    *,
    has_input: bool,
    inherits: Sequence[int],
    fork_server: ForkServer | None,
    waits: bool,
) -> Forked | _Executed:
    """Forks a process if a server can, else executes it.

    The tests replace this: all of theirs have a server.
    """
    # Libraries read what --debug-comm sets when they are imported.
    if fork_server is not None and not DEBUG_COMM.items() <= environment.items():
        read_end, write_end = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), None)
        stdin = os.fdopen(write_end, "wb", buffering=0) if write_end is not None else None
        fds = {0: read_end, 1: output, 2: output, **{fd: fd for fd in inherits}}
        forked = fork_server.start(command, environment, fds, waits=waits)
        os.close(read_end)
        if forked is not None:
            forked.stdin = stdin
            return forked
        if stdin is not None:
            stdin.close()
    return _Executed(
        command,
        env=environment,
        pass_fds=inherits,
        start_new_session=True,
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )

"""A small process between the front and the program: it starts the program, passes on its output,
and leaves nothing of it behind.

    python -I …/subreaper.py SETTINGS-FD

The front starts it; the program is its child, and adopted processes become its children. It does
three things that the front cannot do itself. It outlives a front that is killed by SIGKILL, then
ends the program's process tree and removes the border's folder. It adopts processes that the
program leaves behind. And it writes the log, so a disk that hangs blocks neither the front nor the
program's output.

The front writes lines to its stdin: `signal N` (like a terminal or `kill`), `end` (all processes,
at once). End of file means that the front has died. It answers on the descriptor `report` of its
settings: `started PID`, `gone RETURNCODE` once the program itself has ended, `left N` for processes
that outlived it, and `ended RETURNCODE` when all have ended. Standard library only: it starts in
about 50 ms.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import queue
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHUNK_BYTES = 1 << 16
# If the disk hangs, further output is left out of the log, with a note.
_MOST_UNWRITTEN = 1024
_LOOK_S = 1.0  # between checks that the log still exists
_OUTPUT_S = 5.0  # after the program's end: for processes that still hold its output open
# Meanwhile the front sees which ranks ended before the program; the remaining ones end by our
# signals.
_SEEN_S = 1.0
# Processes may outlive a program that ended by itself, e.g. a tracker that still sends.
_PATIENCE_S = 3.0
_ENDING_S = 10.0
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # sent to the whole group


class _Log:
    """Writes the program's output to its log, in a separate thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._chunks: queue.Queue[bytes | None] = queue.Queue(_MOST_UNWRITTEN)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def keep(self, data: bytes) -> None:
        try:
            if self._left_out:
                self._chunks.put_nowait(f"\n[unisono: {self._left_out} bytes are omitted]\n".encode())
                self._left_out = 0
            self._chunks.put_nowait(data)
        except queue.Full:
            self._left_out += len(data)

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._chunks.put(None, timeout=_OUTPUT_S)
        self._thread.join(_OUTPUT_S)

    def _run(self) -> None:
        try:
            fd = self._open()
        except OSError:
            fd = -1
        looked = time.monotonic()
        while (data := self._chunks.get()) is not None:
            # If e.g. the disk is full, the output itself is still passed on.
            with contextlib.suppress(OSError):
                while fd >= 0 and data:
                    data = data[os.write(fd, data) :]
            if fd >= 0 and time.monotonic() - looked > _LOOK_S:
                fd, looked = self._followed(fd), time.monotonic()
        if fd >= 0:
            self._followed(fd)

    def _open(self, more: int = 0) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | more, 0o600)

    def _followed(self, fd: int) -> int:
        """Writes the whole log to its path again, if it was removed with its directory and the
        front has made that again.
        """
        try:
            Path(self._path).stat()
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                new, offset = self._open(os.O_EXCL), 0
                while data := os.pread(fd, 1 << 16, offset):
                    offset += os.write(new, data)
                os.close(fd)
                return new
        except OSError:
            pass
        return fd


class _StreamCopy(threading.Thread):
    """Passes on one stream of the program as it comes."""

    def __init__(self, source: int, target: int, log: _Log) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._log = source, target, log

    def run(self) -> None:
        while True:
            try:
                data = os.read(self._source, _CHUNK_BYTES)
            except OSError:  # a terminal whose other end is closed
                return
            if not data:
                return
            self._log.keep(data)
            while data and self._target >= 0:
                try:
                    data = data[os.write(self._target, data) :]
                except OSError:  # the reader is gone; the log continues
                    self._target = -1


def _channel(target: int) -> tuple[int, int]:
    """The write end for the program and our read end: of a terminal if `target` is one, else of a
    pipe.
    """
    if not os.isatty(target):
        read_end, write_end = os.pipe()
        return write_end, read_end
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST  # the real terminal does that
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    with contextlib.suppress(OSError, ValueError):
        termios.tcsetwinsize(slave, termios.tcgetwinsize(target))
    return slave, master


def _is_same(one: int, other: int) -> bool:
    """Whether both descriptors are the same file: then one stream carries both, so lines stay in
    order.
    """
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


class Subreaper:
    """The program and its streams."""

    def __init__(self, settings: Mapping[str, Any], environment: dict[str, str]) -> None:
        self._report = int(settings["report"])
        self._folder = str(settings.get("folder") or "")
        self._held = _hold(self._folder)
        out = 2 if settings.get("json") else 1
        targets = [out] if _is_same(out, 2) else [out, 2]
        channels = [_channel(target) for target in targets]
        try:
            self._program = subprocess.Popen(
                list(settings["command"]),
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no thread has begun yet
                stdin=int(settings["stdin"]),
                stdout=channels[0][0],
                stderr=channels[-1][0],
            )
        finally:
            for write, _ in channels:
                os.close(write)
        self._log = _Log(
            str(settings["log"])
        )  # no thread is there before the program is: it is started by a fork
        self._copies = [
            _StreamCopy(read, target, self._log) for target, (_, read) in zip(targets, channels, strict=True)
        ]
        for copy in self._copies:
            copy.start()
        self._notify(f"started {self._program.pid}")

    def run(self) -> None:
        """Runs until the program and its descendants have ended."""
        pidfd = os.pidfd_open(self._program.pid)
        partial = b""
        ending_now = False
        while not ending_now:
            ready, _, _ = select.select([0, pidfd], [], [])
            if 0 in ready:
                data = os.read(0, _CHUNK_BYTES)
                *lines, partial = (partial + data).split(b"\n")
                ending_now = not data or sum(self._obey(line) for line in lines) > 0
            if pidfd in ready:
                break
        if self._program.poll() is None:
            self._end_tree(patience_s=0)
        code = self._program.wait()
        self._notify(f"gone {code}")
        if not ending_now:
            select.select([0], [], [], _SEEN_S)
        left = self._end_tree(patience_s=0 if ending_now else _PATIENCE_S)
        limit = time.monotonic() + _OUTPUT_S
        for copy in self._copies:
            copy.join(max(0.0, limit - time.monotonic()))
        self._log.finish()
        if left:
            self._notify(f"left {left}")
        self._notify(f"ended {code}")

    def _obey(self, line: bytes) -> bool:
        """Carries out one line of the front; whether it is `end`."""
        word, _, number = line.partition(b" ")
        if word == b"signal":
            send = os.killpg if int(number) in _OF_TERMINALS else os.kill
            with contextlib.suppress(OSError):
                send(self._program.pid, int(number))
        return word == b"end"

    def _end_tree(self, *, patience_s: float) -> int:
        """Ends all descendants of this process; gives their number without the program.

        Orphans become our children, so none escapes.

        Args:
            patience_s: how long they have after SIGTERM; 0: no SIGTERM is sent.
        """
        seen: set[int] = set()
        began = time.monotonic()
        while time.monotonic() < began + patience_s + _ENDING_S:
            alive = [pid for pid in _descendants(os.getpid()) if not _is_dead(pid)]
            if not alive:
                break
            asks = time.monotonic() < began + patience_s
            for pid in alive:  # SIGKILL also ends what is stopped
                if not asks or pid not in seen:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGTERM if asks else signal.SIGKILL)
            seen.update(alive)
            self._reap()
            time.sleep(0.005)
        self._reap()
        return len(seen - {self._program.pid})

    def _reap(self) -> None:
        """Reaps adopted children, but keeps the program's exit status."""
        self._program.poll()
        if self._program.returncode is None:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _notify(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the front is gone
            os.write(self._report, line.encode() + b"\n")

    def outlast_front(self) -> None:
        """Waits until the front has read the ranks' final messages in the border's folder: it then
        closes our stdin, or has died.
        """
        with contextlib.suppress(OSError):
            while os.read(0, _CHUNK_BYTES):
                pass

    def clean(self) -> None:
        """Removes the border's folder."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _hold(folder: str) -> int | None:
    """Locks the border's folder, like unisono.guard.programs.program_start: until this process
    ends, no other front removes it as unused.
    """
    if not folder:
        return None
    try:
        held = os.open(Path(folder, "held"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # the front is gone already
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - only names
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    descendants, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        descendants += below
        todo += below
    return descendants


def _is_dead(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _ignore(_number: int, _frame: object) -> None:
    """Ignores a signal: the front decides what reaches the program."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Reads the settings, and runs the program to its end."""
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        settings = json.load(file)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
        # The program ignores what nohup ignores.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ignore)  # not SIG_IGN, which the program would inherit
    subreaper = None
    try:
        subreaper = Subreaper(settings, settings["environment"])
        subreaper.run()
        subreaper.outlast_front()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(int(settings["report"]), f"failed {error.errno or 0} {error.strerror}\n".encode())
    finally:
        if subreaper is not None:
            subreaper.clean()


if __name__ == "__main__":
    main()

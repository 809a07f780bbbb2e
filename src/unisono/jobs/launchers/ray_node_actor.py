"""The actor on a node, and the process guard that it starts: they start the node's front, pass on
its output, and read and write files.

Ray sends the actor's code to the node, since unisono may be missing there or have a different
version, and the actor reports that. So it needs only the standard library.

The process guard is `python -m unisono.jobs.launchers.ray_node_actor FOLDER`: it runs the front,
and removes everything it leaves. Ray kills an actor at once, together with its child processes. So
the guard detaches from the actor, and runs as long as the actor holds the other end of its stdin,
whose lines are: the job's token; then `signal NAME`, or `end`. When stdin closes, the job is over
or the actor is dead: a front that still runs is killed with its ranks, and the job's folder is
removed. Its last line on stdout is {"kind": "front_ended", "code": N}.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

_MOST_LINES = 2_000
_LOCK_FILE = ".held"
_PATIENCE_S = 60.0
"""For the front to exit on request: a checkpoint in progress is finished."""
_PROCESS_VARIABLES = ("UNISONO_TOKEN", "XDG_CONFIG_HOME")
_SET_BY_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")
"""In each of its workers: its debugger, which answers only there, and how it names them."""


class NodeActor:
    """The driver's actor on one node. Its methods run in several threads at the same time."""

    def __init__(self) -> None:
        self._place: Path | None = None
        self._lock_fd: int | None = None
        self._input: IO[bytes] | None = None
        self._lines: list[tuple[str, bytes]] = []
        self._open = 0
        self._changed = threading.Condition()

    def facts(self) -> dict[str, object]:
        """The installation here: host, Python, unisono and the digests of its code; `trouble` if
        unisono is missing.
        """
        facts = {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "program": sys.executable,
            "unisono": "",
            "code": {},
            "trouble": "",
            "cpus": os.cpu_count() or 1,
        }
        import ray  # this process is a worker of Ray

        facts["ray_node"] = ray.get_runtime_context().get_node_id()
        try:
            import unisono
            from unisono.guard.facts.environment import code_digests

            facts["unisono"], facts["code"] = unisono.__version__, code_digests()
        except ImportError as error:
            facts["trouble"] = f"{type(error).__name__}: {error}"
        return facts

    def sees(self, path: str) -> bool:
        """Whether a file exists here as well, in a writable folder."""
        return Path(path).exists() and os.access(Path(path).parent, os.W_OK | os.X_OK)

    def free_port(self, address: str) -> int:
        """A free port of this node."""
        with socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
        ) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def make_place(self, job: str) -> str:
        """Makes this job's folder here, and removes those of killed jobs."""
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = (home if home.is_absolute() else Path("~/.cache").expanduser()) / "unisono" / "ray"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in base.iterdir():
            if _is_abandoned(old):
                shutil.rmtree(old, ignore_errors=True)
        self._place = base / job
        self._place.mkdir(mode=0o700)
        self._lock_fd = os.open(self._place / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        return str(self._place)

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """Writes a part of a file, and makes its folder if it is missing."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.seek(offset)
            file.write(data)

    def start(
        self, config: str, request: dict[str, object], token: bytes, key: str, variables: dict[str, str]
    ) -> None:
        """Starts this node's front.

        Args:
            config: the text of its config.
            request: for `unisono.jobs.launchers.ray_node_main`.
            token: the job's secret; passed through a pipe.
            key: the user's key, which signs checkpoints.
            variables: of the environment, equal on all nodes.
        """
        assert self._place is not None, "make_place comes first"
        assert self._lock_fd is not None
        settings = self._place / "settings"
        for name, text in (("settings/unisono/checkpoint.key", key + "\n"), ("config.yaml", config)):
            self.write(str(self._place / name), 0, text.encode(), 0o600)
        body = {**request, "config": str(self._place / "config.yaml")}
        self.write(str(self._place / "request.json"), 0, json.dumps(body).encode(), 0o600)
        environment = {name: value for name, value in os.environ.items() if not _is_of_ray(name)}
        environment |= {**variables, "XDG_CONFIG_HOME": str(settings)}
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.jobs.launchers.ray_node_actor", str(self._place)],
            cwd=self._place,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self._lock_fd,),
        )
        assert process.stdin is not None
        self._input, self._open = process.stdin, 2
        self._send(token)
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            threading.Thread(target=self._read, args=(name, stream), daemon=True).start()
        process.wait()  # the guard has detached: Ray kills an actor's children first, and does not know this process

    def poll(self, since: int, timeout_s: float) -> tuple[list[tuple[str, bytes]], bool]:
        """The lines from number `since` on, each with `out` or `err`, after waiting for one; and
        whether the output has ended.
        """
        with self._changed:
            limit = time.monotonic() + timeout_s
            while len(self._lines) <= since and self._open and time.monotonic() < limit:
                self._changed.wait(limit - time.monotonic())
            lines = self._lines[since : since + _MOST_LINES]
            return lines, not self._open and since + len(lines) >= len(self._lines)

    def command(self, text: str) -> None:
        """Sends a command to the process guard: `signal NAME`, or `end`."""
        with contextlib.suppress(OSError):
            self._send(text.encode())

    def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
        """Each file below a folder, by relative path: size in bytes, modification time in ns,
        inode.
        """
        stamps = {}
        for folder, _, names in os.walk(root, onerror=_unless_missing):
            for name in names:
                path = str(Path(folder, name))
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                    status = os.lstat(path)
                    stamps[os.path.relpath(path, root)] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return stamps

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A part of a file."""
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def leave(self) -> None:
        """Removes this job's folder."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._input is not None:
                self._input.close()

    def _send(self, line: bytes) -> None:
        assert self._input is not None
        self._input.write(line + b"\n")
        self._input.flush()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            with self._changed:
                self._lines.append((name, line.rstrip(b"\n")))
                self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


def _unless_missing(error: OSError) -> None:
    """Raises unless the file is gone: an unreadable folder does not count as deleted."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_of_ray(name: str) -> bool:
    """Whether a variable is Ray's own (e.g. its token, or the number of threads that it sets for
    workers) or private to a process.
    """
    if name == "OMP_NUM_THREADS":
        return not _raylet_has(name)
    return name.startswith("RAY_") or name in (*_SET_BY_RAY, *_PROCESS_VARIABLES)


def _raylet_has(name: str) -> bool:
    pid = os.environ.get("RAY_RAYLET_PID", "")
    with contextlib.suppress(OSError):
        return any(
            line.startswith(f"{name}=".encode())
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    return False


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds the lock of a job's folder any more."""
    try:
        fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


# ---- the process guard


def main(folder: Path) -> int:
    """The front's exit code, after its end and that of the actor."""
    token = sys.stdin.buffer.readline()
    front = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "unisono.jobs.launchers.ray_node_main",
            str(folder / "request.json"),
            str(os.getpid()),
        ],
        stdin=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    assert front.stdin is not None
    front.stdin.write(token)
    front.stdin.flush()
    commands = threading.Thread(target=_follow_commands, args=(front, folder), daemon=True)
    commands.start()
    code = front.wait()
    with contextlib.suppress(OSError):  # the actor is dead, but the folder still has to be removed
        print(json.dumps({"kind": "front_ended", "code": code}), flush=True)  # noqa: T201 - the protocol
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, sys.stdout.fileno())  # the actor has read everything
    os.dup2(devnull, sys.stderr.fileno())
    commands.join()  # the driver fetches the front's files in the meantime
    return code


def _follow_commands(front: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Executes the commands on stdin until it closes; then removes everything."""
    for line in sys.stdin.buffer:
        word, _, argument = line.decode("utf-8", "replace").strip().partition(" ")
        if word == "signal" and front.poll() is None:
            front.send_signal(signal.Signals.__members__.get(argument, signal.SIGTERM))
        elif word == "end":
            _end(front)
    front.kill()  # the kernel ends its ranks and tasks with it
    front.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _end(front: "subprocess.Popen[bytes]") -> None:
    assert front.stdin is not None
    front.stdin.close()  # its lifeline
    try:
        front.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        front.kill()


def _detach() -> None:
    """Continues as a detached process, with signals unblocked: Ray's workers and their children
    block SIGINT.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    _detach()
    sys.exit(main(Path(sys.argv[1])))

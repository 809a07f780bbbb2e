"""A fork server for all fronts of a session of tests: python -m tests.shared_fork_server SOCKET
--front-pid N; and how fronts join it.

It imports once. Each front that connects (its environment names the socket in TEST_FORK_SERVER)
gets a fork server of its own, forked from this one and put where that front is: namespaces, limits,
cores. A front whose environment, user or control group is different is refused, and starts a fork
server itself, as without this one. `install` has the fronts of a process, and what it starts
without a front, join.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import unisono.base.child
from unisono.guard.supervise import child_process
from unisono.guard.supervise.fork_server import Forked, ForkServer, receive
from unisono.trainer.worker import fork_server
from unisono.trainer.worker.fork_server import Request, send

SHARED = "TEST_FORK_SERVER"
"""The environment variable with the socket."""
FOLDER = "TEST_FOLDER"
"""The variable with the working directory of what is to be forked, if that is not its server's. It
does not see it.
"""
_NAMESPACES = ("net", "uts", "ipc", "mnt")
_GREETING_S = 5.0
_JOIN_S = 10.0
_MOST_WAITING = 64

_READ_WHEN_USED = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM", "TORCH_FR_BUFFER_SIZE", "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_TOKEN",
    "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CONFIG_HOME", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "NO_COLOR",
    "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "PAGER", "GIT_PAGER", "MPLBACKEND", "JPY_PARENT_PID", "JPY_SESSION_NAME",
    # with those of the line before: of a notebook
    "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "PYDEVD_USE_FRAME_EVAL",
})  # fmt: skip
"""Variables in which a front may differ from the server: no library reads them at its import, or
torch is given them after the fork.
"""
_READ_WHEN_USED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "TP_",
    "UNISONO_",
    "SLURM_",
    "RAY_",
    "PYTEST_",
    "TEST_",
)
_BEHIND_HF_HOME = frozenset({"HOME", "XDG_CACHE_HOME"})
"""Where HF_HOME is set, no library derives a path from these at its import."""


def main(argv: list[str]) -> None:
    """Imports, and serves until it is killed; in each process that one of its servers has forked,
    runs what that is.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "socket", type=Path, help="where fronts connect; in a folder that only this user can enter"
    )
    parser.add_argument("--front-pid", type=int, required=True, help="the process with which this one ends")
    arguments = parser.parse_args(argv)
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    unisono.base.child.end_with_front(arguments.front_pid)
    environment = {**os.environ}
    control = SharedServer(arguments.socket, environment, refusal=fork_server.load()).serve()
    send(control, ready=True)
    request = fork_server.serve(control)
    if request is None:
        os._exit(0)
    fork_server.become(in_its_folder(request))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def in_its_folder(request: Request) -> Request:
    """Goes to the request's folder; gives it without the variable that names that."""
    environment = {**request.environment}
    if folder := environment.pop(FOLDER, ""):
        os.chdir(folder)
    return request._replace(environment=environment)


class SharedServer:
    """Forks a fork server for each front that connects.

    What it is forked from has imported everything, and serves nobody itself.
    """

    def __init__(self, path: Path, environment: Mapping[str, str], *, refusal: str) -> None:
        """Listens.

        Args:
            path: of the socket, in a folder that only this user can enter.
            environment: that the imports have read.
            refusal: why nothing can be forked; empty where it can.
        """
        self._environment = environment
        self._refusal = refusal
        self._refusals = path.with_name("refusals")  # tells people why a suite is slow
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(_MOST_WAITING)

    def serve(self) -> socket.socket:
        """Serves until it is killed; returns in each forked server, with the connection to its
        front.
        """
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not select.select([self._listener], [], [], 1.0)[0]:
                continue
            connection, _ = self._listener.accept()
            try:
                if self._forked_for(connection):
                    self._listener.close()
                    return connection
            except (OSError, ValueError, KeyError) as error:
                send(connection, refused=f"{type(error).__name__}: {error}")
            connection.close()

    def _forked_for(self, connection: socket.socket) -> bool:
        """Whether this is the server that was forked for the front at the other end."""
        connection.settimeout(_GREETING_S)
        _, (words,), *_ = socket.recv_fds(connection, 16, 1)
        with os.fdopen(words, "rb") as file:
            file.seek(0)
            greeting = json.load(file)
        front, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        reason = (
            self._refusal
            or different(greeting["environment"], self._environment)
            or _different_program(greeting, uid)
            or _different_process(front)
        )
        if reason:
            with self._refusals.open("a", encoding="utf-8") as file:
                file.write(f"front {front}: {reason}\n")
            send(connection, refused=reason)
            return False
        template = os.getpid()
        if os.fork():
            return False
        os.setsid()
        unisono.base.child.forked_by = template
        unisono.base.child.end_with_front(template)
        try:
            _move_to(front)
        except OSError as error:
            send(connection, refused=f"{type(error).__name__}: {error}")
            os._exit(0)
        connection.settimeout(None)
        send(connection, pid=os.getpid())
        return True


def _different_program(greeting: Mapping[str, Any], uid: int) -> str:
    if uid != os.geteuid():
        return "the user is different"
    ours = {"python": sys.executable, "package": str(Path(unisono.base.child.__file__).parent)}
    return next((f"{name} is different" for name, value in ours.items() if greeting[name] != value), "")


def _different_process(front: int) -> str:
    """What of a front a process of this server cannot take over; empty if nothing."""
    for name in ("user", "pid"):
        if _namespace(front, name) != _namespace(os.getpid(), name):
            return f"the {name} namespace is different"
    if _lines_of(f"/proc/{front}/cgroup") != _lines_of("/proc/self/cgroup"):
        return "the control group is different"
    states = [_states_of(pid) for pid in (front, os.getpid())]
    for name in ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "SigIgn"):
        if states[0].get(name) != states[1].get(name):
            return f"{name} is different in its status"
    return ""


def _move_to(front: int) -> None:
    """Puts this process where a front is, as if that had started it: namespaces, limits, cores,
    priority, mask of new files.

    Raises:
        OSError: if this user may not.
    """
    state = _states_of(front)
    for name in _NAMESPACES:
        if _namespace(front, name) != _namespace(os.getpid(), name):
            with Path(f"/proc/{front}/ns/{name}").open("rb") as file:
                _set_namespace(file.fileno())
    roots = [Path(path).stat() for path in (f"/proc/{front}/root", "/")]
    if (roots[0].st_dev, roots[0].st_ino) != (roots[1].st_dev, roots[1].st_ino):
        raise OSError(0, "the root directory is different")
    for name, number in vars(resource).items():
        if name.startswith("RLIMIT_"):
            limits = resource.prlimit(front, number)
            if limits != resource.getrlimit(number):
                resource.setrlimit(number, limits)
    if os.sched_getaffinity(front) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, os.sched_getaffinity(front))
    if (nice := os.getpriority(os.PRIO_PROCESS, front)) != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    score = Path(f"/proc/{front}/oom_score_adj").read_text()
    if score != (ours := Path("/proc/self/oom_score_adj")).read_text():
        ours.write_text(score)
    os.umask(int(state["Umask"], 8))
    os.chdir(f"/proc/{front}/cwd")


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _namespace(pid: int, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _states_of(pid: int) -> dict[str, str]:
    pairs = (line.partition(":") for line in _lines_of(f"/proc/{pid}/status"))
    return {name: value.strip() for name, _, value in pairs}


def different(wanted: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The first variable that a library has read at its import and that is different in the wanted
    environment; empty if there is none.
    """
    later = _READ_WHEN_USED | (_BEHIND_HF_HOME if "HF_HOME" in wanted else frozenset())
    for name in sorted({*wanted, *ours}):
        unset = "" if name.startswith("PYTHON") else None  # to the interpreter an empty variable is none
        if wanted.get(name, unset) != ours.get(name, unset) and not (
            name in later or name.startswith(_READ_WHEN_USED_PREFIXES)
        ):
            return f"{name} is different in its environment"
    return ""


# From here on as the fronts see it.


class _Server:
    """A server that the shared one has forked for this front.

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


def join(environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket] | None":
    """Gets a server from the shared one that the environment names; None if there is none, or it
    cannot be this front's.
    """
    path = environment.get(SHARED)
    if not path:
        return None
    greeting = {"python": sys.executable, "package": str(Path(unisono.base.child.__file__).parent), "environment": {**environment}}  # fmt: skip
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):  # it is not there, or has just ended
        control.connect(path)
        with os.fdopen(os.memfd_create("greeting"), "wb", buffering=0) as words:
            words.write(json.dumps(greeting).encode())
            socket.send_fds(control, [b"front"], [words.fileno()])
        pid = receive(control, limit_s=_JOIN_S).get("pid")
        if isinstance(pid, int) and select.select([control], [], [], _JOIN_S)[0]:
            return cast("subprocess.Popen[bytes]", _Server(pid)), control
    control.close()
    return None


class SharedOnly(ForkServer):
    """Its processes are forked by the session's server, or not at all."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self._joined: Mapping[str, str] = {}

    def launch(self, environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """Joins it."""
        if (server := join(environment)) is None:
            raise OSError(0, "the session has no server for it")
        self._joined = {**environment}
        return server

    def start(self, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], *, waits: bool) -> Forked | None:  # fmt: skip
        """In the folder in which this process is by now, unless the imports would have read
        something different.
        """
        if self._joined and different(environment, self._joined):
            return None
        return super().start(command, {**environment, FOLDER: str(Path.cwd())}, fds, waits=waits)

    def _disable(self, why: str) -> None:
        del why
        self._is_disabled = True


@functools.cache
def _part_of(_path: str, _pid: int) -> SharedOnly:
    """This process's part of a shared server; it ends with this process."""
    return SharedOnly()


def install() -> None:
    """All that this process starts is forked by the session's server, if it can be: by its fronts,
    and without one.
    """
    launch, start_process = ForkServer.launch, child_process.start_process
    if launch.__module__ == __name__:
        return

    def join_or_launch(self: ForkServer, environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":  # fmt: skip
        return join(environment) or launch(self, environment)

    def start(command: list[str], environment: dict[str, str], output: int, *, fork_server: ForkServer | None, **more: Any) -> Any:  # fmt: skip
        if fork_server is None and (path := environment.get(SHARED)):
            fork_server = _part_of(path, os.getpid())
        return start_process(command, environment, output, fork_server=fork_server, **more)

    ForkServer.launch = join_or_launch  # type: ignore[method-assign]
    child_process.start_process = start


if __name__ == "__main__":
    main(sys.argv[1:])

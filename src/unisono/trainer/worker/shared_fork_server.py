"""A fork server for many fronts, as of a suite of tests: python -m
unisono.trainer.worker.shared_fork_server SOCKET --front-pid N.

It imports once. Each front that connects (its environment names the socket in UNISONO_FORK_SERVER)
gets a fork server of its own, forked from this one and put where that front is: namespaces, limits,
cores. A front whose environment, user or control group is different is refused, and starts a fork
server itself, as without this one.
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import runpy
import select
import socket
import struct
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import unisono.base.child
from unisono.trainer.worker.fork_server import Imported, Request, different, send

_NAMESPACES = ("net", "uts", "ipc", "mnt")
_GREETING_S = 5.0
_MOST_WAITING = 64


def main(argv: list[str]) -> Request | None:
    """Imports, and serves until it is killed; gives the request in each process that one of its
    servers has forked.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "socket", type=Path, help="where fronts connect; in a folder that only this user can enter"
    )
    parser.add_argument("--front-pid", type=int, required=True, help="the process with which this one ends")
    arguments = parser.parse_args(argv)
    imported = Imported(arguments.front_pid)
    return imported.serve(SharedServer(arguments.socket, imported).serve())


class SharedServer:
    """Forks a fork server for each front that connects.

    What it is forked from has imported everything, and serves nobody itself.
    """

    def __init__(self, path: Path, imported: Imported) -> None:
        """Listens.

        Args:
            path: of the socket, in a folder that only this user can enter.
            imported: what each server is forked with.
        """
        self._imported = imported
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
            self._imported.refusal
            or different(greeting["environment"], self._imported.environment)
            or _different_program(greeting, uid)
            or _different_process(front)
        )
        if reason:
            with self._refusals.open("a", encoding="utf-8") as file:
                file.write(f"front {front}: {reason}\n")
            send(connection, refused=reason)
            return False
        template = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which there are none of
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


if __name__ == "__main__":
    if main(sys.argv[1:]) is not None:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os._exit(0)

"""Fronts forked from a process that has imported the command line once: a front's own imports take
more CPU than most tests of it.

`start` does what subprocess.Popen does, and `run` what subprocess.run does. Each process of a test
session has one server, which ends with it. A front that needs an interpreter of its own (another
environment variable that is read at start, options of the interpreter) gets one. `start_program`
does the same for programs of others under guard (unisono.guard.integrations.inside), from a process in
which torch was imported and hooked. See docs/decisions/0018-fork-server.md;
tests/test_front_server.py compares both.
"""

import atexit
import ctypes
import functools
import importlib
import io
import json
import os
import pkgutil
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import unisono.base.child
import unisono.front.cli
import unisono.front.cli.app
from tests import shared_fork_server
from tests.shared_fork_server import FOLDER, SHARED
from unisono.guard.facts import package_versions
from unisono.guard.integrations.border import Guard, Presence, find_guard, own_registration
from unisono.guard.integrations.inside import injected
from unisono.guard.supervise import fork_server as forking
from unisono.guard.supervise.child_process import _Executed, child_environment
from unisono.trainer.worker import fork_server

_MODULES = (
    "unisono.jobs.runs.train_request",
    "unisono.jobs.runs.session",
    "unisono.front.checks.check",
    "unisono.jobs.launchers.launchers",
)
"""What fronts import, beside the modules of unisono.front.cli."""
_GUARDED_MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.multiprocessing",
    "torch.utils.data.distributed",
)
"""What programs of others import; DistributedDataParallel and optimizers load torch._dynamo when
they are made.
"""
_READ_AT_START = re.compile(r"^(PYTHON|PYDANTIC_|TYPER_|LD_|LC_|LANG|MALLOC_|GLIBC_|TZ)")
"""Variables that the interpreter, or a module at its import, has read."""
_PLACE = "TEST_PLACE"  # the variable with the place of a forked front, which the front does not see
_ROOT = Path(__file__).parents[1]
_LIMIT_S = 120.0  # of imports, on a machine with much to do
_MESSAGE_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2


@dataclass(frozen=True)
class Place:
    """Where a front is to be, as `ip netns exec NETWORK unshare --uts` and some mounts would put
    it.

    Attributes:
        network: the name of a network namespace; empty for that of the tests.
        host: a host name.
        binds: (directory or file, where it appears).
        small: (where, bytes) of an empty file system in memory.
    """

    network: str
    host: str
    binds: Sequence[tuple[str, str]] = ()
    small: Sequence[tuple[str, int]] = ()

    def enter(self) -> None:
        """Puts this process there.

        Raises:
            OSError: if that is not possible.
        """
        if self.network:
            with Path(f"/run/netns/{self.network}").open("rb") as file:
                _call("setns", file.fileno(), _CLONE_NEWNET)
            _call("unshare", _CLONE_NEWNS)
            _call("mount", b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
            _call("umount2", b"/sys", _MNT_DETACH)
            _call("mount", self.network.encode(), b"/sys", b"sysfs", 0, None)
        _call("unshare", _CLONE_NEWUTS)
        socket.sethostname(self.host)
        for source, target in self.binds:
            _call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND, None)
        for target, size in self.small:
            _call("mount", b"tmpfs", os.fsencode(target), b"tmpfs", 0, f"size={size}".encode())


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def start(
    command: Sequence[str], *, place: Place | None = None, executed: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Starts a front, forked if it can be.

    Args:
        command: this interpreter with `-m MODULE` or a script, and the arguments.
        place: where it is to be.
        executed: the command line that goes to the place and starts the front there by exec;
            `command` if it is empty.
        options: as for subprocess.Popen; the front leads a session of its own in any case.
    """
    environment = options.get("env") or os.environ
    reaches = place is not None or [*executed] in ([], [*command])
    if reaches and _has_server() and (server := _server(os.getpid())).serves(command, environment):
        return _Forked(command, server, place, **options)
    return subprocess.Popen([*(executed or command)], **options)


def start_child(command: Sequence[str], **options: Any) -> "_Forked | _Executed":
    """Starts what a ChildProcess of this process starts, forked if it can be: the front of a
    program that uses unisono.front.api.

    Args:
        command: this interpreter with `-m MODULE`, and the arguments.
        options: as for subprocess.Popen, with an environment as `env`.
    """
    if _has_server() and (server := _server(os.getpid())).serves(command, options["env"]):
        return _Forked(command, server, None, **options)
    return _Executed(command, **options)


def start_program(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """Starts somebody else's program under guard, forked if it can be: what it imports of torch was
    imported, and hooked, before.

    Args:
        command: this interpreter with `-m MODULE` or a script, and the arguments.
        options: as for subprocess.Popen, with a guarded environment as `env`.
    """
    if _has_server() and (server := _program_server(os.getpid())).serves(command, options["env"]):
        return _Forked(command, server, None, **options)
    return subprocess.Popen([*command], **options)


def start_rank(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Starts a rank without a front, forked by the session's server of ranks
    (tests/session_server.py) if it can be.

    Args:
        command: this interpreter with `-m MODULE` and the arguments.
        options: as for subprocess.Popen.
    """
    server = _rank_server() if _has_server() else None
    return _Forked(command, server, None, **options) if server else subprocess.Popen([*command], **options)


def run(
    command: Sequence[str], *, timeout: float | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Like subprocess.run with the output captured as text.

    Raises:
        subprocess.TimeoutExpired: if it did not end in time; it is killed.
    """
    given = options.pop("input", None)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    streams["stdin"] = subprocess.PIPE if given is not None else options.pop("stdin", None)
    with start(command, **streams, **options) as process:
        try:
            out, err = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@functools.cache
def _server(_pid: int) -> "_FrontServer":
    """That of this process."""
    return _FrontServer()


@functools.cache
def _program_server(_pid: int) -> "_FrontServer":
    """That of this process for guarded programs.

    Its own border is this process's, and nobody looks there.
    """
    folder = tempfile.mkdtemp(prefix="unisono-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    guard = Guard(Path(folder) / "guard", "none", os.getpid(), host="here")
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return _FrontServer(injected({**os.environ, **one_thread}, guard.write()), "programs")


def _has_server() -> bool:
    """The kernel ends a server with the thread that started it."""
    return sys.platform.startswith("linux") and threading.current_thread() is threading.main_thread()


def wait_for_rank_server(path: str | None = None) -> None:
    """Waits until a server of ranks has imported, by its socket: a front that comes before it
    imports the same once more.

    Of itself, the session's.
    """
    limit = time.monotonic() + _LIMIT_S
    path = path or os.environ.get(SHARED, "/")
    while not Path(path).exists():
        assert time.monotonic() < limit, f"{path} never came"
        time.sleep(0.05)


_rank_servers: dict[int, "_Server"] = {}


def _rank_server() -> "_Server | None":
    """What the session's server of ranks has forked for this process; None if it has not, which on
    a busy machine may be different next time.
    """
    if found := _rank_servers.get(os.getpid()):
        return found
    wait_for_rank_server()
    joined = shared_fork_server.join(child_environment(threads=1))
    if joined is None:
        return None
    process, control = joined
    atexit.register(process.kill)
    return _rank_servers.setdefault(os.getpid(), _Server(control))


class _Server:
    """A server, as the tests see it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, fds: Mapping[int, int]
    ) -> forking.Forked | None:
        """A forked process; None if the server refuses."""
        goes = {**environment, FOLDER: str(Path(folder).absolute())}
        channel = forking.send_request(self._control, command, goes, fds)
        answer = receive(channel)
        if "pid" not in answer:
            channel.close()
            return None
        return forking.Forked(answer["pid"], channel)


class _FrontServer(_Server):
    """One that is started for this process: of fronts, or of guarded programs in an environment
    that is guarded.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, kind: str = "fronts") -> None:
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(control)
        self._environment = dict(environment)
        with other_end, tempfile.TemporaryFile() as printed:
            words = [
                sys.executable,
                "-m",
                "tests.front_server",
                str(other_end.fileno()),
                str(os.getpid()),
                kind,
            ]
            self._process = subprocess.Popen(
                words, env=self._environment, cwd=_ROOT, pass_fds=(other_end.fileno(),), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            )  # fmt: skip
            other_end.close()
            atexit.register(self._close)
            if receive(control) != {"ready": True}:
                printed.seek(0)
                raise RuntimeError(f"the server of fronts did not start: {printed.read().decode()}")

    def _close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def serves(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether it can fork what this command line would start."""
        program, *rest = command
        plain = program == sys.executable and bool(rest) and (rest[0] == "-m" or not rest[0].startswith("-"))
        names = {name for name in {*environment, *self._environment} if _READ_AT_START.match(name)}
        # To the interpreter an empty variable is none.
        return plain and all(
            (environment.get(name) or "") == (self._environment.get(name) or "") for name in names
        )


def receive(channel: socket.socket) -> dict[str, Any]:
    """One message of a server; empty if that is dead."""
    if not select.select([channel], [], [], _LIMIT_S)[0]:
        raise TimeoutError("the server of fronts gave no answer")
    found: dict[str, Any] = json.loads(channel.recv(_MESSAGE_BYTES) or b"{}")
    return found


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A forked process; its parent is the server, which reports how it ended."""

    def __init__(self, command: Sequence[str], server: _Server, place: Place | None, **options: Any) -> None:
        self._server, self._place = server, place
        self._forked: forking.Forked | None = None
        super().__init__([*command], **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Has it forked where Popen would fork."""
        code = subprocess.Popen._execute_child.__code__  # type: ignore[attr-defined]
        given = dict(zip(code.co_varnames[1 : code.co_argcount], arguments, strict=True))
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [fd if fd >= 0 else number for number, fd in enumerate(streams)]
        environment = dict(os.environ if given["env"] is None else given["env"])
        if self._place is not None:
            environment[_PLACE] = json.dumps(asdict(self._place))
        numbers = dict(zip([0, 1, 2, *given["pass_fds"]], [*fds, *given["pass_fds"]], strict=True))
        command = [os.fspath(word) for word in given["args"]]
        self._forked = self._server.fork(command, environment, os.fspath(given["cwd"] or "."), numbers)
        if self._forked is None:
            assert self._place is None, "exec would not go there"
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        try:
            self.pid = self._forked.pid
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    def has_ended(self) -> bool:
        """Whether it is dead; its number stays taken until `wait`."""
        if self._forked is None:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        return self._forked.has_ended()

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended_within(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _ended_within(self, limit_s: float | None) -> int | None:
        if self._forked is None:  # exec has started it
            popen: Any = super()
            return popen._internal_poll() if limit_s == 0 else popen._wait(limit_s)
        if self.returncode is None and select.select([self._forked._pidfd], [], [], limit_s)[0]:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    self.returncode = self._forked.wait(0)
        return self.returncode


def _serve(control: socket.socket, tests: int, kind: str) -> fork_server.Request | None:
    """Imports, and serves until the tests are gone; gives the request in each forked process."""
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    unisono.base.child.end_with_front(tests)
    commands = [f"unisono.front.cli.{one.name}" for one in pkgutil.iter_modules(unisono.front.cli.__path__)]
    modules = (*_MODULES, *commands) if kind == "fronts" else _GUARDED_MODULES
    with unisono.base.child.loading_modules():
        for name in modules:
            importlib.import_module(name)
        if kind == "fronts":
            compile_options(unisono.front.cli.app.parser())
            package_versions()
    if kind == "fronts":
        shared_fork_server.install()
    control.send(b'{"ready": true}')
    request = fork_server.serve(control)
    if request is not None:
        fork_server.become(shared_fork_server.in_its_folder(request))
        unisono.base.child.forked_by = None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # a front does not end with who started it
        _open_streams()
        if place := os.environ.pop(_PLACE, ""):
            Place(**json.loads(place)).enter()
        if kind == "programs":
            _move_to_border()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return request


def compile_options(command: Any) -> None:
    """Has typer compile the types of all options, as the installed packages are read here: both are
    the same in every front.
    """
    for parameter in command.params:
        parameter.get_runtime_param()
    for inner in getattr(command, "commands", {}).values():
        compile_options(inner)


def _move_to_border() -> None:
    """This process was guarded when it imported torch, by the border of the server; its own is the
    one that its environment names.
    """
    from unisono.guard.integrations.inside.guarded_process import this_process

    process, guard = this_process({}), find_guard(os.environ)
    assert process is not None, "torch is hooked"
    assert guard is not None
    process.presence = Presence(guard)
    if "LOCAL_RANK" in os.environ:
        process.become(own_registration(os.environ))


def _open_streams() -> None:
    """As the interpreter does when it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        buffering = 0 if number and old.write_through else -1
        raw = open(number, "wb" if number else "rb", buffering, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, old.encoding, old.errors, newline="\n" if number else None,
            line_buffering=number == 2 or raw.isatty(), write_through=old.write_through,
        )  # fmt: skip
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _main(control: str, tests: str, kind: str) -> None:
    request = _serve(socket.socket(fileno=int(control)), int(tests), kind)
    if request is None:
        os._exit(0)
    command = [*request.command]
    if command[1] == "-m":
        sys.path[0] = str(Path.cwd())
        run_and_leave(lambda: runpy.run_module(command[2], run_name="__main__", alter_sys=True))
    else:
        sys.argv[:] = command[1:]
        sys.path[0] = str(Path(command[1]).resolve().parent)
        run_and_leave(lambda: runpy.run_path(command[1], run_name="__main__"))


def run_and_leave(program: Callable[[], object]) -> None:
    """Runs a program, and ends this process as the interpreter would, but for its finalization: 0.4
    CPU seconds with torch, 0.05 of a front.

    It returns, or raises, where the interpreter has something to say about the end: a signal, words
    instead of a code, a stream that is full.
    """
    code = 0
    try:
        program()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    except Exception:  # noqa: BLE001 - as at the top of the interpreter
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _main(*sys.argv[1:])

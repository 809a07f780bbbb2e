"""Entry of the fork server: imports once what ranks and tasks need, and forks one of them for each
request of its front.

It has one thread, computes nothing, and opens neither a device nor a process group; so what it
forks begins as a fresh process would after its imports. docs/decisions/0018-fork-server.md says
what a forked process undoes, and where a fresh interpreter is started all the same.
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import json
import mmap
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import unisono.base.child
from unisono.guard.facts.environment import read_environment

_MODULES: tuple[str, ...] = (
    "unisono.trainer.training.rank_run",
    "unisono.trainer.training.process_group",
    "unisono.base.torch_internals",
    "unisono.trainer.task.data_tasks",
    "transformers.models.llama.modeling_llama",
)
"""What ranks and the tasks beside them load. Another model's code is loaded by its ranks."""

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Numpy's BLAS and Arrow's allocator start threads as they are loaded. A forked process would have
none of them either.
"""

_READ_WHEN_USED = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM", "TORCH_FR_BUFFER_SIZE", "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_TOKEN",
    "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CONFIG_HOME", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "NO_COLOR",
    "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "PAGER", "GIT_PAGER", "MPLBACKEND", "JPY_PARENT_PID", "JPY_SESSION_NAME",
    # with those of the line before: of a notebook
    "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "PYDEVD_USE_FRAME_EVAL",
})  # fmt: skip
"""Variables in which a rank may differ from the server: no library reads them at its import, or
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

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MM_MAP = struct.Struct("=11QQIi")  # struct prctl_mm_map of linux/prctl.h
_START_CODE, _END_CODE, _START_STACK, _START_DATA, _END_DATA, _START_BRK = 23, 24, 25, 42, 43, 44
_MOST_FDS = 64


@dataclass(frozen=True)
class Request:
    """A process that the front wants.

    Attributes:
        command: as for exec: interpreter, `-m`, module, its arguments.
        environment: all of it.
        folder: the working directory, as a file descriptor.
        fds: a file descriptor here by the number that it has there; 0, 1 and 2 are among them.
        channel: to the front; says that the process has begun, and how it ended.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: int
    fds: Mapping[int, int]
    channel: socket.socket

    @classmethod
    def received(cls, fds: Sequence[int]) -> "Request":
        """Reads a request: its channel, its words in memory, its folder, and what it hands over."""
        channel, words, folder, *handed = fds
        with os.fdopen(words, "rb") as file:
            file.seek(0)
            body = json.load(file)
        return cls(body["command"], body["environment"], folder, dict(zip(body["fds"], handed, strict=True)), socket.socket(fileno=channel))  # fmt: skip

    def close(self) -> None:
        """Closes what was handed over, but not the channel."""
        for fd in {self.folder, *self.fds.values()}:
            os.close(fd)


@dataclass
class _Forked:
    pid: int
    channel: socket.socket
    has_ended: bool = False
    is_abandoned: bool = False


class Server:
    """Forks on request, and is the parent of what it has forked.

    A process that has ended stays a zombie until the front closes its channel, so its number means
    no other process until then. A channel that closes before is that of a front that is gone, or
    has given the process up: it is killed.
    """

    def __init__(
        self,
        control: socket.socket,
        initial_environment: Mapping[str, str],
        *,
        find_difference: Callable[[Mapping[str, str], Mapping[str, str]], str] | None = None,
    ) -> None:
        """Serves one front.

        Args:
            control: where requests come from; its end is the server's.
            initial_environment: the environment that the imports have read.
            find_difference: what of an environment the imports would have read differently;
                `different` if None.
        """
        self._control = control
        self._initial_environment = initial_environment
        self._find_difference = find_difference or different
        self._forked: dict[int, _Forked] = {}  # by the number of the pidfd
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self, *, refusal: str) -> Request | None:
        """Serves until the front is gone; None then.

        In each forked process it returns, too, with what that is to become.

        Args:
            refusal: why nothing can be forked; each request is answered with it. Empty where it
                can.
        """
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    try:
                        data, fds, *_ = socket.recv_fds(self._control, 16, _MOST_FDS)
                    except ConnectionResetError:  # it went before it had read all that was sent
                        return None
                    if not data:
                        return None
                    request = Request.received(fds)
                    reason = refusal or self._find_difference(request.environment, self._initial_environment)
                    if reason:
                        send(request.channel, refused=reason, always=bool(refusal))
                        request.close()
                        request.channel.close()
                    elif self._fork(request):
                        return request
                elif fd in self._forked:
                    self._note_end(fd)
                else:
                    self._abandon(fd)

    def _fork(self, request: Request) -> bool:
        """Whether this is the forked process."""
        server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which there are none of
            try:
                pid = os.fork()
            except OSError as error:
                send(request.channel, refused=f"no process could be forked: {error.strerror}", always=False)
                request.close()
                request.channel.close()
                return False
        if pid == 0:
            os.setsid()
            unisono.base.child.forked_by = server
            unisono.base.child.end_with_front(server)
            for one in (self._control, *(forked.channel for forked in self._forked.values())):
                one.close()
            return True
        request.close()
        pidfd = os.pidfd_open(pid)
        self._forked[pidfd] = _Forked(pid, request.channel)
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(request.channel, select.POLLIN)
        return False

    def _note_end(self, pidfd: int) -> None:
        """Says how a process ended, and leaves it a zombie while the front may still name it by its
        number.
        """
        forked = self._forked[pidfd]
        self._poll.unregister(pidfd)
        end = os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None  # no WNOHANG
        forked.has_ended = True
        send(forked.channel, returncode=end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
        if forked.is_abandoned:
            self._forget(pidfd)

    def _abandon(self, channel: int) -> None:
        """The front has closed the channel: it knows the end, or is gone."""
        pidfd = next(pidfd for pidfd, one in self._forked.items() if one.channel.fileno() == channel)
        self._poll.unregister(channel)
        forked = self._forked[pidfd]
        forked.is_abandoned = True
        if forked.has_ended:
            self._forget(pidfd)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)

    def _forget(self, pidfd: int) -> None:
        forked = self._forked.pop(pidfd)
        os.waitpid(forked.pid, 0)
        forked.channel.close()
        os.close(pidfd)


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


def obstacle_to_forking(known_fds: Iterable[int]) -> str:
    """What the imports have left behind that a forked process could not share; empty if nothing."""
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads != 1:
        return f"{threads} threads run after the imports"
    open_now = set(_open_fds()) - {*known_fds}
    left = [name for fd in sorted(open_now) if (name := _name_of(fd)) is not None]
    if left:
        return f"the imports have left {left[0]} open"
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_initialized()
    return "CUDA is initialized after the imports" if has_cuda else ""


def become(request: Request, *, printed: int, initial_environment: Mapping[str, str]) -> None:
    """Makes this forked process what a fresh one is: descriptors, folder, environment, names,
    random state.

    Args:
        printed: a file with what the imports have printed, which is at the start of the process's
            log as without a fork.
    """
    text = os.pread(printed, 1 << 16, 0)
    os.fchdir(request.folder)
    channel = _place(request.fds, request.channel)
    if text:
        with contextlib.suppress(OSError):
            os.write(2, text)
    set_since = {
        name: value
        for name, value in os.environ.items()
        if initial_environment.get(name) != value and name not in _ONE_THREAD
    }
    os.environ.clear()
    os.environ.update({**request.environment, **set_since})
    sys.argv[:] = request.command[2:]  # behind the interpreter and -m
    sys.orig_argv[:] = request.command
    show_as(request.command, request.environment)
    tempfile.tempdir = None  # as TMPDIR says now
    _reseed()
    wanted = request.environment.get("OMP_NUM_THREADS")
    if wanted is not None and wanted != initial_environment.get("OMP_NUM_THREADS") and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(wanted))
    send(channel, pid=os.getpid())
    channel.close()


def show_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Has /proc/PID/cmdline and environ show these, as exec does (PR_SET_MM_MAP of prctl(2)).

    Raises:
        OSError: if the kernel is built without it.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    start_code, end_code, start_data, end_data, start_brk, stack = (
        int(fields[place]) for place in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK, _START_STACK)
    )  # fmt: skip
    end = start + len(words)
    layout = _MM_MAP.pack(
        start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), stack, start, end, end, end + len(variables), 0, 0, _KEEP
    )  # fmt: skip
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(layout), ctypes.c_ulong(len(layout)), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
    _shown.append(memory)


def _place(fds: Mapping[int, int], channel: socket.socket) -> socket.socket:
    """Gives each descriptor its number, and closes all others but the channel, which it gives under
    a number of its own.
    """
    above = max({*fds, *fds.values(), channel.fileno()}) + 1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in fds.items()}
    kept = socket.socket(fileno=fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above))
    channel.close()
    for number, fd in moved.items():
        os.dup2(fd, number)
    for fd in _open_fds():
        if fd not in fds and fd != kept.fileno():
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    return kept


def _reseed() -> None:
    """Python's own generator does so by itself; torch's has a fixed seed at its import."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the generator that libraries share


def _open_fds() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def _name_of(fd: int) -> str | None:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:  # that of the listing
        return None


def send(channel: socket.socket, **words: Any) -> None:
    """Sends a message to a front, which may be gone."""
    with contextlib.suppress(OSError):  # the front is gone
        channel.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)


def main(argv: list[str]) -> Request | None:
    """Imports, and serves until the front is gone; gives the request in each forked process."""
    parser = argparse.ArgumentParser(description="Started by unisono's front; see `unisono --help`.")
    parser.add_argument("--control-fd", type=int, required=True, help="where the front's requests come from")
    parser.add_argument(
        "--front-pid", type=int, required=True, help="the front, with which this process ends"
    )
    arguments = parser.parse_args(argv)
    return Imported(arguments.front_pid).serve(socket.socket(fileno=arguments.control_fd))


class Imported:
    """This process, once it has imported what ranks and tasks need.

    Attributes:
        refusal: why nothing can be forked; empty where it can.
    """

    def __init__(self, front_pid: int) -> None:
        """Imports.

        Args:
            front_pid: of the process with which this one ends.
        """
        # A signal to all processes of a job asks the ranks to stop. The server is there until the
        # front ends it.
        self._mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        unisono.base.child.end_with_front(front_pid)
        self.environment = _initial_environment()
        self.refusal = _load()

    def serve(self, control: socket.socket) -> Request | None:
        """Serves one front until it is gone; gives the request in each forked process."""
        control.set_inheritable(False)
        with contextlib.suppress(OSError):
            control.send(b"ready")
        request = Server(control, self.environment).serve(refusal=self.refusal)
        if request is not None:
            become(request, printed=2, initial_environment=self.environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return request


def _load() -> str:
    """Imports; gives why nothing can be forked."""
    known_fds = [fd for fd in _open_fds() if _name_of(fd) is not None]
    os.environ.update(_ONE_THREAD)
    try:
        with unisono.base.child.loading_modules(read_environment().cache_dir):
            for name in _MODULES:
                importlib.import_module(name)
            _compile_conversions()
        show_as(sys.orig_argv, _initial_environment())
    except Exception as error:  # noqa: BLE001 - a fresh process meets the same, and says so as it always did
        return f"{type(error).__name__}: {error}"
    return obstacle_to_forking(known_fds)


def _compile_conversions() -> None:
    """Transformers compiles a thousand regular expressions, those of all models, when it loads the
    first one.
    """
    if "transformers" not in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError):  # an older one keeps no table of them
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def _initial_environment() -> dict[str, str]:
    """The environment that exec gave, without what the interpreter and the imports have set
    since.
    """
    items = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(item).partition("=") for item in items)
    return {name: value for name, equals, value in pairs if equals}


_KEEP: Final = -1  # of the executable's descriptor: leave it
_shown: list[mmap.mmap] = []  # the kernel reads it as long as the process lives

if __name__ == "__main__":
    if main(sys.argv[1:]) is not None:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os._exit(0)

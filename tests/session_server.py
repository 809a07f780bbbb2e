"""One fork server for all tests of a session: what imports torch, transformers and peft does so
once.

See docs/decisions/0018-fork-server.md.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import shared_fork_server
from tests.shared_fork_server import SHARED
from unisono.guard.supervise.child_process import child_environment

_THREADS = 1
_ROOT = Path(__file__).parents[1]


def start_server(folder: Path, environment: Mapping[str, str]) -> tuple["subprocess.Popen[bytes]", Path]:
    """Starts one that has read these variables when it imported; gives it, and its socket, which is
    there once it has imported.

    Args:
        folder: for what it prints and why it refuses; only this user can enter it.
        environment: all of it.
    """
    socket = folder / "socket"
    command = [sys.executable, "-m", "tests.shared_fork_server", str(socket), "--front-pid", str(os.getpid())]  # fmt: skip
    with (folder / "printed").open("w+b") as printed:
        process = subprocess.Popen(
            command, env=environment, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
        )  # fmt: skip
    return process, socket


class SessionServer:
    """Starts it for a session that has tests with ranks or tasks, and names it to all that these
    tests start.
    """

    def __init__(self) -> None:
        # Libraries derive their caches from HOME and XDG_CACHE_HOME, which tests change, at their
        # import; with HF_HOME they do not.
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-tests-")
        os.environ.setdefault("HF_HOME", str(Path(self._folder.name) / "huggingface"))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # lm_eval and sklearn set these at their import, in the tests that import them: fronts would
        # differ from the server.
        for name, value in (
            ("HF_XET_HIGH_PERFORMANCE", "1"),
            ("KMP_DUPLICATE_LIB_OK", "True"),
            ("KMP_INIT_AT_FORK", "FALSE"),
        ):
            os.environ.setdefault(name, value)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; fronts that come before its imports are done start fork servers of their
        own.
        """
        if self._process is not None or SHARED in os.environ or not sys.platform.startswith("linux"):
            return
        environment = child_environment(threads=_THREADS)
        self._process, socket = start_server(Path(self._folder.name), environment)
        os.environ[SHARED] = str(socket)

    def refusals(self) -> Counter[str]:
        """Why fronts had to start interpreters, each with imports of its own, and how often."""
        file = Path(self._folder.name) / "refusals"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return Counter(line.partition(": ")[2] for line in lines)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            del os.environ[SHARED]
        self._folder.cleanup()


_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"


def cache_with_kernels(folder: Path) -> Path:
    """A folder for XDG_CACHE_HOME that is the test's own, except for the compiled kernels: each new
    cache would cost a second of the C compiler.

    Args:
        folder: it; created if it is missing.
    """
    kernels = folder / "unisono" / "kernels"
    if not kernels.exists():
        (_CACHE / "kernels").mkdir(parents=True, exist_ok=True)
        kernels.parent.mkdir(parents=True, exist_ok=True)
        kernels.symlink_to(_CACHE / "kernels")
    return folder


_KEY = pytest.StashKey[SessionServer]()


def pytest_configure(config: pytest.Config) -> None:
    """Side by side (`-n`), all processes of the session share it; they have its name from the
    environment.
    """
    shared_fork_server.install()
    if hasattr(config, "workerinput"):
        return
    if sys.platform.startswith("linux") and os.geteuid() == 0:
        with contextlib.suppress(
            PermissionError
        ):  # as Slurm gives them to its jobs, which the server would refuse otherwise
            os.setgroups(os.getgrouplist("root", 0))
    config.stash[_KEY] = SessionServer()
    if config.getoption("numprocesses", default=None):
        config.stash[_KEY].start()


def pytest_collection_finish(session: pytest.Session) -> None:
    """One test at a time: only if there is one that starts ranks."""
    server = session.config.stash.get(_KEY, None)
    if server is not None and any(
        any(map(item.get_closest_marker, ("slow", "ranks", "long", "gpu"))) for item in session.items
    ):
        server.start()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What made the session slow."""
    if server := config.stash.get(_KEY, None):
        for reason, times in server.refusals().most_common():
            terminalreporter.write_line(f"not forked, {times} times: {reason}")


def pytest_unconfigure(config: pytest.Config) -> None:
    server = config.stash.get(_KEY, None)
    if server is not None:
        server.close()

"""What tests need and a machine may lack.

A skip says `needs WHAT` or `needs WHAT: why`, and the last line of a run sums them up.

`make system` installs PROGRAMS on Debian and Ubuntu. Tests: pytest tests/test_needs.py
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import llama_cpp as llama

PROGRAMS = {
    "ip": "iproute2", "tc": "iproute2", "iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount",
    "fsfreeze": "util-linux", "mkfs.ext4": "e2fsprogs", "kill": "procps", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "sshd": "openssh-server", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge", "tmux": "tmux", "node": "nodejs",
    "chromium": "chromium", "zsh": "zsh", "fish": "fish", "setsid": "util-linux",
}  # fmt: skip
"""A program, and the package of Debian that has it."""
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"  # not on the path of a user who is not root
_NEEDS = re.compile(r"needs ([^:]*)")


def program(name: str) -> str | None:
    """Where a program is, also where only root finds it."""
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_FOLDERS)


def lacking(*programs: str, root: bool = False) -> str:
    """The reason to skip what needs these programs, and perhaps root; empty where all of it is
    here.
    """
    if root and os.geteuid() != 0:
        return "needs root"
    missing = [name for name in programs if program(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def need(*programs: str, root: bool = False) -> None:
    """Skips the test where a program is missing, or root."""
    if reason := lacking(*programs, root=root):
        pytest.skip(reason)


def package(name: str) -> Any:
    """A Python package.

    Where it is missing, skips the test, or the whole file that calls this outside of a test.
    """
    return pytest.importorskip(name, reason=f"needs {name}", exc_type=ModuleNotFoundError)


def need_namespaces(name: str) -> None:
    """Skips the test where no network namespace can be made; `name` is one that nobody else has."""
    need("ip", "unshare", "mount", root=True)
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)


def need_user_namespaces() -> None:
    """Skips the test where a process cannot make a user namespace: without root in a changed root
    directory, or forbidden by the kernel.
    """
    need("unshare")
    made = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], check=False, capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"needs user namespaces: {made.stderr.strip()}")


@contextlib.contextmanager
def small_disk(place: Path, *options: str) -> Iterator[Path]:
    """A file system in memory, made at `place` for as long as this lasts.

    Skips the test where nothing can be mounted.

    Args:
        place: a directory, made where it is missing.
        options: of the mount, as `size=1m` or `ro`.
    """
    need("mount", root=True)
    place.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    mounted = subprocess.run(words, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs mounts: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def llama_cpp() -> ModuleType:
    """tests.llama_cpp. Skips the test where npm's package with the library is not installed."""
    if llama.find() is None:
        pytest.skip(f"needs {llama.PACKAGE}")
    return llama


def what_was_skipped(reasons: Sequence[str]) -> str:
    """One line that sums up why tests were skipped; empty where none was."""
    if not reasons:
        return ""
    found = Counter(match[1].strip() if (match := _NEEDS.search(reason)) else reason for reason in reasons)
    parts = [f"{what} ({n})" for what, n in found.most_common()]
    known = {*PROGRAMS, llama.PACKAGE}
    installable = any(name in known for what in found for name in what.split(", "))
    hint = "; `make system`, as root, installs the programs" if installable else ""
    tests = "1 test" if len(reasons) == 1 else f"{len(reasons)} tests"
    return f"not run: {tests}, for want of {', '.join(parts)}{hint}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--skips-allowed PATTERN`: any other skip fails the run, as in CI, where everything that can
    be installed is.
    """
    parser.addoption(
        "--skips-allowed",
        metavar="PATTERN",
        help="fail if a test is skipped for a reason that this does not match",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """After pytest's own last line, says what was not run for want of what."""
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(session.config, "workerinput"):
        return
    reasons = [
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminal.stats.get("skipped", [])
    ]
    if line := what_was_skipped(reasons):
        terminal.write_line(line)
    allowed = session.config.getoption("--skips-allowed")
    odd = [reason for reason in reasons if allowed is not None and not re.search(allowed, reason)]
    if odd:
        terminal.write_line(f"failed: a skip that is not expected here: {odd[0]}", red=True)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

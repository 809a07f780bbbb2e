"""Who a process is: its user, and its program without the rest of its command line, which may hold secrets."""

import os
import pwd
import re
from pathlib import Path

from unisono.facts.topology_of_devices import Holder

_FIRST_NAMESPACE = "pid:[4026531836]"
"""Of processes, since the machine's start (PROC_PID_INIT_INO in Linux's proc_ns.h)."""
_RUNS_A_SCRIPT = re.compile(r"(python|pypy|bash|sh|dash|zsh|perl|ruby|node|java|Rscript)[\d.]*")
"""To these the first argument is a program; to others it may be a password."""
_OF_PYTHON = ("-u", "-B", "-O", "-OO", "-s", "-S", "-E", "-I", "-m")
"""Its options without a value, and the one after which stands the program. After any other may stand a secret."""


def holder_of(pid: int, memory_bytes: int | None = None, *, proc: Path = Path("/proc")) -> Holder:
    """As much as this machine tells of a process; in a container those of others are not seen."""
    folder = proc / str(pid)
    try:
        user = _user(folder.stat().st_uid)
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return Holder(pid, memory_bytes)
    return Holder(pid, memory_bytes, user, _program(words))


def holder_of_driver(pid: int, memory_bytes: int | None = None) -> Holder:
    """The same of a number that NVIDIA's driver tells. It is the host's, and means somebody else inside of a container."""
    try:
        is_the_hosts = os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE  # noqa: PTH115 - what it says is no path
    except OSError:
        is_the_hosts = False
    return holder_of(pid, memory_bytes) if is_the_hosts else Holder(pid, memory_bytes)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _program(words: list[str]) -> str:
    """The program, and the script or module that it runs: `python train.py`."""
    if not words or not words[0]:
        return ""
    program = Path(words[0]).name
    if (
        not _RUNS_A_SCRIPT.fullmatch(program) or "-c" in words
    ):  # after -c stands code, which may hold anything
        return program
    rest = words[1:]
    while rest and rest[0] in _OF_PYTHON:
        rest = rest[1:]
    script = rest[0] if rest and not rest[0].startswith("-") else ""
    return f"{program} {Path(script).name}" if script else program

"""A process that reports what it is, then ends as its input says: python -m
tests.jobs.runs.standins.reported_facts --report-fd N --front-pid N
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from unisono.base.child import end_with_front

_FIELDS = ("SigBlk", "SigIgn", "SigCgt", "Umask", "Cpus_allowed_list", "Threads", "NoNewPrivs", "Groups")


def facts() -> dict[str, Any]:
    """What the process is, as itself, its interpreter and the kernel have it."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    me = os.getpid()
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path0": sys.path[0],
        "name": [__name__, getattr(sys.modules["__main__"].__spec__, "name", None)],
        "cmdline": Path("/proc/self/cmdline").read_text(),
        "environ": Path("/proc/self/environ").read_text(),
        "variables": dict(os.environ),
        "cwd": str(Path.cwd()),
        "fds": sorted(fd for fd in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()) if exists(fd)),
        "namespaces": [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "uts", "ipc", "mnt", "user", "pid", "cgroup")],
        "leads": [os.getsid(0) == me, os.getpgrp() == me],
        "status": {name: status[name].strip() for name in _FIELDS},
        "limits": [
            resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)
        ],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "gc": [gc.isenabled(), *gc.get_threshold()],
        "interpreter": [
            faulthandler.is_enabled(), threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            tempfile.gettempdir(), sys.stdin.isatty(), sys.stdout.encoding, sys.stdout.line_buffering, sys.flags.hash_randomization,
        ],
    }  # fmt: skip


def exists(fd: int) -> bool:
    """Whether a descriptor is still open; that of the listing is not."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--front-pid", type=int)
    arguments = parser.parse_args()
    end_with_front(arguments.front_pid)
    drawn = [random.random(), float(np.random.random()), tempfile.mktemp()]
    body = {"kind": "facts", "pid": os.getpid(), "parent": os.getppid(), "facts": facts(), "drawn": drawn}
    os.write(arguments.report_fd, json.dumps(body).encode() + b"\n")
    for line in sys.stdin:
        match json.loads(line):
            case {"exit": code}:
                sys.exit(code)
            case {"raise": text}:
                raise ValueError(text)
            case {"signal": number}:
                os.kill(os.getpid(), number)
            case {"fault": _}:
                faulthandler._sigsegv()  # type: ignore[attr-defined]
            case _:
                raise AssertionError(line)


if __name__ == "__main__":
    main()

"""The environment that every child of a front begins with.

It imports little: the fork server begins before the front's own imports.
"""

import os
from collections.abc import Iterable

from unisono.base.text import is_left_by_launcher


def base_environment(*, threads: int, without: Iterable[str] = ()) -> dict[str, str]:
    """This process's environment, with a thread count and without misleading variables, see
    `child_process.child_environment`.
    """
    gone = {*without, "UNISONO_TOKEN", "UNISONO_SERVE_KEY"}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last output of a killed worker reaches its log
        "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves its Python stack in the log
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin without a limit are fast only on an idle machine: beside other work, steps
    # took six times as long. 3,000 spins of GNU's OpenMP take 0.08 ms, about as long as waking a
    # thread, so a wait costs at most twice what it would with the better of both.
    if "OMP_WAIT_POLICY" not in environment:
        environment |= {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": environment.get("GOMP_SPINCOUNT", "3000"),
        }
    # peft 0.21 uses a deprecated name of transformers 5.23; the warning would be the last line of
    # every rank's log.
    environment.setdefault("PYTHONWARNINGS", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    return environment


def early_environment() -> dict[str, str]:
    """The base environment before anything is planned: with the declared number of threads, or one
    for each core, and without another launcher's variables.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    count = int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
    return base_environment(threads=count, without=[name for name in os.environ if is_left_by_launcher(name)])

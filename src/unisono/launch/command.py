"""What a child is started with: its command line, and an environment that only one device's run can mean."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.plan import DeviceChoice


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs a front starts. Tests hand in others."""

    worker: tuple[str, ...] = (sys.executable, "-m", "unisono.worker")
    task: tuple[str, ...] = (sys.executable, "-m", "unisono.task")


def worker_command(
    programs: Programs, *, plan: Path, events: Path, report_fd: int, snapshot_fd: int | None = None, beat_fds: Sequence[int] = ()
) -> list[str]:  # fmt: skip
    """The command line of one rank."""
    kept = ["--snapshot-fd", str(snapshot_fd)] if snapshot_fd is not None else []
    beats = ["--beat-fds", ",".join(map(str, beat_fds))] if beat_fds else []
    return [*programs.worker, str(plan), "--events", str(events), *kept, *beats, *_ties(report_fd)]


def task_command(programs: Programs, name: str, *, request: Path, report_fd: int) -> list[str]:
    """The command line of a task."""
    return [*programs.task, name, str(request), *_ties(report_fd)]


def _ties(report_fd: int) -> list[str]:
    return ["--report-fd", str(report_fd), "--front-pid", str(os.getpid())]


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options by their names as words of a command line: those of None are left out, those of True stand alone."""
    words: list[str] = []
    for name, value in options.items():
        words += [] if value is None else [name] if value is True else [name, str(value)]
    return words


def child_environment(
    *, threads: int, without: Iterable[str] = (), device: DeviceChoice | None = None
) -> dict[str, str]:
    """The environment of a child: ours, with the thread count of the plan and without what would mislead it.

    Args:
        threads: of OpenMP and MKL; part of what makes a run repeatable.
        without: names to leave out, as RANK and MASTER_ADDR are on one device.
        device: the only accelerator that the child may see, or none; None leaves what is visible as it is.
    """
    gone = {*without, "UNISONO_TOKEN"}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # what a killed worker printed last is what one wants to read
        "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves its Python stack in the log
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin while they wait are only quick where nothing else runs: beside other work steps took six times as long.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # peft 0.21 asks transformers 5.23 by an old name; the warning would be the last line of every rank's log.
    environment.setdefault("PYTHONWARNINGS", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    if device is not None:
        environment["TOKENIZERS_PARALLELISM"] = "false"  # it warns and stalls where a process forks
        environment["CUDA_VISIBLE_DEVICES"] = (device.uuid or "") if device.kind == "cuda" else ""
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which indices are shown
    return environment

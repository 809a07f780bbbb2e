"""Starts a program of tests/guard/programs/programs in one process or several, as a launcher would, and reads
what came of it.

They are forked from the session's one import of torch and transformers, and what this file does as
a program is to run one.
"""

import json
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import front_server
from tests.ports import free_port
from unisono.guard.supervise.child_process import child_environment

PROGRAMS = Path(__file__).parents[2] / "guard" / "programs" / "programs"
_LIMIT_S = (
    400.0  # of a loaded machine; the import of torch and its libraries alone takes tens of seconds there
)


@dataclass(frozen=True)
class Ended:
    """How the processes of a program ended.

    Attributes:
        codes: exit codes, by rank.
        outputs: what each has printed, by rank.
        losses: of each rank, by step.
        seconds_after_start: until the last had ended.
    """

    codes: list[int]
    outputs: list[str]
    losses: list[list[float]]
    seconds_after_start: float


def train(
    program: str, out: Path, *arguments: str, ranks: int, environment: dict[str, str] | None = None
) -> Ended:
    """Runs it to its end. With one rank there is no launcher at all."""
    port = free_port()
    began = time.monotonic()
    started = [_start(program, out, arguments, rank, ranks, port, environment or {}) for rank in range(ranks)]
    outputs = []
    try:
        for process in started:
            text, _ = process.communicate(timeout=max(1.0, began + _LIMIT_S - time.monotonic()))
            outputs.append(text)
    except subprocess.TimeoutExpired as error:
        for process in started:
            process.kill()
        ends = [f"rank {rank}:\n{process.communicate()[0]}" for rank, process in enumerate(started)]
        raise AssertionError("\n".join([f"no end within {_LIMIT_S:g} s", *ends])) from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    losses = [[line["loss"] for line in read_losses(out, rank)] for rank in range(ranks)]
    return Ended([process.returncode for process in started], outputs, losses, time.monotonic() - began)


def read_losses(out: Path, rank: int) -> list[dict[str, Any]]:
    """The whole lines that a rank has written: step, loss, pid."""
    path = out / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _start(
    program: str,
    out: Path,
    arguments: tuple[str, ...],
    rank: int,
    ranks: int,
    port: int,
    environment: dict[str, str],
) -> "subprocess.Popen[str]":
    launched = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return front_server.start_rank(
        [sys.executable, "-m", "tests.guard.integrations.launched_programs", str(PROGRAMS / program), "--out", str(out), *arguments],
        env={**child_environment(threads=1), "HF_HUB_OFFLINE": "1", **(launched if ranks > 1 else {}), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.argv.pop(0)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    front_server.run_and_leave(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))

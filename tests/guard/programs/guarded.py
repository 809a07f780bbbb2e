"""Starts a program of tests/guard/programs/programs under `unisono run`, breaks it, and says what was named,
and when.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.network_namespaces import Ground, Own
from unisono.base.causes import Verdict

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 420.0  # of a loaded machine
_BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Program:
    """A program as people start it.

    Attributes:
        name: in the table.
        launcher: words before the program's file.
        file: in tests/guard/programs/programs.
        ranks: it has.
        environment: it needs beside.
        steps: it makes in a healthy run.
    """

    name: str
    file: str
    launcher: tuple[str, ...]
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: int = 6

    def words(self, out: Path, *arguments: str) -> list[str]:
        """The command line."""
        if not self.file:
            return [*self.launcher, *arguments]
        return [*self.launcher, str(PROGRAMS / self.file), "--out", str(out), *arguments]


TORCHRUN = (str(_BIN / "torchrun"), "--nproc-per-node", "2")
_ACCELERATE = (
    str(_BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
DDP = Program("torch DDP, torchrun", "ddp.py", TORCHRUN)
FSDP2 = Program("torch FSDP2, torchrun", "fsdp2.py", TORCHRUN)
TRAINER = Program("HF Trainer, torchrun", "hf_trainer.py", TORCHRUN)
SFT = Program("TRL SFTTrainer, torchrun", "trl_sft.py", TORCHRUN)
LIGHTNING = Program("Lightning, 2 devices, torchrun", "lightning_fit.py", TORCHRUN)
LIGHTNING_ITSELF = Program(
    "Lightning, 2 devices, its own launcher",
    "lightning_fit.py",
    (sys.executable,),
    environment={"DEVICES": "2"},
)
LIGHTNING_ONE = Program("Lightning, 1 device", "lightning_fit.py", (sys.executable,), ranks=1)
ACCELERATE = Program("Accelerate, accelerate launch", "accelerate_loop.py", _ACCELERATE)
LAUNCHER = Program("a launcher as LLaMA-Factory's, torchrun below it", "launcher.py", (sys.executable,))
# Its daemons wait for each other's start, by default for less than a loaded machine takes.
_OF_RAY = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_AUTH_MODE": "disabled",
    "RAY_gcs_server_request_timeout_seconds": "120",
}
RAY = Program("Ray Train, TorchTrainer", "ray_train.py", (sys.executable,), environment=_OF_RAY)
LLAMA_FACTORY = Program("LLaMA-Factory 0.9.5", "", ("llamafactory-cli", "train"))


def environment_of(changes: Mapping[str, str]) -> dict[str, str]:
    """What a person's shell has, without anything that another test or launcher has left in it."""
    left = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "NNODES",
        "NODE_RANK",
        "NPROC_",
        "PET_",
        "UNISONO_",
        "TORCHELASTIC_",
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return {
        **own, "PATH": f"{_BIN}{os.pathsep}{own['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200", "GLOO_SOCKET_IFNAME": "lo",
        "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", **changes,
    }  # fmt: skip


@dataclass(frozen=True)
class Named:
    """What a guarded program's end was called.

    Attributes:
        exit_code: of the front.
        verdict: None where there was none.
        named_s: from the blow until the verdict was told, seconds.
        ended_s: from the blow until the front had ended.
    """

    exit_code: int
    verdict: Verdict | None
    named_s: float | None
    ended_s: float


class Guarded:
    """One front with its program.

    Attributes:
        front: `unisono run --json`.
        output_dir: of the front.
        out: where the program writes.
    """

    def __init__(
        self, program: Program, folder: Path, *arguments: str, options: Sequence[str] = (), changes: Mapping[str, str] | None = None,
        ground: Ground | None = None, node: int = 0,
    ) -> None:  # fmt: skip
        self.program = program
        self.output_dir, self.out = folder / "run", folder / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        command = program.words(self.out, *arguments)
        words = [
            sys.executable,
            "-m",
            "unisono",
            "run",
            "--json",
            "--output-dir",
            str(self.output_dir),
            *options,
            "--",
            *command,
        ]
        self.front = Front(
            words, node=node, host=ground.host(node) if ground else "", cwd=folder, json=True,
            environment=environment_of({**program.environment, **(changes or {})}),
            place=ground.place(node, Own()) if ground else None, executed=ground.command(node, words, Own()) if ground else (),
        )  # fmt: skip

    def losses(self, rank: int) -> list[dict[str, Any]]:
        """The whole lines that a rank has written: step, loss, pid."""
        path = self.out / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def pid_at(self, rank: int, step: int) -> int:
        """Waits until a rank has made a step; gives its process."""

        def made() -> float | None:
            lines = self.losses(rank)
            return float(lines[-1]["pid"]) if lines and lines[-1]["step"] >= step else None

        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit and self.front.exit_code is None:
            pid = made()
            if pid is not None:
                return int(pid)
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} never made step {step}; the front said:\n{self.front.text()}")

    def strike(self, rank: int, number: signal.Signals, *, step: int = 4) -> float:
        """Sends a rank a signal when it has made a step; gives the time of the blow."""
        pid = self.pid_at(rank, step)
        os.kill(pid, number)
        return time.monotonic()

    def ended(self, *, since: float | None = None) -> Named:
        """Waits for the front's end.

        Args:
            since: of the blow; else the front's start.
        """
        code = self.front.wait(limit_s=LIMIT_S)
        since = since if since is not None else self.front.started
        verdicts = self.front.verdicts
        named_at = self.front.printed_at('"verdict"') if verdicts else None
        assert self.front.ended is not None
        return Named(
            code, verdicts[0] if verdicts else None, round(named_at - since, 2) if named_at else None, round(self.front.ended - since, 2)
        )  # fmt: skip

    def file(self, name: str) -> Any:
        """A JSON file of the output_dir; None where it is not there."""
        path = self.output_dir / name
        return json.loads(path.read_text()) if path.exists() else None

    def close(self) -> None:
        """Nothing goes on after a test."""
        self.front.close()

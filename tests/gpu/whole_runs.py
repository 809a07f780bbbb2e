"""Programs of unisono that run side by side on a CUDA device, as a user starts them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.session_server import cache_with_kernels

DEVICE = "cuda"
UNISONO = (sys.executable, "-m", "unisono")
WITH_ANSWERS = (sys.executable, str(Path(__file__).parents[1] / "jobs" / "nodes" / "front.py"))
LIMIT_S = 240.0
NAMED_S = 20.0  # twice what is promised, on a machine with much to do
STEPS = 24
DIES_AT = 19  # the last checkpoint is that of step 16
PACED = {"pause": [{"how": "sleep", "seconds": 0.1, "every": 1}]}
"""Each step sleeps, which costs no arithmetic: a step that lasts milliseconds is neither kept nor
saved before the rank dies.
"""
FULL: dict[str, Any] = {"adapter": None, "optim": {"lr": 1e-3}}
BFLOAT16: dict[str, Any] = {"model": {"dtype": "bfloat16"}}
EXACT: dict[str, Any] = {**BFLOAT16, "deterministic": True}
NF4: dict[str, Any] = {"model": {"quantize": "nf4"}}

OBJECTIVES = """
import os

import torch
import unisono


class _Plain(unisono.Objective):
    calls = 0

    def loss(self, forward, micro, *, counts, known=0.0):
        _Plain.calls += 1
        if _Plain.calls == 9:
            self.disturb(micro.rows.input_ids.device)
        loss = forward.loss(micro.rows, count=counts.loss_tokens)
        return unisono.Part(loss, torch.zeros(0, device=loss.device))


class TooLarge(_Plain):
    def disturb(self, device):
        torch.empty(1 << 45, dtype=torch.uint8, device=device)


class Endless(_Plain):
    def disturb(self, device):
        torch.cuda._sleep(10**12)  # cycles: some minutes


class EndlessOnOne(_Plain):
    def disturb(self, device):
        if os.environ.get("RANK") == "1":
            torch.cuda._sleep(10**12)
"""


@dataclass(frozen=True)
class Ended:
    """A program that has ended, and the run that it was to make."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    out: Path

    def read(self, name: str) -> Any:
        """A JSON file of the run."""
        return json.loads((self.out / name).read_text())

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """What it wrote with --json."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Of the steps."""
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]

    @property
    def losses(self) -> list[float]:
        """Of the steps, in their order."""
        assert [line["step"] for line in self.metrics] == list(range(1, len(self.metrics) + 1))
        return [line["loss"] for line in self.metrics]

    @property
    def figures(self) -> list[tuple[float, float]]:
        """Loss and norm of the gradient of each step, which have to be the same bits."""
        return [(line["loss"], line["grad_norm"]) for line in self.metrics]

    def event(self, kind: str) -> dict[str, Any]:
        """The rank's last message of a kind."""
        lines = (self.out / "events" / "rank-00000.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["kind"] == kind][-1]

    def weights(self) -> bytes:
        """The file of the result."""
        (file,) = [*self.out.glob("adapter/*.safetensors"), *self.out.glob("model/*.safetensors")]
        return file.read_bytes()

    def check(self, returncode: int = 0) -> "Ended":
        """Itself, if it has ended as it should."""
        assert self.returncode == returncode, f"{self.returncode}\n{self.stderr}\n{self.stdout[-3000:]}"
        assert "Traceback" not in self.stderr, self.stderr
        return self


class Runs:
    """Programs that run side by side, in a folder with their configs and results."""

    def __init__(
        self, folder: Path, model: Path, rows: Path, *, answers: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> None:  # fmt: skip
        """Starts nothing yet.

        Args:
            folder: for configs and results.
            model: that is trained.
            rows: that it is trained on.
            answers: of the machine, see tests/jobs/nodes/front.py.
            env: variables of all programs.
        """
        self.folder, self.model, self.rows, self.answers = folder, model, rows, answers or {}
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
        self._begun: dict[str, Future[Ended]] = {}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NCCL_"))}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.environment = {
            **kept, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}), "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cache_with_kernels(folder / "cache")), "XDG_CONFIG_HOME": str(folder / "settings"),
            **(env or {}),
        }  # fmt: skip
        (folder / "objectives.py").write_text(OBJECTIVES)

    def write(self, name: str, **sections: Any) -> Path:
        """Writes the config of a run: LoRA in float32 on the device."""
        body: dict[str, Any] = {
            "model": {"path": str(self.model), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8},
            "data": {"train": str(self.rows), "max_length": 64}, "optim": {"lr": 1e-2}, "batch": {"global": 8},
            "duration": f"{STEPS} steps", "checkpoint": {"every": "4 steps"}, "restarts": 0, "device": DEVICE,
            "output_dir": str(self.folder / name),
        }  # fmt: skip
        for key, value in sections.items():
            old = body.get(key)
            body[key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(body))
        return path

    def train(
        self, name: str, *words: str, faults: dict[str, Any] | None = None, env: dict[str, str] | None = None, **sections: Any
    ) -> None:  # fmt: skip
        """Begins a run."""
        program = self.program(name, faults)
        self.call(name, *program, "train", str(self.write(name, **sections)), *words, env=env)

    def program(self, name: str, faults: dict[str, Any] | None) -> tuple[str, ...]:
        """The command, or one whose ranks have faults, or that is answered otherwise by its
        machine.
        """
        if faults is None and not self.answers:
            return UNISONO
        file = self.folder / f"{name}.answers.json"
        file.write_text(json.dumps(self.answers | {"faults": faults or {}}))
        return (*WITH_ANSWERS, str(file))

    def call(self, name: str, *command: str, env: dict[str, str] | None = None) -> None:
        """Begins a program."""
        self._begun[name] = self._pool.submit(self.run, command, self.folder / name, env)

    def run(self, command: Sequence[str], out: Path, env: dict[str, str] | None = None) -> Ended:
        """Runs a program to its end."""
        began = time.monotonic()
        done = subprocess.run(
            command, env={**self.environment, **(env or {})}, text=True, capture_output=True, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began, out)

    def ended(self, name: str) -> Ended:
        """Waits for a program that was begun."""
        return self._begun[name].result(LIMIT_S)

    def close(self) -> None:
        """Waits for all."""
        self._pool.shutdown(cancel_futures=True)

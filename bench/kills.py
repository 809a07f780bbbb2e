"""Kills a run with SIGKILL at random moments, also inside its saves, and starts it again with the same command.

    python bench/kills.py [--kills 200] [--seed 0]

Afterwards losses, final weights and checkpoints must be those of a run that nobody disturbed, bit by bit. The figures go to
bench/results/kills.json. tests/cli/test_kills.py does the same with a few kills.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
STEPS = 240
PATIENCE_S = 120.0

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Report:
    """What a disturbed run went through."""

    kills: int
    of_front: int
    of_worker: int
    inside_a_save: int
    starts: int
    seconds: float


def write_config(folder: Path, name: str) -> Path:
    """A config of a small random model on a part of the demo's rows."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    rows = folder / "rows.jsonl"
    if not rows.exists():
        lines = (ROOT / "examples/data/train.jsonl").read_text().splitlines()[:300]
        rows.write_text("\n".join(lines) + "\n")
    config = folder / f"{name}.yaml"
    config.write_text(
        f"model: {{path: {model}, tokenizer: 'builtin:tiny', weights: random, dtype: float32}}\nadapter: null\n"
        f"data: {{train: {rows}, eval: 0.1, max_length: 128}}\noptim: {{lr: 1.0e-3}}\nduration: {STEPS} steps\nbatch: {{global: 4}}\n"
        f"eval: {{every: 50 steps}}\ncheckpoint: {{every: 3 steps, keep: 2}}\ndevice: cpu\noutput_dir: {folder / name}\n"
    )
    return config


def start(config: Path) -> subprocess.Popen[bytes]:
    """`unisono train CONFIG`, one thread, quiet."""
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def outcome(run: Path) -> dict[str, Any]:
    """All that must be equal: losses, final weights, evaluation losses."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = (run / "model" / "model.safetensors").read_bytes()
    return {
        "losses": [
            (line["step"], line["loss"], line["grad_norm"], line["tokens"])
            for line in lines
            if "loss" in line
        ],
        "eval": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def undisturbed(folder: Path) -> dict[str, Any]:
    """The outcome of a run that nobody kills."""
    process = start(write_config(folder, "straight"))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors.decode()
    return outcome(folder / "straight")


def disturbed(folder: Path, *, kills: int, seed: int) -> tuple[dict[str, Any], Report]:
    """The outcome of runs that are killed `kills` times in all, each carried to its end; asserts that each is as `undisturbed`."""
    draw = random.Random(seed)
    wanted = undisturbed(folder)
    report = Report(0, 0, 0, 0, 0, time.monotonic())
    number = 0
    while report.kills < kills:
        config = write_config(folder, f"run-{number}")
        run = folder / f"run-{number}"
        here = min(kills - report.kills, draw.randint(3, 8))
        _one_run(config, run, here, draw, report)
        found = outcome(run)
        assert found == wanted, (
            f"run {number} with {here} kills differs from the undisturbed one (seed {seed})"
        )
        number += 1
    report.seconds = time.monotonic() - report.seconds
    return wanted, report


def _one_run(config: Path, run: Path, kills: int, draw: random.Random, report: Report) -> None:
    """Starts a run until it has been killed `kills` times and then ends by itself."""
    left = kills
    deadline = time.monotonic() + PATIENCE_S * (kills + 1)
    while True:
        assert time.monotonic() < deadline, f"{run} does not come to its end"
        process = start(config)
        report.starts += 1
        if left and _kill_at_a_random_moment(process, run, draw, report):
            left -= 1
        _, errors = process.communicate(timeout=PATIENCE_S)
        _wait_for_worker_to_go(run)
        if process.returncode == 0:
            return
        assert process.returncode in (-signal.SIGKILL, 5), errors.decode()


def _kill_at_a_random_moment(
    process: subprocess.Popen[bytes], run: Path, draw: random.Random, report: Report
) -> bool:
    """Waits until the run has gone on for some steps, and a little more; gives whether it was still there to be killed."""
    goal = _steps_done(run) + draw.randint(1, 40)
    began = time.monotonic()
    while _steps_done(run) < goal:
        if process.poll() is not None:
            return False
        assert time.monotonic() - began < PATIENCE_S, "no step was made"
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.05))
    victim = process.pid
    worker = _worker_of(process.pid)
    if worker is not None and draw.random() < 0.5:
        victim = worker
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
        report.kills += 1
        report.of_front += victim == process.pid
        report.of_worker += victim != process.pid
        report.inside_a_save += any(".tmp-" in entry.name for entry in (run / "checkpoints").iterdir())
        return True
    return False


def _steps_done(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b'"grad_norm"')
    except FileNotFoundError:
        return 0


def _worker_of(front: int) -> int | None:
    try:
        children = psutil.Process(front).children()
        return next((child.pid for child in children if "unisono.worker" in child.cmdline()), None)
    except psutil.Error:
        return None


def _wait_for_worker_to_go(run: Path) -> None:
    """A killed front takes its worker along; the next start must not meet it."""
    plan = str(run / "plan.json")
    began = time.monotonic()
    while any(plan in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() - began < 30, "a worker has outlived its front"
        time.sleep(0.01)


def main() -> None:
    """Kills, compares, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, report = disturbed(Path(folder), kills=args.kills, seed=args.seed)
    result = {
        "schema": 1, "command": f"python bench/kills.py --kills {args.kills} --seed {args.seed}", "machine": platform.platform(),
        "differing_runs": 0, **report.__dict__,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    (Path(__file__).parent / "results" / "kills.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

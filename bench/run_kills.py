"""Kills real training runs at random moments and starts them again: is the end bit-equal to that of an undisturbed run?

    python bench/run_kills.py                        200 kills; writes bench/results/run_kills.json
    python bench/run_kills.py --kills 5 --out FILE --model DIR --data FILE

SIGKILL hits the front (its worker dies with it) or the worker (its front goes on by itself), at any moment: while data are
prepared, in a step, inside a save. The same command is given again until the run is complete; then its losses and its final
weights are compared with those of the undisturbed run, bit by bit. A run that completes early is followed by another.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPARED = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "eval_loss")


def write_config(folder: Path, *, model: str, data: str, steps: int) -> Path:
    config = {
        "model": {"path": model, "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "data": {"train": data, "max_length": 128, "eval": 16 / 60, "too_long": "cut"}, "optim": {"lr": 1e-2}, "batch": {"global": 4},
        "duration": f"{steps} steps", "checkpoint": {"every": "1 steps", "keep": 2}, "eval": {"every": "5 steps"},
        "device": "cpu", "output_dir": "unused",
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def start(config: Path, out: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unisono", "train", str(config), f"output_dir={out}", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(config.parent / "cache"),
                   "XDG_CONFIG_HOME": str(config.parent / "settings")}  # fmt: skip
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)


def worker_of(front: int) -> int | None:
    """The pid of a front's worker."""
    try:
        children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    except OSError:
        return None
    for child in children:
        try:
            if b"unisono.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        except OSError:
            continue
    return None


def outcome_of(out: Path) -> dict[str, Any]:
    """What must be equal: the lines of metrics.jsonl without times, and the bytes of the final weights."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    return {
        "lines": [{key: line[key] for key in COMPARED if key in line} for line in lines],
        "weights": weights,
    }


def moment(out: Path) -> str:
    """Where in its life the run was when it was killed, by what it left."""
    if (out / "checkpoints").is_dir() and any(
        ".tmp-" in entry.name for entry in (out / "checkpoints").iterdir()
    ):
        return "inside a save"
    if (out / "adapter").exists():
        return "at the end"
    if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size:
        return "in training"
    return "before step 1"


def kill_and_go_on(
    config: Path,
    folder: Path,
    *,
    kills: int,
    lasts: tuple[float, float],
    wanted: dict[str, Any],
    chance: random.Random,
) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "kills": 0,
        "of_the_front": 0,
        "of_the_worker": 0,
        "moments": {},
        "runs": 0,
        "unequal": 0,
        "refused": [],
    }
    while counts["kills"] < kills:
        out = folder / f"run-{counts['runs']}"
        counts["runs"] += 1
        complete = False
        while not complete:
            front = start(config, out, folder / "log.txt")
            code = None
            while code is None:
                if counts["kills"] == kills:
                    code = front.wait()
                elif await_moment(front, out, lasts, chance):
                    code = strike(front, out, counts, chance)
                else:
                    code = front.wait()
            # A kill between the result and the end of the front: the run is complete, and a further start is refused.
            complete = code == 0 or (code == 2 and is_complete(out))
            if not complete and code not in (5, -signal.SIGKILL):
                counts["refused"].append(code)
                return counts
        counts["unequal"] += outcome_of(out) != wanted
        told = (
            f"{counts['kills']} of {kills} kills, {counts['runs']} runs complete, {counts['unequal']} unequal"
        )
        print(told, file=sys.stderr, flush=True)
    return counts


def await_first_step(front: subprocess.Popen[bytes], out: Path) -> None:
    """Waits until this start has made a step, or has ended."""
    before = size_of(out / "metrics.jsonl")
    while front.poll() is None and size_of(out / "metrics.jsonl") == before:
        time.sleep(0.01)


def await_moment(
    front: subprocess.Popen[bytes], out: Path, lasts: tuple[float, float], chance: random.Random
) -> bool:
    """Waits for a random moment: three times in four one after this start's first step. Whether the front still lives."""
    before_s, training_s = lasts
    if chance.random() < 0.75:
        await_first_step(front, out)
        longest_s = training_s
    else:
        longest_s = before_s
    try:
        front.wait(chance.uniform(0.0, longest_s))
    except subprocess.TimeoutExpired:
        return True
    return False


def is_complete(out: Path) -> bool:
    """Whether the run has written that it completed."""
    result = out / "result.json"
    return result.exists() and json.loads(result.read_text())["outcome"] == "completed"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def strike(
    front: subprocess.Popen[bytes], out: Path, counts: dict[str, Any], chance: random.Random
) -> int | None:
    """Kills the front or its worker; gives the front's exit code where it has ended."""
    worker = worker_of(front.pid)
    if worker is not None and chance.random() < 0.3:
        os.kill(worker, signal.SIGKILL)
        counts["of_the_worker"] += 1
        code = None
    else:
        front.kill()
        counts["of_the_front"] += 1
        code = front.wait()
    counts["kills"] += 1
    where = moment(out)
    counts["moments"][where] = counts["moments"].get(where, 0) + 1
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--data", default=str(ROOT / "examples" / "data" / "dev.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "run_kills.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, model=arguments.model, data=arguments.data, steps=arguments.steps)
        straight = folder / "straight"
        front = start(config, straight, folder / "log.txt")
        await_first_step(front, straight)
        before_s = time.monotonic() - began
        if front.wait() != 0:
            print((folder / "log.txt").read_text())
            return 1
        counts = kill_and_go_on(
            config, folder, kills=arguments.kills, lasts=(before_s, time.monotonic() - began - before_s),
            wanted=outcome_of(straight), chance=random.Random(arguments.seed),
        )  # fmt: skip
        log = (folder / "log.txt").read_text()
    result = {
        "schema": 1, "seed": arguments.seed, "model": Path(arguments.model).name, "steps": arguments.steps,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "python": platform.python_version(),
        **counts, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if counts["refused"] or counts["unequal"]:
        print(log[-4000:])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tokens per second and peak memory of training steps on one CUDA device, by size, for LoRA and full fine-tuning.

    python bench/gpu_step.py [--models m135] [--steps 30]

Runs `unisono train` as a user does, on random models and the rows of bench/workload.py; results go to bench/results/gpu_step.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workload import make  # type: ignore[import-not-found]  # beside this script


def measure(work: Path, model: str, adapter: str, steps: int) -> dict[str, Any]:
    """One run; medians over the second half of its steps."""
    run = work / f"{model}-{adapter}"
    config = work / f"{model}-{adapter}.yaml"
    section = "{rank: 8, alpha: 16}" if adapter == "lora" else "null"
    config.write_text(
        f"model: {work / model}\nadapter: {section}\ndata: {{train: {work / 'alpaca.jsonl'}, max_length: 2048, too_long: cut}}\n"
        f"duration: {steps} steps\nbatch: {{global: 32}}\ndevice: cuda\ncheckpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    subprocess.run(
        [sys.executable, "-m", "unisono", "train", str(config), "--quiet"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = lines[len(lines) // 2 :]
    return {
        "model": model, "adapter": adapter, "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
        "step_time_s": statistics.median(line["step_time_s"] for line in steady), "peak_bytes": steady[-1]["memory_bytes"],
    }  # fmt: skip


def main() -> None:
    """All sizes and both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="m15,m135")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work)
        found = [
            measure(work, model, way, args.steps)
            for model in args.models.split(",")
            for way in ("lora", "full")
        ]
    for line in found:
        print(
            f"{line['model']:6s} {line['adapter']:5s} {line['tokens_per_second']:10.0f} tok/s {line['peak_bytes'] / 1e9:6.2f} GB"
        )
    target = Path(__file__).parent / "results" / "gpu_step.json"
    target.write_text(
        json.dumps({"schema": 1, "command": "python bench/gpu_step.py", "found": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

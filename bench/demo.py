"""The demo on three seeds: exact match before and after, and how long it took.

    python bench/demo.py          # writes bench/results/demo.json

Run it on a machine that is otherwise quiet; the load is kept with the figures.
"""

import json
import os
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unisono.guard.facts.machine import read_machine

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)


def run_demo(seed: int) -> dict[str, Any]:
    """One run of the demo, as `make demo` does it; times include its start and the loading of
    everything.
    """
    load, began, cpu = os.getloadavg()[0], time.perf_counter(), _children_cpu_s()
    subprocess.run(
        [sys.executable, "examples/demo.py", "--seed", str(seed)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall = time.perf_counter() - began
    result = json.loads((ROOT / "runs" / "demo" / "result.json").read_text("utf-8"))
    plan = json.loads((ROOT / "runs" / "demo" / "plan.json").read_text("utf-8"))
    return {
        "seed": seed,
        "threads": plan["threads"],
        "exact_match_before": result["eval"]["exact_match_before"],
        "exact_match_after": result["eval"]["exact_match"],
        "eval_loss": result["eval"]["loss"],
        "loss": result["loss"],
        "steps": result["step"],
        "tokens_per_second": round(result["tokens_per_second"]),
        "wall_time_s": round(wall, 1),
        "cpu_time_s": round(_children_cpu_s() - cpu, 1),
        "load_before": round(load, 2),
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Runs the seeds one after another and writes the figures."""
    machine = read_machine()
    runs = []
    for seed in SEEDS:
        runs.append(run_demo(seed))
        print(json.dumps(runs[-1]), flush=True)
    figures = {
        "schema": 1,
        "command": "python bench/demo.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": machine.cpu_name, "cores": machine.cores, "bfloat16": machine.cpu_bfloat16},
        "versions": {name: version(name) for name in ("unisono", "torch", "transformers", "peft")},
        "runs": runs,
    }
    path = ROOT / "bench" / "results" / "demo.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

"""What a start costs: the imports of a rank, and a run of the built-in model up to its first
step.

python bench/imports.py [--pairs 10] [--runs 5]

Imports in pairs of fresh processes: without and with `loading_modules`, under which Python's
collector rests. The first step is the first line of metrics.jsonl; CPU seconds are those of all
processes of the run until then. The first run is not counted: it compiles, and prepares the data.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PROGRAM = """
import contextlib, time
from unisono.base.child import loading_modules
with {how}:
    begun = time.process_time()
    import unisono.trainer.training.rank_run
    print(time.process_time() - begun)
"""
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _seconds("contextlib.nullcontext()")  # compiles, and warms the files
    resting = "loading_modules()"
    rows = [(_seconds("contextlib.nullcontext()"), _seconds(resting)) for _ in range(arguments.pairs)]
    ratios = sorted(after / before for before, after in rows)
    quartiles = statistics.quantiles(ratios, n=4)
    runs = [_run() for _ in range(arguments.runs + 1)][1:]
    result = {
        "schema": 2,
        "command": f"python bench/imports.py --pairs {arguments.pairs} --runs {arguments.runs}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "collecting_cpu_s": statistics.median(before for before, _ in rows),
        "resting_cpu_s": statistics.median(after for _, after in rows),
        "ratio": {"median": statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]]},
        "run_of_one_step": {
            "model": "builtin:tiny",
            **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        },
    }
    print(json.dumps(result, indent=2))
    path = ROOT / "bench" / "results" / "imports.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _seconds(how: str) -> float:
    program = _PROGRAM.format(how=how)
    return float(
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    )


def _run() -> dict[str, float]:
    """Wall and CPU seconds of a run of one step, until that step and until its end."""
    with tempfile.TemporaryDirectory() as name:
        config, output = Path(name) / "run.yaml", Path(name) / "out"
        config.write_text(
            f"model: builtin:tiny\ndata: {{train: {ROOT}/examples/data/train.jsonl, max_length: 256}}\n"
            f"duration: 1 steps\nbatch: {{global: 3}}\noutput_dir: {output}\n",
            encoding="utf-8",
        )
        began = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "unisono", "train", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while run.poll() is None and not _has_stepped(output / "metrics.jsonl"):
            time.sleep(0.005)
        first, first_cpu = time.monotonic() - began, _cpu_s(run.pid)
        _, status, used = os.wait4(run.pid, 0)
        assert status == 0, "the run has failed"
        return {
            "first_step_wall_s": first,
            "first_step_cpu_s": first_cpu,
            "wall_s": time.monotonic() - began,
            "cpu_s": used.ru_utime + used.ru_stime,
        }


def _has_stepped(metrics: Path) -> bool:
    return metrics.is_file() and b'"loss"' in metrics.read_bytes()


def _cpu_s(root: int) -> float:
    """CPU seconds of a process and all below it, with those that have ended, from proc(5)."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        spent[int(stat.parent.name)] = sum(map(int, fields[11:15])) / _TICKS
    family = [root]
    for process in family:
        family += parents.get(process, [])
    return sum(spent.get(process, 0.0) for process in family)


if __name__ == "__main__":
    main()

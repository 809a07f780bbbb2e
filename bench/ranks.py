"""What training over two ranks costs: tokens per CPU second of one rank, two replicas and two
shards, on this machine.

    python bench/ranks.py [--steps 10] [--rounds 2] [--dtype bfloat16]

Runs `unisono train` as a user does, on the random 12 M model and the rows of bench/workload.py. CPU
seconds are those of all processes of a job, as the kernel counts them; a short job is taken off a
long one, so that starting up does not count. All ways take turns, so that a busy machine slows all
alike; ratios to one rank are what to look at. Results go to bench/results/ranks.json, those of
bfloat16 to ranks-bfloat16.json, where losses differ by its rounding.

Two ways are controls, in which nothing is exchanged: `half` is one run of one rank with half of the
batch, i.e. what one of two replicas computes, an update for each micro batch; `pair` is two such
runs side by side, which share the machine's memory and last cache as ranks do. Its ratio is the
bound for ddp: no exchange of gradients can be better.

`in_steps` is the same from the steps alone: the median of tokens over the CPU seconds of rank 0's
process in a step, times the ranks. It varies less than the difference of two jobs, and lacks what
the front takes.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from workload import make  # type: ignore[import-not-found]  # beside this script

WAYS = {"one": ("auto", 1), "half": ("auto", 1), "pair": ("auto", 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2)}
CONTROLS = {"half": 1, "pair": 2}
"""How many runs with half of the batch."""
SHORT = 2


def job(work: Path, adapter: str, way: str, steps: int, dtype: str) -> dict[str, Any]:
    """One job: tokens it saw, CPU seconds of all its processes, seconds a step, seconds of waiting
    a step.
    """
    runs = [work / f"{adapter}-{way}-{steps}-{number}" for number in range(CONTROLS.get(way, 1))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = [subprocess.Popen(**command(work, run, adapter, way, steps, dtype)) for run in runs]
    failed = [process.args for process in started if process.wait()]
    if failed:
        raise SystemExit(f"failed: {failed}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_runs = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs
    ]
    lines = of_runs[0]
    return {
        "tokens": sum(of_run[-1]["tokens"] for of_run in of_runs),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "step_time_s": statistics.median(line["step_time_s"] for line in lines[1:]),
        "comm_time_s": statistics.median(line["comm_time_s"] for line in lines[1:]),
        "losses": [line["loss"] for line in lines],
        "in_steps": statistics.median(
            (line["tokens"] - before["tokens"]) / line["cpu_time_s"] / WAYS[way][1]
            for of_run in of_runs
            for before, line in pairwise(of_run)
        ),
    }


def command(work: Path, run: Path, adapter: str, way: str, steps: int, dtype: str) -> dict[str, Any]:
    """The command of one run, for Popen; writes its config."""
    strategy, nproc = WAYS[way]
    section = "{rank: 8, alpha: 16}" if adapter == "lora" else "null"
    config = run.with_suffix(".yaml")
    config.write_text(
        f"model: {{path: {work / 'm15'}, dtype: {dtype}}}\nadapter: {section}\nparallel: {{strategy:"
        f" {strategy}}}\ndevice: cpu\ndata: {{train: {work / 'alpaca.jsonl'}, max_length: 512, too_long: cut,"
        f" packing: false}}\nduration: {steps} steps\nbatch: {{global: {4 if way in CONTROLS else 8}, micro:"
        f" 4}}\ncheckpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    args = [sys.executable, "-m", "unisono", "train", str(config), "--quiet", "--fresh"]
    args += ["--nproc", str(nproc)] if nproc > 1 else []
    return {"args": args, "stdout": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}


def measure(work: Path, adapter: str, steps: int, rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Medians over the rounds, for each way, and ratios to one rank; losses must be those of one
    rank, except with half of the batch.
    """
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    in_steps: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for way in WAYS:
            short, long = job(work, adapter, way, SHORT, dtype), job(work, adapter, way, steps, dtype)
            rates[way].append((long["tokens"] - short["tokens"]) / (long["cpu_s"] - short["cpu_s"]))
            in_steps[way].append(long["in_steps"])
            last[way] = long
    base, base_in_steps = statistics.median(rates["one"]), statistics.median(in_steps["one"])
    return [
        {
            "adapter": adapter, "way": way, "ranks": WAYS[way][1], "tokens_per_cpu_second": round(statistics.median(rates[way]), 1),
            "to_one_rank": round(statistics.median(rates[way]) / base, 3), "in_steps": round(statistics.median(in_steps[way]), 1),
            "in_steps_to_one_rank": round(statistics.median(in_steps[way]) / base_in_steps, 3), "step_time_s": round(last[way]["step_time_s"], 3),
            "comm_time_s": round(last[way]["comm_time_s"], 4),
            "largest_loss_difference": None if way in CONTROLS else max(
                abs(a - b) for a, b in zip(last[way]["losses"], last["one"]["losses"], strict=True)
            ),
        }
        for way in WAYS
    ]  # fmt: skip


def main() -> None:
    """All ways, for an adapter and for all weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--adapters", default="lora,full")
    parser.add_argument("--out", type=Path, help="of the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=400)
        found = [
            line
            for adapter in args.adapters.split(",")
            for line in measure(work, adapter, args.steps, args.rounds, args.dtype)
        ]
    for line in found:
        print(json.dumps(line))
    target = args.out or (
        Path(__file__).parent
        / "results"
        / ("ranks.json" if args.dtype == "float32" else f"ranks-{args.dtype}.json")
    )
    command = f"python bench/ranks.py --steps {args.steps} --rounds {args.rounds} --dtype {args.dtype}"
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "backend": "gloo", "threads": 1}
    target.write_text(
        json.dumps({"schema": 1, "command": command, "machine": machine, "found": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

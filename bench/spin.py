"""What threads that spin while they wait gain on a quiet machine, and lose on a busy one: seconds a
step for several limits of spinning.

    python bench/spin.py [--steps 12] [--rounds 2] [--dtype bfloat16]       about eight minutes; writes bench/results/spin.json

Runs `unisono train` on one rank with two threads, on the random models of 12 M and 135 M parameters
of bench/workload.py with LoRA. libgomp spins GOMP_SPINCOUNT times before a waiting thread sleeps: 0
with OMP_WAIT_POLICY=PASSIVE, 300,000 without a policy, without end with ACTIVE. Quiet: nothing else
runs. Busy: one process that computes without end on each core. The medians of the steps after the
first two; rounds are interleaved, so that a slow phase of the machine meets all settings;
`to_passive` is the ratio to PASSIVE in the same load.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workload import make  # type: ignore[import-not-found]  # beside this script

RESULT = Path(__file__).parent / "results" / "spin.json"
SETTINGS: dict[str, dict[str, str]] = {
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "PASSIVE, 1,000 spins": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "PASSIVE, 3,000 spins": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"},
    "PASSIVE, 10,000 spins": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"},
    "PASSIVE, 100,000 spins": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"},
    "ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE"},
}
BURN = "while True: sum(range(100000))"


def seconds_a_step(work: Path, model: str, setting: dict[str, str], steps: int, dtype: str) -> float:
    """The median step of one run."""
    run = work / "run"
    config = work / "config.yaml"
    config.write_text(
        f"model: {{path: {work / model}, dtype: {dtype}}}\nadapter: {{rank: 16, alpha: 32}}\ndevice:"
        f" cpu\ndata: {{train: {work / 'alpaca.jsonl'}, max_length: 512, too_long: cut, packing:"
        f" false}}\nduration: {steps} steps\nbatch: {{global: 4, micro: 4}}\ncheckpoint: {{every: 100000"
        f" steps}}\noutput_dir: {run}\n"
    )
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        str(config),
        "--quiet",
        "--fresh",
        "--no-first-checkpoint",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=environment | setting | {"OMP_NUM_THREADS": "2"}
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    return statistics.median(times[2:])


def measure(work: Path, model: str, *, busy: bool, steps: int, rounds: int, dtype: str) -> dict[str, float]:
    """setting → seconds a step, the least of the rounds."""
    burners = (
        [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 1)] if busy else []
    )
    try:
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(rounds):
            for name, setting in SETTINGS.items():
                found[name].append(seconds_a_step(work, model, setting, steps, dtype))
                print(model, "busy" if busy else "quiet", name, round(found[name][-1], 4), flush=True)
    finally:
        for burner in burners:
            burner.kill()
    return {name: round(min(times), 4) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="+", default=["m15", "m135"])
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=200)
        for model in arguments.models:
            for busy in (False, True):
                seconds = measure(
                    work,
                    model,
                    busy=busy,
                    steps=arguments.steps,
                    rounds=arguments.rounds,
                    dtype=arguments.dtype,
                )
                ratios = {name: round(value / seconds["PASSIVE"], 3) for name, value in seconds.items()}
                results.append(
                    {
                        "model": model,
                        "load": "busy" if busy else "quiet",
                        "step_s": seconds,
                        "to_passive": ratios,
                    }
                )
    body = {
        "schema": 1,
        "command": "python bench/spin.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "results": results,
    }
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()

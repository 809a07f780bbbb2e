"""Seconds a step with one thread and with two, for models of several widths: the figures behind
`_SMALL` in unisono/trainer/plan/resolve.py.

    python bench/threads.py [--widths 128 192 256] [--steps 16] [--rounds 2]       about five minutes; writes bench/results/threads.json
    python bench/threads.py --models m15 m135      instead of widths the models of bench/workload.py, in bfloat16; writes threads-models.json

Runs `unisono train` on one rank, LoRA on random models of a width each, in both dtypes, and on
`builtin:tiny`; ways take turns. The medians of the steps after the first three, the least of the
rounds; `wall_2_to_1` is the time with two threads over that with one. Run it on a quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workload import make  # type: ignore[import-not-found]  # beside this script

RESULTS = Path(__file__).parent / "results"
_LAYERS = 6
_FIRST = 3
THREADS = (1, 2)


def write_model(folder: Path, width: int) -> Path:
    """A random Llama of a width, with the tokenizer of the workload."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "m15")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=_LAYERS, num_attention_heads=width // 32, vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip
    target = folder / f"width-{width}"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def step_of(work: Path, model: str, dtype: str, *, threads: int, steps: int) -> tuple[float, float]:
    """Seconds of the clock and of the CPU, of the median step of one run."""
    run, config = work / "run", work / "config.yaml"
    config.write_text(
        f"model: {{path: {model}, dtype: {dtype}}}\nadapter: {{rank: 16, alpha: 32}}\ndevice: cpu\ndata:"
        f" {{train: {work / 'alpaca.jsonl'}, max_length: 256, too_long: cut, on_bad_row: skip}}\nduration:"
        f" {steps} steps\nbatch: {{global: 4, micro: 4}}\ncheckpoint: {{every: 100000 steps}}\noutput_dir:"
        f" {run}\n"
    )
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet", "--fresh", "--no-first-checkpoint"]  # fmt: skip
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)}
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "step_time_s" in line][_FIRST:]
    return tuple(statistics.median(line[key] for line in measured) for key in ("step_time_s", "cpu_time_s"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 192, 256])
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=200)
        models = {model: str(work / model) for model in arguments.models}
        if not models:
            models = {"builtin:tiny": "builtin:tiny"}
            models |= {f"width {width}": str(write_model(work, width)) for width in arguments.widths}
        for name, path in models.items():
            for dtype in ("bfloat16",) if arguments.models else ("float32", "bfloat16"):
                found: dict[int, list[tuple[float, float]]] = {threads: [] for threads in THREADS}
                for _ in range(arguments.rounds):
                    for threads in THREADS:
                        found[threads].append(
                            step_of(work, path, dtype, threads=threads, steps=arguments.steps)
                        )
                wall = {threads: min(pair[0] for pair in pairs) for threads, pairs in found.items()}
                cpu = {threads: min(pair[1] for pair in pairs) for threads, pairs in found.items()}
                results.append({
                    "model": name, "dtype": dtype, "step_s": {k: round(v, 4) for k, v in wall.items()},
                    "wall_2_to_1": round(wall[2] / wall[1], 2), "cpu_2_to_1": round(cpu[2] / cpu[1], 2),
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    body = {
        "schema": 1, "command": "python bench/threads.py " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(), "load_before": round(load, 2), "results": results,
    }  # fmt: skip
    result = RESULTS / ("threads-models.json" if arguments.models else "threads.json")
    result.write_text(json.dumps(body, indent=1) + "\n")
    print(result)


if __name__ == "__main__":
    main()

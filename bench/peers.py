"""LoRA fine-tuning by TRL's SFTTrainer and by unisono, in turn in one run, on the same rows.

    python bench/peers.py --peers-python PATH [--model m15|m135] [--threads 1] [--steps 12] [--repetitions 2]

PATH is the Python of an environment with trl, peft and the same torch (pip install torch==2.13.0 trl==1.16.0). Each repetition runs every
arm once, so that a busy hour hits all of them. The headline is real (non-padding) tokens per CPU second in the steady state;
wall time, peak memory and the time to the first step are kept too. Results go to bench/results/peers-MODEL-tTHREADS.json.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.time()
ARMS = {
    "trl default": {},
    "trl best": {"gradient_checkpointing": False, "bf16_weights": True, "group_by_length": True},
    "trl packing": {"gradient_checkpointing": False, "bf16_weights": True, "packing": True},
    "unisono": {},
}
MAX_LENGTH = 512


def trl_arm(model: str, data: str, batch: int, options: dict[str, bool]) -> dict[str, Any]:
    """Runs in the peers' Python: SFTTrainer over all rows once; gives the end, tokens and CPU time of each step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    dataset = Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "user", "content": r["instruction"] + ("\n" + r["input"] if r["input"] else "")}
                ],
                "completion": [{"role": "assistant", "content": r["output"]}],
            }
            for r in rows
        ]
    )
    steps: list[tuple[float, float, int]] = []
    seen = [0]

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            seen[0] += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((time.time(), time.process_time(), seen[0]))
            seen[0] = 0

    extra: dict[str, Any] = {}
    if "gradient_checkpointing" in options:
        extra["gradient_checkpointing"] = options["gradient_checkpointing"]
    if options.get("bf16_weights"):
        extra["model_init_kwargs"] = {"dtype": "bfloat16"}
    if options.get("group_by_length"):
        extra["train_sampling_strategy"] = "group_by_length"
    if options.get("packing"):
        extra["packing"] = True
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out, per_device_train_batch_size=max(1, batch // 3) if options.get("packing") else batch, num_train_epochs=1,
            bf16=True, use_cpu=True, report_to="none", save_strategy="no", lr_scheduler_type="constant", max_length=MAX_LENGTH, **extra,
        )  # fmt: skip
        lora = LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        trainer = Counting(
            model=model, args=config, train_dataset=dataset, peft_config=lora, processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )  # fmt: skip
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        trainer.train()
    return {"steps": steps, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def unisono_arm(model: str, data: str, batch: int, out: Path) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl."""
    config = out / "bench.yaml"
    run = out / "run"
    config.write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\nadapter: {{rank: 8, alpha: 16}}\n"
        f"data: {{train: {data}, max_length: {MAX_LENGTH}, too_long: cut, packing: false}}\n"
        f"optim: {{lr: 2.0e-5, schedule: constant}}\nduration: 1 epoch\nbatch: {{global: {batch}, micro: {batch}}}\n"
        f"device: cpu\ncheckpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    at, cpu, steps, before = 0.0, 0.0, [], 0
    for line in lines:
        at, cpu = at + line["step_time_s"], cpu + line["cpu_time_s"]
        steps.append((at, cpu, line["tokens"] - before))
        before = line["tokens"]
    first = (run / "metrics.jsonl").stat().st_mtime - (at - lines[0]["step_time_s"])
    return {
        "steps": steps,
        "peak_bytes": max(line["memory_bytes"] for line in lines),
        "first_step_ended": first,
    }


def figures(outcome: dict[str, Any], *, warmup: int) -> dict[str, float]:
    """Tokens per CPU second and per second after the first steps."""
    steps = outcome["steps"]
    (wall0, cpu0, _), (wall1, cpu1, _) = steps[warmup - 1], steps[-1]
    tokens = sum(step[2] for step in steps[warmup:])
    return {
        "tokens_per_cpu_s": tokens / (cpu1 - cpu0), "tokens_per_s": tokens / (wall1 - wall0), "peak_bytes": outcome["peak_bytes"],
        "tokens": tokens,
    }  # fmt: skip


def run_arm(name: str, args: argparse.Namespace, model: Path, data: Path) -> dict[str, float]:
    """One arm in a process of its own."""
    environment = dict(
        os.environ, OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1"
    )
    with tempfile.TemporaryDirectory() as out:
        python = sys.executable if name == "unisono" else args.peers_python
        command = [
            python,
            __file__,
            "--arm",
            name,
            "--rows",
            str(data),
            "--model-dir",
            str(model),
            "--out",
            out,
            "--batch",
            str(args.batch),
        ]
        began = time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        outcome = json.loads(done.stdout.splitlines()[-1])
        found = figures(outcome, warmup=args.warmup)
        first = outcome.get("first_step_ended") or outcome["steps"][0][0]
        return found | {"wall_s": time.time() - began, "first_step_s": first - began}


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--model", choices=["m15", "m135"], default="m15")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--work", type=Path, help="a folder that keeps the workload; else a new one")
    for hidden in ("--arm", "--rows", "--model-dir", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        if args.arm == "unisono":
            outcome = unisono_arm(args.model_dir, args.rows, args.batch, Path(args.out))
        else:
            outcome = trl_arm(args.model_dir, args.rows, args.batch, ARMS[args.arm])
        print(json.dumps(outcome))
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(args, args.work or Path(temporary))


def compare(args: argparse.Namespace, work: Path) -> None:
    """All arms, repetition by repetition; prints the table and writes the result."""
    if not (work / "alpaca.jsonl").exists():
        from workload import make  # type: ignore[import-not-found]  # beside this script

        make(work)
    lines = (work / "alpaca.jsonl").read_text().splitlines()
    random.Random(7).shuffle(lines)
    data = work / f"rows-{args.steps * args.batch}.jsonl"
    data.write_text("\n".join(lines[: args.steps * args.batch]) + "\n")
    found: dict[str, list[dict[str, float]]] = {}
    for repetition in range(args.repetitions):
        for name in args.arms.split(","):
            found.setdefault(name, []).append(run_arm(name, args, work / args.model, data))
            last = found[name][-1]
            print(
                f"{repetition} {name:12s} {last['tokens_per_cpu_s']:8.0f} tok/cpu-s {last['tokens_per_s']:8.0f} tok/s",
                flush=True,
            )
    medians = {
        name: {key: statistics.median(f[key] for f in all_) for key in all_[0]}
        for name, all_ in found.items()
    }
    base = medians["trl default"]
    print(f"\n{'':12s} tok/cpu-s  ratio   tok/s  ratio  peak MB  first step")
    for name, m in medians.items():
        print(
            f"{name:12s} {m['tokens_per_cpu_s']:9.0f} {m['tokens_per_cpu_s'] / base['tokens_per_cpu_s']:6.2f} {m['tokens_per_s']:7.0f} "
            f"{m['tokens_per_s'] / base['tokens_per_s']:6.2f} {m['peak_bytes'] / 1e6:8.0f} {m['first_step_s']:8.1f} s"
        )
    result = {
        "schema": 1, "command": f"python bench/peers.py --model {args.model} --threads {args.threads} --steps {args.steps} "
        f"--batch {args.batch} --repetitions {args.repetitions}", "machine": machine(), "medians": medians, "all": found,
    }  # fmt: skip
    target = Path(__file__).parent / "results" / f"peers-{args.model}-t{args.threads}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

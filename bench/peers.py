"""Fine-tuning by TRL's trainers, LLaMA-Factory and unisono, in turn in one run, on the same
rows.

    python bench/peers.py [sft | full | dpo | memory] [--model m15 | m135] [--threads 1] [--steps
    12] [--repetitions 2]
        [--peers-python PATH] [--llamafactory-python PATH]

PATH is the Python of an environment with trl, peft and the same torch (pip install torch==2.13.0
trl==1.16.0); the test extra has them. That of LLaMA-Factory has llamafactory==0.9.5 and the same
torch (its import of torchaudio needs a build for that torch); without it these arms are skipped,
with a line. Each repetition runs every arm once, so that a busy hour hits all of them. Results go
to bench/results/peers-….json.

- sft (LoRA), full (all weights), dpo (LoRA): rows of mixed length. The headline is real
  (non-padding) tokens per CPU second in the steady state; wall time, peak memory and the time to
  the first step are kept too. Tokens of dpo are those of both sides. Its headline includes the
  forward passes of the reference model for one epoch, wherever they are made: before the first
  step, or in each step.
- memory: rows of exactly MAX_LENGTH tokens, the same tokens in a micro batch for sft (both sides as
  rows of their own) and dpo.
"""

import argparse
import itertools
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

STARTED = time.time()
MAX_LENGTH = 512


@dataclass(frozen=True)
class Arm:
    """A trainer with its settings."""

    objective: str = "sft"
    tool: Literal["trl", "llamafactory", "unisono"] = "trl"
    full: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_TUNED = {"gradient_checkpointing": False, "bf16_weights": True}
# Trained weights are float32, as ours are: bfloat16 weights lose most updates.
_TUNED_FULL = {"gradient_checkpointing": False}
COMPARISONS = {
    "sft": {
        "trl default": Arm(),
        "trl best": Arm(options={**_TUNED, "group_by_length": True}),
        "trl packing": Arm(options={**_TUNED, "packing": True}),
        "llamafactory default": Arm(tool="llamafactory"),
        "llamafactory best": Arm(tool="llamafactory", options={"group_by_length": True, **_TUNED}),
        "unisono": Arm(tool="unisono"),
    },
    "full": {
        "trl default": Arm(full=True),
        "trl best": Arm(full=True, options={**_TUNED_FULL, "group_by_length": True}),
        "trl packing": Arm(full=True, options={**_TUNED_FULL, "packing": True}),
        "llamafactory default": Arm(full=True, tool="llamafactory"),
        "unisono": Arm(full=True, tool="unisono"),
        "unisono compact": Arm(full=True, tool="unisono", options={"optim.state_dtype": "bfloat16"}),
    },
    "dpo": {
        "trl default": Arm("dpo"),
        "trl grouped": Arm("dpo", options={**_TUNED, "group_by_length": True}),
        "trl precompute": Arm("dpo", options={**_TUNED, "group_by_length": True, "precompute": True}),
        "unisono": Arm("dpo", tool="unisono"),
    },
    "memory": {
        "trl sft": Arm(options=_TUNED),
        "trl dpo": Arm("dpo", options={**_TUNED, "precompute": True}),
        "unisono sft": Arm(tool="unisono"),
        "unisono dpo": Arm("dpo", tool="unisono"),
    },
}


# ---- arms, each in a process of its own


def trl_arm(model: str, data: str, batch: int, arm: Arm) -> dict[str, Any]:
    """Runs in the peers' Python: TRL's trainer over all rows once; gives the end, CPU time and
    tokens of each step.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.trainer_pt_utils import LengthGroupedSampler
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    steps: list[tuple[float, float, int]] = []
    seen, reference = [0], [0.0]
    trainer_class, config_class = (
        (SFTTrainer, SFTConfig) if arm.objective == "sft" else (DPOTrainer, DPOConfig)
    )

    class Counting(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            seen[0] += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if arm.objective == "dpo" and arm.options.get("group_by_length"):
                # Its own sampler asks for a column that its collator's columns do not include.
                return LengthGroupedSampler(batch, lengths=lengths_of(self.train_dataset))
            return super()._get_train_sampler(*args, **kwargs)

        def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            began = time.process_time()
            found = super()._precompute_ref_logps(*args, **kwargs)
            reference[0] += time.process_time() - began
            return found

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((time.time(), time.process_time(), seen[0]))
            seen[0] = 0

    with tempfile.TemporaryDirectory() as out:
        config = config_class(
            output_dir=out, num_train_epochs=1, bf16=True, use_cpu=True, report_to="none", save_strategy="no",
            lr_scheduler_type="constant", max_length=MAX_LENGTH, **trl_settings(arm, batch),
        )  # fmt: skip
        lora = LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        trainer = Counting(
            model=model, args=config, train_dataset=Dataset.from_list([trl_row(row) for row in rows]), peft_config=None if arm.full else lora,
            processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()],
        )  # fmt: skip
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        trainer.train()
    return {
        "steps": steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reference_cpu_s": reference[0],
    }


def trl_settings(arm: Arm, batch: int) -> dict[str, Any]:
    """An arm's settings in TRL's words."""
    options = arm.options
    found: dict[str, Any] = {
        "per_device_train_batch_size": max(1, batch // 3) if options.get("packing") else batch
    }
    if "gradient_checkpointing" in options:
        found["gradient_checkpointing"] = options["gradient_checkpointing"]
    if options.get("bf16_weights"):
        found["model_init_kwargs"] = {"dtype": "bfloat16"}
    if options.get("group_by_length") and arm.objective == "sft":
        found["train_sampling_strategy"] = "group_by_length"
    if options.get("packing"):
        found["packing"] = True
    if options.get("precompute"):
        found["precompute_ref_log_probs"] = True
        found["precompute_ref_batch_size"] = 1  # fewer pads than in larger batches
    return found


def trl_row(row: dict[str, str]) -> dict[str, Any]:
    """A row in TRL's columns."""

    def message(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    if "chosen" in row:
        sides = {side: message("assistant", row[side]) for side in ("chosen", "rejected")}
        return {"prompt": message("user", row["prompt"]), **sides}
    asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
    return {"prompt": message("user", asked), "completion": message("assistant", row["output"])}


def lengths_of(dataset: Any) -> list[int]:
    """Of each of TRL's pairs, the tokens of the longer side, to which both are padded."""
    return [
        min(MAX_LENGTH, len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])))
        for row in dataset
    ]


def llamafactory_arm(model: str, data: str, batch: int, arm: Arm, out: Path) -> dict[str, Any]:
    """Runs in the Python of LLaMA-Factory: its trainer over all rows once, from a file as a user
    writes it.
    """
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # it has a llamafactory.py
    import torch
    from llamafactory.train.sft.trainer import (  # type: ignore[import-not-found]
        CustomSeq2SeqTrainer,
    )
    from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]
    from transformers import TrainerCallback

    steps: list[tuple[float, float, int]] = []
    seen = [0]
    original = CustomSeq2SeqTrainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        seen[0] += int(inputs["attention_mask"].sum())
        return original(self, model, inputs, *args, **kwargs)

    CustomSeq2SeqTrainer.training_step = training_step

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((time.time(), time.process_time(), seen[0]))
            seen[0] = 0

    (out / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": data}}))
    options = arm.options
    settings: dict[str, Any] = {
        "model_name_or_path": model, "stage": "sft", "do_train": True, "dataset_dir": str(out), "dataset": "rows", "template": "alpaca",
        "cutoff_len": MAX_LENGTH, "output_dir": str(out / "run"), "num_train_epochs": 1, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1, "learning_rate": 2.0e-5, "lr_scheduler_type": "constant", "bf16": True, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "finetuning_type": "full" if arm.full else "lora",
        "disable_gradient_checkpointing": options.get("gradient_checkpointing") is False,
    }  # fmt: skip
    if not arm.full:
        settings |= {"lora_rank": 8, "lora_alpha": 16, "lora_target": "all"}
    if options.get("group_by_length"):
        settings["train_sampling_strategy"] = "group_by_length"
    run_exp(settings, callbacks=[Clock()])
    return {
        "steps": steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reference_cpu_s": 0.0,
    }


def unisono_arm(model: str, data: str, batch: int, arm: Arm, out: Path) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl and events."""
    config = out / "bench.yaml"
    run = out / "run"
    adapter = "null" if arm.full else "{rank: 8, alpha: 16}"
    config.write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\nadapter: {adapter}\nobjective: {arm.objective}\ndata:"
        f" {{train: {data}, max_length: {MAX_LENGTH}, too_long: cut, packing: false}}\noptim: {{lr: 2.0e-5,"
        f" schedule: constant}}\nduration: 1 epoch\nbatch: {{global: {batch}, micro: {batch}}}\ndevice:"
        f" cpu\ncheckpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    settings = [f"{key}={value}" for key, value in arm.options.items()]
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events" / "rank-00000.jsonl").read_text().splitlines()]
    at, cpu, steps, before = 0.0, 0.0, [], 0
    for line in lines:
        at, cpu = at + line["step_time_s"], cpu + line["cpu_time_s"]
        steps.append((at, cpu, line["tokens"] - before))
        before = line["tokens"]
    first = (run / "metrics.jsonl").stat().st_mtime - (at - lines[0]["step_time_s"])
    return {
        "steps": steps,
        "peak_bytes": max(line["memory_bytes"] for line in lines),
        "reference_cpu_s": sum(event["cpu_time_s"] for event in events if event["kind"] == "reference"),
        "first_step_ended": first,
    }


def figures(outcome: dict[str, Any], *, warmup: int) -> dict[str, float]:
    """Tokens per CPU second and per second after the first steps; per CPU second with the reference
    of one epoch.
    """
    steps = outcome["steps"]
    (wall0, cpu0, _), (wall1, cpu1, _) = steps[warmup - 1], steps[-1]
    tokens, all_tokens = sum(step[2] for step in steps[warmup:]), sum(step[2] for step in steps)
    of_steps, of_reference = (cpu1 - cpu0) / tokens, outcome["reference_cpu_s"] / all_tokens
    return {
        "tokens_per_cpu_s": 1 / (of_steps + of_reference), "tokens_per_cpu_s_of_steps": 1 / of_steps,
        "tokens_per_s": tokens / (wall1 - wall0), "reference_cpu_s": outcome["reference_cpu_s"], "peak_bytes": outcome["peak_bytes"],
        "tokens": tokens,
    }  # fmt: skip


# ---- the comparison


def run_arm(name: str, args: argparse.Namespace, model: Path, data: Path) -> dict[str, float]:
    """One arm in a process of its own."""
    arm = COMPARISONS[args.comparison][name]
    environment = dict(
        os.environ, OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1"
    )
    with tempfile.TemporaryDirectory() as out:
        pythons = {"trl": args.peers_python, "llamafactory": args.llamafactory_python}
        python = pythons.get(arm.tool, sys.executable)
        sides = 2 if args.comparison == "memory" and arm.objective == "sft" else 1
        hidden = {
            "--arm": name,
            "--rows": data,
            "--model-dir": model,
            "--out": out,
            "--batch": args.batch * sides,
        }
        command = [python, __file__, args.comparison, *itertools.chain(*hidden.items())]
        began = time.time()
        done = subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
        )
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
    parser.add_argument("comparison", choices=list(COMPARISONS), nargs="?", default="sft")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--llamafactory-python")
    parser.add_argument("--model", choices=["m15", "m135"], default="m15")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="rows or pairs of a step")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--arms", help="names, with commas between them; else all")
    parser.add_argument("--work", type=Path, help="a folder that keeps the workload; else a new one")
    for hidden in ("--arm", "--rows", "--model-dir", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        arm = COMPARISONS[args.comparison][args.arm]
        if arm.tool == "trl":
            outcome = trl_arm(args.model_dir, args.rows, args.batch, arm)
        else:
            run = unisono_arm if arm.tool == "unisono" else llamafactory_arm
            outcome = run(args.model_dir, args.rows, args.batch, arm, Path(args.out))
        print(json.dumps(outcome))
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(args, args.work or Path(temporary))


def rows_of(args: argparse.Namespace, work: Path) -> dict[str, Path]:
    """The rows of each objective of a comparison, as files."""
    if not (work / "pairs.jsonl").exists():
        from workload import make  # type: ignore[import-not-found]  # beside this script

        make(work)
    name = "alpaca" if args.comparison in ("sft", "full") else "pairs"
    lines = (work / f"{name}.jsonl").read_text().splitlines()
    random.Random(7).shuffle(lines)
    rows = [json.loads(line) for line in lines]
    number = args.steps * args.batch
    if args.comparison == "memory":
        rows = [full_pair(rows, first) for first in range(number)]
    found = {{"memory": "dpo", "full": "sft"}.get(args.comparison, args.comparison): rows[:number]}
    if args.comparison == "memory":
        found["sft"] = [
            {"instruction": row["prompt"], "input": "", "output": row[side]}
            for row in found["dpo"]
            for side in ("chosen", "rejected")
        ]
    files = {}
    for objective, chosen in found.items():
        files[objective] = work / f"{args.comparison}-{objective}-{number}.jsonl"
        files[objective].write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return files


def full_pair(rows: list[dict[str, str]], first: int) -> dict[str, str]:
    """A pair whose sides are both longer than MAX_LENGTH: its answers are those of several
    pairs.
    """
    own = [rows[(first + i) % len(rows)] for i in range(20)]
    sides = {side: " ".join(row[side] for row in own) for side in ("chosen", "rejected")}
    return {"prompt": own[0]["prompt"], **sides}


def compare(args: argparse.Namespace, work: Path) -> None:
    """All arms, repetition by repetition; prints the table and writes the result."""
    data = rows_of(args, work)
    arms = COMPARISONS[args.comparison]
    names = args.arms.split(",") if args.arms else list(arms)
    if not args.llamafactory_python:
        skipped = [name for name in names if arms[name].tool == "llamafactory"]
        names = [name for name in names if name not in skipped]
        print("skipped, without --llamafactory-python:", ", ".join(skipped) or "nothing")
    found: dict[str, list[dict[str, float]]] = {}
    for repetition in range(args.repetitions):
        for name in names:
            last = run_arm(name, args, work / args.model, data[arms[name].objective])
            found.setdefault(name, []).append(last)
            print(
                f"{repetition} {name:20s} {last['tokens_per_cpu_s']:8.0f} tok/cpu-s"
                f" {last['tokens_per_s']:8.0f} tok/s {last['peak_bytes'] / 1e6:8.0f} MB",
                flush=True,
            )
    medians = {
        name: {key: statistics.median(f[key] for f in all_) for key in all_[0]}
        for name, all_ in found.items()
    }
    base = medians[names[0]]
    print(f"\n{'':20s} tok/cpu-s  ratio   tok/s  ratio  peak MB  ratio  first step")
    for name, m in medians.items():
        print(
            f"{name:20s} {m['tokens_per_cpu_s']:9.0f} {m['tokens_per_cpu_s'] / base['tokens_per_cpu_s']:6.2f}"
            f" {m['tokens_per_s']:7.0f} {m['tokens_per_s'] / base['tokens_per_s']:6.2f}"
            f" {m['peak_bytes'] / 1e6:8.0f} {m['peak_bytes'] / base['peak_bytes']:6.2f}"
            f" {m['first_step_s']:8.1f} s"
        )
    result = {
        "schema": 1, "command": f"python bench/peers.py {args.comparison} --model {args.model} --threads {args.threads} --steps {args.steps} "
        f"--warmup {args.warmup} --batch {args.batch} --repetitions {args.repetitions}" + (f" --arms '{args.arms}'" if args.arms else ""),
        "machine": machine(), "medians": medians, "all": found,
    }  # fmt: skip
    kind = "" if args.comparison == "sft" else f"{args.comparison}-"
    target = Path(__file__).parent / "results" / f"peers-{kind}{args.model}-t{args.threads}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

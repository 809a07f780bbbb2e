"""GRPO by TRL and unisono, in turn in one run: answers sampled and whole steps, from the same
weights, prompts and settings.

    python bench/gpu_grpo.py [tiny m15 1b] [--device cpu | cuda] [--threads 1] [--steps 3]
    [--repetitions 2] [--arms unisono,trl,trl-batching] [--out FILE]

Each arm is a process of its own, with the Python that runs this script, which needs trl and peft. A
step samples 64 prompts × 8 answers, gives them their rewards, and makes one optimizer step with
LoRA of rank 16 on all linear layers. The first step is not counted.

- tiny: the built-in model after the fine-tuning of `make demo-grpo`, without the GRPO: answers of
  about 10 to 30 tokens, of at most 48. m15, 1b: random weights, whose answers all have 64 (256)
  tokens, so that continuous batching gains nothing.
- trl: GRPOTrainer with transformers' generate. trl-batching: with transformers' continuous
  batching, where it runs.
- Times: CPU seconds of the process that trains on a CPU, seconds of wall time on a GPU. unisono's
  rewards run in other processes; theirs are in the wall time only.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_peers import SHAPES, make_model  # type: ignore[import-not-found]  # beside this script

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP = 64, 8
ARMS = ("trl", "trl-batching", "unisono")
NEW_TOKENS = {"tiny": 48, "m15": 64, "1b": 256}
MICRO = {"tiny": 64, "m15": 32, "1b": 32}
SHAPES = SHAPES | {
    "m15": {
        "vocab_size": 8192, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 48, "tie_word_embeddings": True,
    },
}  # fmt: skip


def clock(device: str) -> Callable[[], float]:
    """What an arm measures: CPU seconds, or seconds of a GPU."""
    if device == "cpu":
        return time.process_time
    import torch

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def trl_arm(name: str, size: str, model: Path, steps: int, device: str) -> dict[str, Any]:
    """TRL's GRPOTrainer as a user calls it."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    now = clock(device)
    sampling: list[float] = []
    ends: list[float] = []

    def exact(completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(one[0]["content"] == right) for one, right in zip(completions, answer, strict=True)]

    class Timed(GRPOTrainer):
        def _generate(self, prompts: Any) -> Any:
            began = now()
            made = super()._generate(prompts)
            sampling.append(now() - began)
            return made

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(now())

    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["completion"]}
        for row in prompts()
    ]
    micro = MICRO[size]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, per_device_train_batch_size=micro, gradient_accumulation_steps=PROMPTS * GROUP // micro,
            num_generations=GROUP, max_completion_length=NEW_TOKENS[size], temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=size == "tiny",
            learning_rate=1e-4, max_steps=steps + 1, use_cpu=device == "cpu", bf16=device != "cpu",
            gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1,
            use_transformers_continuous_batching=name == "trl-batching",
            model_init_kwargs={"dtype": "float32" if device == "cpu" else "bfloat16"},
        )  # fmt: skip
        trainer = Timed(
            model=str(model),
            reward_funcs=exact,
            args=config,
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
            callbacks=[Clock()],
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    return {
        "sample_s": sampling[1:],
        "step_s": [after - before for before, after in itertools.pairwise(ends)],
        "answer_tokens": [line["completions/mean_length"] for line in lines[1:]],
    }


def unisono_arm(size: str, model: Path, steps: int, device: str) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl.

    On a CPU the CPU seconds of sampling are those of its wall time with one thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "prompts.jsonl")
        rows.write_text(
            "".join(
                json.dumps({"prompt": row["prompt"], "answer": row["completion"]}) + "\n" for row in prompts()
            )
        )
        config = {
            "model": {"path": str(model), "dtype": "float32" if device == "cpu" else "bfloat16"},
            "objective": "grpo", "adapter": {"kind": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
            "data": {"train": str(rows), "max_length": 512}, "rewards": ["exact"],
            "rollout": {"group": GROUP, "max_new_tokens": NEW_TOKENS[size]},
            "grpo": {"truncated": "mask" if size == "tiny" else "keep"},
            "optim": {"lr": 1e-4}, "duration": f"{steps + 1} steps", "device": device,
            "batch": {"global": PROMPTS * GROUP, "micro": MICRO[size]}, "output_dir": str(Path(folder, "run")),
        }  # fmt: skip
        file = Path(folder, "grpo.yaml")
        file.write_text(json.dumps(config))
        subprocess.run(
            [sys.executable, "-m", "unisono", "train", str(file), "--quiet"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if "loss" in line][1:]
    step = "cpu_time_s" if device == "cpu" else "step_time_s"
    # Of sampling only the wall time is known: of the step's CPU time it has the same share.
    return {
        "sample_s": [line["sample_time_s"] / line["step_time_s"] * line[step] for line in of_steps],
        "step_s": [line[step] for line in of_steps],
        "answer_tokens": [line["answer_tokens"] for line in of_steps],
    }


def prompts() -> list[dict[str, str]]:
    """Rows of the demo."""
    lines = (ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def model_of(size: str, work: Path, device: str) -> Path:
    """The model of a size, in a directory; that of `tiny` must have been made by `make demo-grpo`."""
    path = work / size
    if size != "tiny":
        make_model(path, SHAPES[size], ROOT / "src" / "unisono" / "builtin" / "tiny", device)
        return path
    start = ROOT / "runs" / "demo-grpo-start"
    if not start.exists():
        sys.exit(f"{start} is not there: run `make demo-grpo` first")
    subprocess.run(
        [sys.executable, "-m", "unisono", "export", str(start), str(path), "--merge"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path


def run_arm(name: str, size: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of an arm in a process of its own, or the last line of its error."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(args.threads)
    command = [sys.executable, __file__, size, "--device", args.device, "--steps", str(args.steps)]
    ended = subprocess.run(
        [*command, "--arm", name, "--model", str(model)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit code {ended.returncode}"}
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of an arm over all repetitions: the median of its steps."""
    if errors := [outcome["error"] for outcome in outcomes if "error" in outcome]:
        return {"error": errors[0]}
    columns = {name: [value for one in outcomes for value in one[name]] for name in outcomes[0]}
    median = {name: statistics.median(values) for name, values in columns.items()}
    answers = PROMPTS * GROUP
    return {
        "answers_per_s": answers / median["sample_s"],
        "answer_tokens": median["answer_tokens"],
        "steps_per_s": 1 / median["step_s"],
        "all": columns,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All arms of all sizes, in turn."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            model = model_of(size, Path(folder), args.device)
            outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in args.arms.split(",")}
            for _ in range(args.repetitions):
                for name, list_ in outcomes.items():
                    list_.append(run_arm(name, size, model, args))
            results[size] = {name: summary(list_) for name, list_ in outcomes.items()}
            ours = results[size].get("unisono", {})
            for name, arm in results[size].items():
                if "error" in arm or "error" in ours or not ours:
                    print(f"{size} {name}: {arm.get('error', arm)}", flush=True)
                    continue
                print(
                    f"{size} {name}: {arm['answers_per_s']:.1f} answers/s of {arm['answer_tokens']:.1f} tokens"
                    f" (unisono {ours['answers_per_s'] / arm['answers_per_s']:.2f} ×), {arm['steps_per_s']:.4f}"
                    f" steps/s (unisono {ours['steps_per_s'] / arm['steps_per_s']:.2f} ×)",
                    flush=True,
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", default=["tiny"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        (size,) = args.sizes
        figures = (
            unisono_arm(size, args.model, args.steps, args.device)
            if args.arm == "unisono"
            else trl_arm(args.arm, size, args.model, args.steps, args.device)
        )
        print(json.dumps(figures))
        return
    results = compare(args)
    out = args.out or ROOT / "bench" / "results" / "grpo.json"
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    out.write_text(
        json.dumps(
            {"device": args.device, "threads": args.threads, "machine": machine, "sizes": results}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

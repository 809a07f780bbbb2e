"""How the CPU time of a training step is spent, and what the fast layers give: one process, ways in
turn on the same rows.

    python bench/step.py [--models m15,m135] [--threads 1] [--steps 6]

- shares: of LoRA and full fine-tuning in bfloat16, the part of a step in matrix products, in the
  other operations of torch, in functions of kernels.c with what calls them, by torch's profiler.
- bound: tokens per CPU second if a step consisted of its matrix products alone, each as fast as in
  this step.
- fast_layers: tokens per CPU second with the fast layers (model.decoder) and without them, and the
  ratio.
- peak: the highest memory of the process so far, MiB; full fine-tuning comes last.

Results go to bench/results/step-t1.json, or --out.
"""

import argparse
import json
import os
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from workload import make  # type: ignore[import-not-found]  # beside this script

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model import forward as forwards
from unisono.trainer.model.decoder import slow_down_layers, speed_up_layers
from unisono.trainer.model.load import load_for_training
from unisono.trainer.training.gradient_sync import NoSync
from unisono.trainer.training.optim import build_optimizers, clipping_factor, total_norm

_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::addbmm", "aten::baddbmm"}
_FUNCTIONS = ("SelfAttention", "GatedMlp", "Norm", "TrainedNorm", "Product", "ChunkedCrossEntropy")
_OURS = {name + end for name in _FUNCTIONS for end in ("", "Backward")}
_ROWS_OF_A_STEP = {"m15": 8, "m135": 4}


class Trainer:
    """A model with its optimizer, and steps on given rows."""

    def __init__(self, directory: Path, *, lora: bool) -> None:
        adapter = {"rank": 8, "alpha": 16} if lora else None
        config = RunConfig.model_validate({
            "model": {"path": str(directory), "dtype": "bfloat16"}, "adapter": adapter, "data": {"train": "-"}, "output_dir": "-",
        })  # fmt: skip
        cpu = torch.device("cpu")
        self.loaded = load_for_training(
            config, directory=directory, tokenizer_directory=directory, dtype="bfloat16", device=cpu
        )
        self.forward = forwards.choose_forward(
            self.loaded, dtype="bfloat16", quick_adapter=lora, gradient_checkpointing=False
        )
        self.loaded.model.train()
        self.optimizers = build_optimizers(config.optim, self.loaded.trainable, not_matrices=set())
        self.gradient_sync = NoSync(() if lora else self.loaded.trainable.values())
        self.fast = [m for m in self.loaded.model.modules() if hasattr(m, "_kernels")]

    def use_fast_layers(self, *, on: bool) -> None:
        """Switches the fast layers on or off."""
        slow_down_layers([module for module in self.fast if "forward" in vars(module)])
        if on:
            speed_up_layers(self.loaded.model)

    def encoded(self, row: dict[str, str]) -> tuple[list[int], int]:
        """Tokens of a row, and how many of them are the prompt's."""
        asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        prompt = [{"role": "user", "content": asked}]
        all_of_it = [*prompt, {"role": "assistant", "content": row["output"]}]
        ids, begin = (
            self.loaded.tokenizer.apply_chat_template(messages, return_dict=False, add_generation_prompt=asks)
            for messages, asks in ((all_of_it, False), (prompt, True))
        )
        return ids[:512], min(len(begin), 511)

    def step(self, rows: list[tuple[list[int], int]]) -> tuple[float, int]:
        """CPU seconds and tokens of one step."""
        began = time.process_time()
        ids: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        labels: list[int] = []
        for tokens, prompt in rows:
            first = len(ids)
            ids += tokens
            positions += range(len(tokens))
            index += [first + place for place in range(prompt - 1, len(tokens) - 1)]
            labels += tokens[prompt:]
        flat, places = torch.tensor(ids), torch.tensor(positions)
        lengths = [len(tokens) for tokens, _ in rows]
        micro = forwards.Rows(flat, places, lengths, torch.tensor(index), torch.tensor(labels))
        self.forward.loss(micro, count=len(labels)).backward()
        norm = total_norm([p.grad for p in self.loaded.trainable.values() if p.grad is not None])
        self.optimizers.step(clipping_factor(norm, 1.0))
        self.optimizers.zero_grad()
        return time.process_time() - began, len(ids)


def shares(trainer: Trainer, batches: list[Any]) -> dict[str, float]:
    """The parts of the steps by kind of work; they sum to 1."""
    for rows in batches[:2]:
        trainer.step(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for rows in batches[2:]:
            trainer.step(rows)
    found = {"products": 0.0, "kernels": 0.0, "torch": 0.0}
    for event in profile.key_averages():
        kind = "products" if event.key in _PRODUCTS else "kernels" if event.key in _OURS else "torch"
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: round(time_ / total, 3) for kind, time_ in found.items()}


def speed(trainer: Trainer, batches: list[Any]) -> float:
    """Tokens per CPU second, the median of the steps after the second."""
    found = [trainer.step(rows) for rows in batches]
    return statistics.median(tokens / seconds for seconds, tokens in found[2:])


def in_turn(trainer: Trainer, batches: list[Any]) -> dict[str, float]:
    """Tokens per CPU second with and without the fast layers, step by step in turn."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number, rows in enumerate(batches):
        for on in (False, True):
            trainer.use_fast_layers(on=on)
            seconds, tokens = trainer.step(rows)
            if number > 1:
                found[on].append(tokens / seconds)
    ratios = [fast / slow for fast, slow in zip(found[True], found[False], strict=True)]
    return {
        "without": statistics.median(found[False]), "with": statistics.median(found[True]), "ratio": statistics.median(ratios),
    }  # fmt: skip


def main() -> None:
    """Measures, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="m15,m135")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--work", type=Path, help="a folder with the workload; else a new one")
    parser.add_argument("--out", type=Path, help="of the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        if not (work / "alpaca.jsonl").exists():
            make(work)
        texts = [json.loads(line) for line in (work / "alpaca.jsonl").read_text().splitlines()]
        random.Random(7).shuffle(texts)
        for model in args.models.split(","):
            results[model] = of_model(work / model, texts, batch=_ROWS_OF_A_STEP[model], steps=args.steps)
            print(model, json.dumps(results[model], indent=1), flush=True)
    cpu = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    machine = {"cpu": cpu, "cores": os.cpu_count(), "load": os.getloadavg()[0], "threads": args.threads}
    command = f"python bench/step.py --models {args.models} --threads {args.threads} --steps {args.steps}"
    target = args.out or Path(__file__).parent / "results" / f"step-t{args.threads}.json"
    document = {"schema": 1, "command": command, "machine": machine, "models": results}
    target.write_text(json.dumps(document, indent=1) + "\n")


def of_model(directory: Path, texts: list[dict[str, str]], *, batch: int, steps: int) -> dict[str, Any]:
    """All figures of one model."""
    found: dict[str, Any] = {}
    for way in ("lora", "full"):
        trainer = Trainer(directory, lora=way == "lora")
        rows = [trainer.encoded(text) for text in texts[: (steps + 2) * batch]]
        batches = [rows[first : first + batch] for first in range(0, len(rows), batch)]
        layers = in_turn(trainer, batches)
        measured, peak = speed(trainer, batches), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        parts = shares(trainer, batches)
        found[way] = {
            "fast_layers": layers, "tokens_per_cpu_s": measured, "shares": parts, "bound": measured / parts["products"], "peak": peak,
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()

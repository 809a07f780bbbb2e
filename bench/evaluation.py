"""Measures `unisono eval`: its answers against `model.generate` one by one and in padded batches;
its loss of packed rows against TRL's evaluation with padding.

python bench/evaluation.py [m15|m135 ...] [--parts answers loss] [--dtypes float32 bfloat16]
[--rounds 3] [--out bench/results/evaluation.json]

The models are the random ones of bench/workload.py. They would never end an answer, so a sixtieth
of the vocabulary are stop tokens: lengths vary as those of real answers do. The loss is that of
rows of 180 and of 24 tokens; in bfloat16, TRL has bfloat16 weights and its default, autocast. The
ways are measured in turn, in CPU seconds and in seconds; ratios are those of medians.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import machine, trl_row  # type: ignore[import-not-found]  # beside this script
from transformers import AutoModelForCausalLM
from workload import make  # type: ignore[import-not-found]  # beside this script

from unisono.base.events import Reporter
from unisono.trainer.batches.table import TableRows
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.engine import answer_prompts
from unisono.trainer.model.generate import generate
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.task import evaluate, evaluation_rows
from unisono.trainer.task.inference import InferenceModel, open_requested

QUESTIONS = 32
ANSWER_TOKENS = 64
ROWS = 96
SHORT_ROWS = 800
PADDED_ROWS = 8  # per batch of TRL, its default


def timed(work: Callable[[], Any], times: dict[str, list[float]]) -> Any:
    """The result of some work; notes its CPU seconds and seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    times.setdefault("cpu_s", []).append(round(time.process_time() - cpu, 3))
    times.setdefault("wall_s", []).append(round(time.perf_counter() - wall, 3))
    return found


def ratio(slow: dict[str, list[float]], fast: dict[str, list[float]]) -> dict[str, float]:
    """Of the medians."""
    return {unit: round(statistics.median(slow[unit]) / statistics.median(fast[unit]), 2) for unit in slow}


def measure_answers(opened: InferenceModel, rounds: int) -> dict[str, Any]:
    """Three ways to the same answers."""
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 8_000) for _ in range(draw.randint(20, 90))] for _ in range(QUESTIONS)]
    stops = set(draw.sample(range(4, 8_000), 8_000 // 60))
    options: dict[str, Any] = {"stop_ids": stops, "pad_id": 3}
    limits = [ANSWER_TOKENS] * QUESTIONS
    times: dict[str, dict[str, list[float]]] = {"one_by_one": {}, "padded_batches": {}, "together": {}}
    equal = True
    found: list[list[int]] = []
    with opened.ready() as model:

        def one_by_one() -> list[list[int]]:
            return [
                generate(model, [prompt], max_new_tokens=ANSWER_TOKENS, **options)[0] for prompt in prompts
            ]

        for _ in range(rounds):
            wanted = timed(one_by_one, times["one_by_one"])
            padded = timed(
                lambda: generate(model, prompts, max_new_tokens=ANSWER_TOKENS, **options),
                times["padded_batches"],
            )
            found = timed(lambda: answer_prompts(model, prompts, limits=limits, **options), times["together"])
            equal = equal and wanted == padded == found
    return {
        "questions": QUESTIONS, "answer_tokens": sum(map(len, found)), "answers_equal": equal, "times": times,
        "ratio_to_one_by_one": ratio(times["one_by_one"], times["together"]),
        "ratio_to_padded_batches": ratio(times["padded_batches"], times["together"]),
    }  # fmt: skip


def write_short_rows(rows: Path, out: Path) -> None:
    """Rows of 24 tokens on average, template included: the first words of other rows."""
    long = [json.loads(line) for line in rows.read_text().splitlines()]
    with out.open("w") as file:
        for i in range(SHORT_ROWS):
            row, first = long[i % len(long)], i % 5
            asked = " ".join(row["instruction"].split()[first : first + 3])
            answer = " ".join(row["output"].split()[: 2 + i % 2])
            file.write(json.dumps({"instruction": asked, "input": "", "output": answer}) + "\n")


def in_dtype(model: Path, dtype: str) -> Path:
    """The model's directory in a dtype: written beside the float32 one."""
    if dtype == "float32":
        return model
    out = model.with_name(f"{model.name}-{dtype}")
    shutil.copytree(model, out)
    AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).save_pretrained(out)
    return out


def measure_loss(opened: InferenceModel, model: Path, rows: Path, work: Path, rounds: int) -> dict[str, Any]:
    """The loss of all rows, by us and by TRL."""
    config = evaluation_rows.evaluation_config(opened, str(rows))
    _, table = evaluation_rows.prepared_rows(config, work / "cache", Reporter(None))
    sequences = list(range(table.sequences))
    trainer = trl_trainer(model, rows, work, opened.dtype)
    times: dict[str, dict[str, list[float]]] = {"trl": {}, "unisono": {}}
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for _ in range(rounds):
        theirs = timed(trainer.evaluate, times["trl"])
        ours = timed(lambda: losses(opened, table, sequences), times["unisono"])
    return {
        "rows": table.sequences, "tokens": ours["tokens"], "loss": ours["loss"], "trl_loss": theirs["eval_loss"],
        "times": times, "ratio": ratio(times["trl"], times["unisono"]),
    }  # fmt: skip


def losses(opened: InferenceModel, table: TokenTable, sequences: list[int]) -> dict[str, Any]:
    """What `unisono eval` measures before it generates."""
    return evaluate.losses(opened, TableRows(table, opened.device), sequences, Reporter(None))


def trl_trainer(model: Path, rows: Path, work: Path, dtype: str) -> Any:
    """TRL's trainer with its defaults for evaluation."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([trl_row(json.loads(line)) for line in rows.read_text().splitlines()])
    config = SFTConfig(
        output_dir=str(work / "trl"), use_cpu=True, bf16=dtype == "bfloat16", report_to="none", max_length=1024,
        per_device_eval_batch_size=PADDED_ROWS, model_init_kwargs={"dtype": dtype}, disable_tqdm=True,
    )  # fmt: skip
    threads = torch.get_num_threads()
    trainer = SFTTrainer(
        model=str(model), args=config, train_dataset=data, eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    torch.set_num_threads(threads)
    return trainer


def main() -> None:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["m15", "m135"])
    parser.add_argument("--parts", nargs="+", default=["answers", "loss"], choices=["answers", "loss"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"schema": 1, "machine": machine(), "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=ROWS)
        write_short_rows(work / "alpaca.jsonl", work / "short.jsonl")
        for name in arguments.models:
            for dtype in arguments.dtypes:
                model = in_dtype(work / name, dtype)
                opened = open_requested(RequestedModel(str(model)), Reporter(None))
                parts: dict[str, Any] = {}
                if "answers" in arguments.parts:
                    parts["answers"] = measure_answers(opened, arguments.rounds)
                if "loss" in arguments.parts:
                    for rows in ("alpaca", "short"):
                        parts[f"loss_{rows}"] = measure_loss(
                            opened, model, work / f"{rows}.jsonl", work, arguments.rounds
                        )
                found["models"][model.name] = parts
                print(json.dumps(parts, indent=1), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

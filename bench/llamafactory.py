"""Losses of LLaMA-Factory itself and of unisono, from one LLaMA-Factory file, on the same rows in
the same order.

    python bench/llamafactory.py --llamafactory PATH [--steps 5]

PATH is the `llamafactory-cli` of an environment with llamafactory==0.9.5 and torch for the CPU. The
file is its example train_lora/qwen3_lora_sft.yaml for a tiny random Qwen3, in float32, without
dropout, on one rank, from the same initial adapter; rows are sorted for LLaMA-Factory in the order
in which unisono takes them. Results go to bench/results/llamafactory.json.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from unisono.trainer.plan.run_plan import permutation

TESTS = Path(__file__).parent.parent / "tests"
EXAMPLE = TESTS / "readers" / "llamafactory_examples" / "examples" / "train_lora" / "qwen3_lora_sft.yaml"
TOKENIZER = TESTS / "readers" / "llamafactory" / "golden" / "tokenizer"
RESULT = Path(__file__).parent / "results" / "llamafactory.json"
MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # a directory of this name in the working directory
ROWS, SEED, TOLERANCE = 64, 42, 1e-4
WORDS = [
    "remind",
    "me",
    "on",
    "Tuesday",
    "about",
    "the",
    "report",
    "and",
    "call",
    "the",
    "office",
    "before",
    "noon",
    "with",
    "all",
    "numbers",
    "of",
    "last",
    "week",
]


def make_model(place: Path) -> None:
    """A random Qwen3 of two layers with the tokenizer of LLaMA-Factory's golden cases, and an
    untrained adapter.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(place / MODEL)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(place / MODEL)
    adapter = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    adapter.save_pretrained(place / "initial")


def make_rows() -> list[dict[str, str]]:
    """Rows of different lengths."""
    draw = random.Random(5)
    return [
        {
            "instruction": " ".join(draw.choices(WORDS, k=draw.randint(2, 12))),
            "input": "",
            "output": " ".join(draw.choices(WORDS, k=draw.randint(2, 40))),
        }
        for _ in range(ROWS)
    ]


def write_case(place: Path, rows: list[dict[str, str]], steps: int) -> Path:
    """dataset_info.json, rows, and the example with the settings of this comparison."""
    (place / "data").mkdir(parents=True, exist_ok=True)
    (place / "data" / "rows.json").write_text(json.dumps(rows))
    (place / "data" / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    text = EXAMPLE.read_text()
    for old, new in (
        ("dataset: identity,alpaca_en_demo", "dataset: rows"),
        ("bf16: true", "bf16: false"),
        ("logging_steps: 10", "logging_steps: 1"),
        ("trust_remote_code: true", "adapter_name_or_path: initial"),
        ("num_train_epochs: 3.0", f"max_steps: {steps}"),
        ("preprocessing_num_workers: 16", "preprocessing_num_workers: 1"),
        ("dataloader_num_workers: 4", "dataloader_num_workers: 0"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path = place / "qwen3_lora_sft.yaml"
    path.write_text(text)
    return path


def run(command: list[str], place: Path, **variables: str) -> None:
    """Runs a command; its output is shown only if it fails."""
    done = subprocess.run(
        command, check=False, cwd=place, env=os.environ | variables, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def read_losses(path: Path, key: str = "loss") -> list[float]:
    """The losses of a file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llamafactory", required=True, help="llamafactory-cli")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rows = make_rows()
    order = permutation(len(rows), seed=SEED, epoch=0)
    with tempfile.TemporaryDirectory() as temporary:
        theirs, ours = Path(temporary) / "theirs", Path(temporary) / "ours"
        for place, taken in ((theirs, [rows[i] for i in order]), (ours, rows)):
            write_case(place, taken, options.steps)
            make_model(place)
        # Without FORCE_TORCHRUN LLaMA-Factory starts one process on one device.
        run(
            [options.llamafactory, "train", "qwen3_lora_sft.yaml", "disable_shuffling=true"],
            theirs,
            DISABLE_VERSION_CHECK="1",
        )
        run([sys.executable, "-m", "unisono", "train", "qwen3_lora_sft.yaml"], ours)
        saves = Path("saves") / "qwen3-4b" / "lora" / "sft"
        figures: dict[str, Any] = {
            "llamafactory": read_losses(theirs / saves / "trainer_log.jsonl"),
            "unisono": read_losses(ours / saves / "metrics.jsonl"),
        }
    pairs = list(zip(figures["llamafactory"], figures["unisono"], strict=True))
    figures["largest relative difference"] = max(abs(a - b) / a for a, b in pairs)
    figures |= {
        "command": " ".join(["python", "bench/llamafactory.py", *sys.argv[1:2], "PATH"]),
        "machine": platform.platform(),
    }
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    if len(pairs) < options.steps or figures["largest relative difference"] > TOLERANCE:
        sys.exit(f"different: more than {TOLERANCE}")


if __name__ == "__main__":
    main()

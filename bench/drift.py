"""What does it cost that replicas tell a digest of their weights every hundred steps?

    python bench/drift.py                writes bench/results/drift.json
    python bench/drift.py --out -        printed

A digest is made of the float32 tensors that a run trains; nothing is sent but its 32 characters.
Cases:

    tiny lora    LoRA of rank 16 on all linear layers of a model as large as builtin:tiny
    135M full    all weights of a model of 135 million parameters, as SmolLM2-135M has them

`update_s` is one AdamW update of the same tensors on the same device: a step takes longer than
that, so `share_of_update` (the digest's cost a step, at one in a hundred, over it) is above the
share of a step.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from unisono.trainer.model.directory import locate_model
from unisono.trainer.training.training_checks import arithmetic, weights_digest

EVERY = 100
RANK = 16
REPEATS = 30


def tiny_lora() -> list[tuple[int, ...]]:
    """Shapes of both factors of each linear layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(locate_model("builtin:tiny")))
    linear = [
        m
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and not name.endswith("lm_head")
    ]
    return [shape for layer in linear for shape in ((RANK, layer.in_features), (layer.out_features, RANK))]


def full_135m() -> list[tuple[int, ...]]:
    """Shapes of all weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [tuple(p.shape) for p in model.parameters()]


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds, the median; the device is waited for."""
    found = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def measure(shapes: list[tuple[int, ...]], device: torch.device, repeats: int) -> dict[str, Any]:
    """The figures of one case."""
    weights = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights)
    digest_s = timed(lambda: weights_digest(weights), device, repeats)
    update_s = timed(optimizer.step, device, repeats)
    return {
        "tensors": len(weights), "parameters": sum(w.numel() for w in weights), "digest_s": digest_s, "per_step_us": digest_s / EVERY * 1e6,
        "update_s": update_s, "share_of_update": digest_s / EVERY / update_s,
    }  # fmt: skip


def main() -> None:
    """Measures on every device that is here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "drift.json"))
    out = parser.parse_args().out
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    cases = {"tiny lora": (tiny_lora(), REPEATS), "135M full": (full_135m(), REPEATS // 3)}
    found = {
        arithmetic(device): {name: measure(shapes, device, repeats) for name, (shapes, repeats) in cases.items()} for device in devices
    }  # fmt: skip
    text = json.dumps({"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads(), "every": EVERY, "devices": found}, indent=2)  # fmt: skip
    if out == "-":
        print(text)
    else:
        Path(out).write_text(text + "\n")


if __name__ == "__main__":
    main()

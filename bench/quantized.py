"""LoRA on base weights quantized by bitsandbytes or in files of GPTQ against LoRA on bfloat16 ones,
and against peft with bitsandbytes by hand: memory, losses, CPU time.

    OMP_NUM_THREADS=1 python -m bench.quantized [--model m135] [--repetitions 1]

Random weights in the shape of a model of 135 M parameters, rank 16 on all linear layers, bfloat16
computation. Each arm is a process of its own, and all take turns. The peak is that of the process's
resident memory during the steps, above what it was before the model was loaded; time is CPU time of
a step, the median over the steps after the first. Results go to bench/results/quantized.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from bench.workload import MODELS

STEPS = 6
EMBEDDINGS = " and embeddings"
ARMS = {
    "bf16": (None, False),
    "nf4": ("nf4", False),
    "nf4 and embeddings": ("nf4", False),
    "int8": ("int8", False),
    "int8 and embeddings": ("int8", False),
    "gptq": (None, False),  # 4 bits, groups of 64 inputs, in the files
    "gptq, any order": (None, False),  # `desc_act`
    "nf4 by hand": ("nf4", True),
    "int8 by hand": ("int8", True),
}
BATCHES = {  # rows × tokens, gradient checkpointing
    "1 x 256": (1, 256, False),
    "4 x 256": (4, 256, False),
    "4 x 256, checkpointing": (4, 256, True),
}


def make_models(shape: str, folder: Path) -> None:
    """Writes a random model in bfloat16, and in files of GPTQ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.grouped_files import write_grouped

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODELS[shape], max_position_embeddings=2048)).to(
        torch.bfloat16
    ).save_pretrained(folder / "dense")
    for name in ARMS:
        if name.startswith("gptq"):
            write_grouped(folder / "dense", folder / name, layout="gptq", group=64, shuffled="order" in name)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def arm(
    model: Path, kind: str | None, batch: str, *, by_hand: bool, embeddings: bool = False
) -> dict[str, Any]:
    """Loads, trains a few steps on the same tokens, and measures."""
    rows, tokens, checkpointing = BATCHES[batch]
    import bitsandbytes
    import peft
    import transformers

    before = resident("VmRSS")
    make = build_by_hand if by_hand else partial(build, embeddings=embeddings)
    loss_of, trained, facts = make(model, kind, rows, tokens, checkpointing=checkpointing)
    loaded_bytes = resident("VmHWM") - before
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(trained):
            if "lora_A" in name:
                trained[name].copy_(torch.randn(trained[name].shape, generator=generator) * 0.03)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.0)
    ids = torch.randint(0, 8000, (STEPS, rows, tokens), generator=generator)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again here
    losses, seconds = [], []
    for step in range(STEPS):
        began = time.process_time()
        loss = loss_of(ids[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
        losses.append(loss.item())
    peak = resident("VmHWM") - before
    versions = {module.__name__: module.__version__ for module in (torch, bitsandbytes, peft, transformers)}
    return {
        "losses": losses,
        "peak_bytes": peak,
        "loading_peak_bytes": loaded_bytes,
        "cpu_seconds": statistics.median(seconds[1:]),
        "versions": versions,
        **facts,
    }


Built = tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, torch.nn.Parameter], dict[str, Any]]


def build(
    model: Path,
    kind: str | None,
    rows: int,
    tokens: int,
    *,
    checkpointing: bool,
    embeddings: bool = False,
) -> Built:
    """The model as unisono trains it."""
    from unisono.trainer.config import RunConfig
    from unisono.trainer.model.directory import locate_model
    from unisono.trainer.model.forward import Rows, choose_forward
    from unisono.trainer.model.load import load_for_training
    from unisono.trainer.model.quantization import quantized_layers, scales_of, weight_bytes

    config = RunConfig.model_validate(
        {"model": {"path": str(model), "quantize": kind, "quantize_embeddings": embeddings}, "adapter": {"rank": 16}, "data": {"train": "-"}, "output_dir": "-"}
    )  # fmt: skip
    loaded = load_for_training(
        config, directory=model, tokenizer_directory=locate_model("builtin:tiny"), dtype="bfloat16", device=torch.device("cpu")
    )  # fmt: skip
    adapters = sum(p.numel() * 4 for p in loaded.trainable.values())
    total = weight_bytes(loaded.model) - adapters  # before weights are joined with room for adapters
    forward = choose_forward(
        loaded, dtype="bfloat16", quick_adapter=True, gradient_checkpointing=checkpointing
    )
    assert forward.quick
    assert forward.layout == "flat"
    loaded.model.train()

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        positions = torch.arange(tokens).repeat(rows)
        index = torch.arange(rows * tokens).view(rows, tokens)[:, :-1].reshape(-1)
        labels = ids[:, 1:].reshape(-1)
        return forward.loss(
            Rows(flat, positions, [tokens] * rows, index, labels, loss_counts=[tokens - 1] * rows),
            count=len(labels),
        )

    packed = [layer.weight for _, layer in quantized_layers(loaded.model)]
    kept = {id(p): p for p in loaded.base.parameters() if not p.requires_grad}
    linear = [p for p in kept.values() if p.ndim == 2 and p.shape[0] != MODELS["m135"]["vocab_size"]]
    scales = [t for name, t in scales_of(loaded.model).items() if "embed" not in name and "head" not in name]
    linear_bytes = sum(t.numel() * t.element_size() for t in [*(packed or linear), *scales])
    return loss_of, loaded.trainable, {"weight_bytes": total, "linear_bytes": linear_bytes}


def build_by_hand(model: Path, kind: str | None, rows: int, tokens: int, *, checkpointing: bool) -> Built:
    """The model as peft's documentation prepares it for QLoRA, with the layers of bitsandbytes."""
    del rows, tokens
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    settings = BitsAndBytesConfig(load_in_8bit=True) if kind == "int8" else four
    base = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    base.config.use_cache = False
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora).train()

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        logits = adapted(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))

    return loss_of, {name: p for name, p in adapted.named_parameters() if p.requires_grad}, {}


def in_a_process(model: Path, name: str, batch: str) -> dict[str, Any]:
    """One arm in a process of its own."""
    command = [sys.executable, "-m", "bench.quantized", "--arm", name, "--batch", batch, "--directory", str(model)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Medians over the repetitions, and ratios to bf16 of the same batch."""
    table: dict[str, Any] = {}
    for batch, arms in runs.items():
        first = {name: found[0] for name, found in arms.items()}
        medians = {
            name: {key: statistics.median(run[key] for run in found) for key in ("peak_bytes", "cpu_seconds")}
            for name, found in arms.items()
        }
        plain = medians["bf16"]
        table[batch] = {}
        for name, found in medians.items():
            row = {**found, "losses": first[name]["losses"]}
            row |= {
                "peak_to_bf16": found["peak_bytes"] / plain["peak_bytes"],
                "time_to_bf16": found["cpu_seconds"] / plain["cpu_seconds"],
            }
            if "weight_bytes" in first[name]:
                for key in ("weight_bytes", "linear_bytes"):
                    row[key] = first[name][key]
                    row[f"{key}_to_bf16"] = first[name][key] / first["bf16"][key]
            hand_name = f"{name.removesuffix(EMBEDDINGS)} by hand"
            hand = first.get(hand_name)
            if hand is not None:
                pairs = zip(first[name]["losses"][:5], hand["losses"][:5], strict=True)
                row["largest_relative_difference_to_by_hand"] = max(abs(a / b - 1) for a, b in pairs)
                row["time_to_by_hand"] = found["cpu_seconds"] / medians[hand_name]["cpu_seconds"]
            table[batch][name] = row
    return table


def main() -> None:
    """Measures all arms in turn, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m135", choices=sorted(MODELS))
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--arm")
    parser.add_argument("--batch")
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.arm:
        kind, by_hand = ARMS[given.arm]
        embeddings = given.arm.endswith(EMBEDDINGS)
        model = given.directory / (given.arm if given.arm.startswith("gptq") else "dense")
        print(json.dumps(arm(model, kind, given.batch, by_hand=by_hand, embeddings=embeddings)))
        return
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        batch: {name: [] for name in ARMS} for batch in BATCHES
    }
    with tempfile.TemporaryDirectory() as folder:
        make_models(given.model, Path(folder))
        for _ in range(given.repetitions):
            for batch, arms in runs.items():
                for name, found in arms.items():
                    found.append(in_a_process(Path(folder), name, batch))
                    print(batch, name, found[-1], flush=True)
    result = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "versions": runs["1 x 256"]["nf4"][0]["versions"],
        "batches": summary(runs),
    }
    path = Path(__file__).parent / "results" / "quantized.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["batches"], indent=1))


if __name__ == "__main__":
    main()

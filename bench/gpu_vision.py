"""LoRA on rows with pictures by unisono and TRL on one CUDA device: Qwen2.5-VL 3B's shape with
random weights, in bfloat16.

    python bench/gpu_vision.py [--limit 450] [--tiny] [--out FILE]

Each arm is a process of its own, with the Python that runs this script; it needs trl, peft,
datasets and the extra `vision`. Results are written after each arm, so what was measured stays if
the time ends (--limit seconds in all).

- Rows: those of bench/vision.py; a picture of 448 × 320 pixels is about 180 tokens, of 32 tiles
  of 14 × 14 pixels a side.
- trl-default: SFTTrainer's defaults. trl-tuned: bfloat16 weights, no gradient checkpointing.
- unisono: the config of a user. The vision part is not trained: its features are computed in the
  first epoch and kept. Both epochs are given.
- Tokens and pictures per second: of the steps after the first ones of an epoch / wall time.
- --tiny: two layers of each part on the CPU, to try the script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = Path(__file__).parent / "results" / "gpu_vision.json"
BATCH, EPOCHS, WARMUP = 8, 2, 3
ARMS = ("unisono", "trl-tuned", "trl-default")
ARM_LIMIT_S = 200
LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "tiny": {
        "text_config": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    },
}  # fmt: skip


def make_model(directory: Path, shape: dict[str, Any], device: str) -> None:
    """Writes a random bfloat16 model, drawn on the device, with a processor of pictures."""
    import torch
    import transformers

    from tests.vision_models import chatml, tokenizer

    own = tokenizer()
    names = {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
    }
    ids = {name: own.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    config = transformers.Qwen2_5_VLConfig(**shape, **ids, tie_word_embeddings=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = own.eos_token_id
    model.generation_config.pad_token_id = own.pad_token_id
    model.save_pretrained(directory)
    transformers.Qwen2VLImageProcessorPil(patch_size=14).save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "Qwen2_5_VLProcessor"}))
    own.chat_template = chatml("<|vision_start|><|image_pad|><|vision_end|>")
    own.save_pretrained(directory)


# ---- arms, each in a process of its own


def trl_arm(name: str, model: Path, rows: Path, out: Path, device: str) -> dict[str, Any]:
    """TRL's trainer over all rows once; gives the end and the tokens of each step."""
    import torch
    from datasets import Dataset, Image, List
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from bench.vision import trl_row
    from tests.vision_models import processor_of

    steps: list[tuple[float, int]] = []
    seen: list[Any] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((time.time(), sum(int(count) for count in seen)))  # it waits for the device
            seen.clear()

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *args, **kwargs)

    tuned = {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}
    config = SFTConfig(
        output_dir=str(out), num_train_epochs=1, per_device_train_batch_size=BATCH, bf16=True, use_cpu=device == "cpu",
        report_to="none", save_strategy="no", max_length=None, learning_rate=2e-4, disable_tqdm=True,
        **(tuned if name == "trl-tuned" else {}),
    )  # fmt: skip
    data = Dataset.from_list([trl_row(line, rows.parent) for line in rows.read_text().splitlines()])
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=LAYERS)
    Counting(
        model=str(model), args=config, train_dataset=data.cast_column("images", List(Image())),
        processing_class=processor_of(model), callbacks=[Clock()], peft_config=adapter,
    ).train()  # fmt: skip
    return {"steps": steps, "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0}


def unisono_arm(model: Path, rows: Path, out: Path, device: str) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl."""
    config, run = out / "bench.yaml", out / "run"
    config.write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\nadapter: {{rank: 16, alpha: 32}}\n"
        f"data: {{train: {rows}, max_length: 1024, packing: false}}\noptim: {{lr: 2.0e-4}}\n"
        f"duration: {EPOCHS} epochs\nbatch: {{global: {BATCH}, micro: {BATCH}}}\ndevice: {device}\n"
        f"checkpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    at, before, steps, peak = 0.0, 0, [], 0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "step_time_s" not in entry:
            continue
        at, peak = at + entry["step_time_s"], max(peak, entry["memory_bytes"])
        steps.append((at, entry["tokens"] - before))
        before = entry["tokens"]
    return {"steps": steps, "peak_bytes": peak}


# ---- the comparison


def figures(outcome: dict[str, Any], rows: int) -> dict[str, Any]:
    """Tokens and pictures per second of each epoch, after the first steps."""
    steps, length = outcome["steps"], rows // BATCH
    found: dict[str, Any] = {"peak_bytes": outcome["peak_bytes"]}
    for epoch in range(len(steps) // length):
        of_epoch = steps[epoch * length : (epoch + 1) * length]
        wall = of_epoch[-1][0] - of_epoch[WARMUP - 1][0]
        found[f"epoch {epoch + 1}"] = {
            "tokens_per_s": sum(tokens for _, tokens in of_epoch[WARMUP:]) / wall,
            "pictures_per_s": len(of_epoch[WARMUP:]) * BATCH / wall,
        }
    return found


def run_arm(name: str, work: Path, device: str, limit_s: float) -> dict[str, Any]:
    """One arm in a process of its own; its figures, or `error`."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", PYTHONPATH=path)
    with tempfile.TemporaryDirectory(dir=work) as out:
        words = [
            sys.executable,
            __file__,
            "--arm",
            name,
            "--work",
            str(work),
            "--arm-out",
            out,
            "--device",
            device,
        ]
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return {"error": f"ended after {limit_s:.0f} s"}
        if done.returncode:
            return {"error": done.stderr[-1500:]}
        outcome = json.loads((Path(out) / "outcome.json").read_text())
    return figures(outcome, len((work / "rows.jsonl").read_text().splitlines()))


def compare(args: argparse.Namespace, work: Path) -> None:
    """All arms, one after the other."""
    from bench.gpu_peers import machine
    from bench.vision import make_rows

    began, size, device = time.time(), "tiny" if args.tiny else "3b", "cpu" if args.tiny else "cuda"
    make_rows(work, rows=4 * BATCH if args.tiny else 20 * BATCH)
    words = [sys.executable, __file__, "--make", size, "--work", str(work), "--device", device]
    subprocess.run(words, check=True)
    found: dict[str, Any] = {}
    for name in ARMS:
        left = args.limit - (time.time() - began)
        found[name] = (
            run_arm(name, work, device, min(left, ARM_LIMIT_S)) if left > 20 else {"error": "no time left"}
        )
        print(name, json.dumps(found[name]), flush=True)
        result = {"schema": 1, "size": size, "batch": BATCH, "machine": machine(device), "arms": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=450, help="seconds in all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    for hidden in ("--arm", "--make", "--device"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--work", "--arm-out"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_model(args.work / "model", SHAPES[args.make], args.device)
    elif args.arm:
        files = (args.work / "model", args.work / "rows.jsonl", args.arm_out, args.device)
        outcome = unisono_arm(*files) if args.arm == "unisono" else trl_arm(args.arm, *files)
        (args.arm_out / "outcome.json").write_text(json.dumps(outcome))
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(args, Path(folder))


if __name__ == "__main__":
    main()

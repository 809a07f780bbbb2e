"""Tokens and pictures per CPU second of LoRA on rows with pictures, against TRL's SFTTrainer.

    python bench/vision.py [--repetitions 2] [--out FILE]

All arms train the same LLaVA with random weights on the same rows, each with one picture: a tower
of eight layers of width 256, 256 patches of a picture of 224 × 224 pixels, a projector, and a
decoder of eight layers of width 256. LoRA of rank 8 on the decoder's linear layers, the loss on
answers, eight rows in a step, AdamW, bfloat16, one thread. Each arm is a process of its own, in
turn, with the Python that runs this script, which needs trl 1.16.

- trl-default: SFTConfig's defaults, i.e. float32 weights in autocast and gradient checkpointing.
- trl-tuned: bfloat16 weights and no gradient checkpointing.
- unisono: the config of a user. Tower and projector are not trained, so that features are computed
  in the first epoch and kept; both epochs are given. With `--full` all parts are trained in full by
  trl-tuned-full and unisono-full, where nothing is kept.

A token is one of the row with those that stand for its picture. CPU seconds are those of the
process that trains, in the steps after the first ones of an epoch; `whole_cpu_s` is everything:
imports, the preparation of rows, results.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "vision.json"
SIDE, PATCH = 224, 14
ROWS, BATCH, EPOCHS, WARMUP = 96, 8, 2, 3
STEPS = ROWS // BATCH
LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
ARMS = ("trl-default", "trl-tuned", "unisono")
FULL_ARMS = ("trl-tuned-full", "unisono-full")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
)
_WORDS = [
    "a",
    "red",
    "green",
    "blue",
    "picture",
    "of",
    "the",
    "shape",
    "with",
    "corners",
    "and",
    "light",
    "near",
    "its",
    "middle",
    "where",
    "two",
    "lines",
    "meet",
]


def make_rows(folder: Path, rows: int = ROWS) -> Path:
    """Pictures of noise with a rectangle, larger than the tower's, and a text about each."""
    import numpy as np
    from PIL import Image

    draw, noise = random.Random(0), np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number in range(rows):
        coarse = Image.fromarray(noise.integers(0, 255, (40, 56, 3), dtype=np.uint8))
        picture = coarse.resize((448, 320))
        picture.paste(tuple(draw.choices(range(256), k=3)), (100, 80, 300, 240))
        name = f"pictures/{number:03d}.jpg"
        picture.save(folder / name, quality=90)
        answer = " ".join(draw.choices(_WORDS, k=draw.randint(20, 60)))
        messages = [
            {"role": "user", "content": "<image>What is in the picture?"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages, "images": [name]}) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines))
    return file


def make_model(directory: Path) -> None:
    """The LLaVA, with the tokenizer of the built-in model."""
    import torch
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    from unisono.trainer.model.directory import locate_model

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(locate_model("builtin:tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            intermediate_size=1024, image_size=SIDE, patch_size=PATCH, projection_dim=256, **size
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), intermediate_size=704, num_key_value_heads=4, max_position_embeddings=1024, **size
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def trl_row(line: str, folder: Path) -> dict[str, Any]:
    """A row in TRL's columns."""
    row = json.loads(line)
    question, answer = (turn["content"] for turn in row["messages"])
    parts = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>")}]
    return {
        "prompt": [{"role": "user", "content": parts}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
        "images": [str(folder / image) for image in row["images"]],
    }


# ---- arms, each in a process of its own


def trl_arm(name: str, model: Path, rows: Path, out: Path) -> dict[str, Any]:
    """TRL's trainer over all rows once; gives CPU time and tokens of each step."""
    import torch
    from datasets import Dataset, Image, List
    from peft import LoraConfig
    from transformers import AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    steps: list[tuple[float, int]] = []
    seen = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((time.process_time(), seen[0]))
            seen[0] = 0

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen[0] += int(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *args, **kwargs)

    data = Dataset.from_list([trl_row(line, rows.parent) for line in rows.read_text().splitlines()])
    full = name.endswith("-full")
    settings: dict[str, Any] = {}
    if name.startswith("trl-tuned"):
        settings = {"gradient_checkpointing": False}
        settings |= {} if full else {"model_init_kwargs": {"dtype": "bfloat16"}}
    config = SFTConfig(
        output_dir=str(out), num_train_epochs=1, per_device_train_batch_size=BATCH, bf16=True, use_cpu=True, report_to="none",
        save_strategy="no", max_length=None, lr_scheduler_type="constant", learning_rate=2e-5, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Counting(
        model=str(model), args=config, train_dataset=data.cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(model), callbacks=[Clock()],
        peft_config=None if full else LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=LAYERS),
    )  # fmt: skip
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": steps, "trained": trained, "loss": losses[-1] if losses else None}


def unisono_arm(name: str, model: Path, rows: Path, out: Path) -> dict[str, Any]:
    """`unisono train` as a user runs it; the figures are those of its metrics.jsonl."""
    config, run = out / "bench.yaml", out / "run"
    full = "adapter: null\ntrain_parts: [language, projector, vision]\n"
    config.write_text(
        f"model: {{path: {model}, dtype: bfloat16}}\n"
        f"{full if name.endswith('-full') else 'adapter: {rank: 8, alpha: 16}'}\n"
        f"data: {{train: {rows}, max_length: 512, packing: false}}\noptim: {{lr: 2.0e-5, schedule: constant}}\n"
        f"duration: {EPOCHS} epochs\nbatch: {{global: {BATCH}, micro: {BATCH}}}\ndevice: cpu\n"
        f"checkpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    command = [sys.executable, "-m", "unisono", "train", str(config), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    cpu, before, steps, losses = 0.0, 0, [], []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "step_time_s" not in entry:
            continue
        cpu += entry["cpu_time_s"]
        steps.append((cpu, entry["tokens"] - before))
        before = entry["tokens"]
        losses.append(entry["loss"])
    return {"steps": steps, "loss": losses[STEPS - 1]}


# ---- the comparison


def figures(outcome: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens and pictures per CPU second of each epoch, after the first steps."""
    found = {}
    steps = outcome["steps"]
    for epoch in range(len(steps) // STEPS):
        of_epoch = steps[epoch * STEPS : (epoch + 1) * STEPS]
        cpu = of_epoch[-1][0] - of_epoch[WARMUP - 1][0]
        measured = of_epoch[WARMUP:]
        found[f"epoch {epoch + 1}"] = {
            "tokens_per_cpu_s": sum(tokens for _, tokens in measured) / cpu,
            "pictures_per_cpu_s": len(measured) * BATCH / cpu,
        }
    return found


def run_arm(name: str, model: Path, rows: Path) -> dict[str, Any]:
    """One arm in a process of its own."""
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1"
    )
    with tempfile.TemporaryDirectory() as out:
        words = ["--arm", name, "--model-dir", str(model), "--rows", str(rows), "--work", out]
        load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, __file__, *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        outcome = json.loads((Path(out) / "outcome.json").read_text())
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    kept = {key: outcome[key] for key in ("loss", "trained") if key in outcome}
    return {**figures(outcome), **kept, "whole_cpu_s": round(whole, 1), "load": round(load, 2)}


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Pictures per CPU second of our epochs over those of each of TRL's arms: medians."""

    def median(arm: str, epoch: str) -> float:
        return statistics.median(one[epoch]["pictures_per_cpu_s"] for one in found[arm])

    result: dict[str, dict[str, float]] = {}
    for arm in found:
        peers = [
            peer
            for peer in found
            if peer.startswith("trl") and peer.endswith("-full") == arm.endswith("-full")
        ]
        if arm.startswith("unisono"):
            result[arm] = {
                f"{epoch} / {peer}": round(median(arm, epoch) / median(peer, "epoch 1"), 2)
                for peer in peers
                for epoch in ("epoch 1", "epoch 2")
            }
    return result


def compare(args: argparse.Namespace, work: Path) -> None:
    """The arms in turn."""
    from peers import machine  # type: ignore[import-not-found]  # beside this script

    rows = make_rows(work)
    make_model(work / "model")
    arms = FULL_ARMS if args.full else ARMS
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    earlier = json.loads(args.out.read_text()) if args.out.exists() else {"arms": {}, "ratios": {}}
    for repetition in range(args.repetitions):
        for arm in arms:
            found[arm].append(run_arm(arm, work / "model", rows))
            print(f"{repetition + 1}, {arm}: {json.dumps(found[arm][-1])}", flush=True)
        result = {
            "schema": 1, "rows": ROWS, "batch": BATCH, "steps_of_an_epoch": STEPS, "warm_up": WARMUP, "threads": 1,
            "machine": machine(), "arms": {**earlier["arms"], **found}, "ratios": {**earlier["ratios"], **ratios(found)},
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(ratios(found), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="train all parts in full instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    for hidden in ("--arm", "--rows", "--model-dir", "--work"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        arm = str(args.arm)
        run = trl_arm if arm.startswith("trl") else unisono_arm
        outcome = run(arm, args.model_dir, args.rows, args.work)
        (args.work / "outcome.json").write_text(json.dumps(outcome))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


if __name__ == "__main__":
    main()

"""Losses of axolotl and TRL themselves and of unisono, from one file or command, on the same rows.

    python bench/other_trainers.py [--axolotl PATH] [--trl PATH] [--examples PATH]

PATHs are `axolotl` of an environment with axolotl==0.19.0 and torch for the CPU, `trl` of one with
trl==1.16, and axolotl's directory `examples`. The files are examples of axolotl with a tiny model in
float32 and rows of this script, the commands are those of TRL's trainers. All rows are one batch, so
that their order does not matter. Results go to bench/results/other_trainers.json.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

RESULT = Path(__file__).absolute().parent / "results" / "other_trainers.json"
STEPS, ROWS, TOLERANCE = 5, 16, 1e-5
NUMBERS = range(ROWS)
DATA: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": f"Add {i} and 2", "input": "numbers" if i % 2 else "", "output": str(i + 2)} for i in NUMBERS],
    "messages": [{"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i} it is"}]} for i in NUMBERS],
    "text": [{"text": f"The number {i} is followed by {i + 1}. " * 2} for i in NUMBERS],
    "chosen": [{"messages": [{"role": "user", "content": f"Say {i}"}], "chosen": {"role": "assistant", "content": str(i)}, "rejected": {"role": "assistant", "content": str(i + 7)}} for i in NUMBERS],
    "pairs": [{"prompt": f"Say {i}", "chosen": str(i), "rejected": str(i + 7)} for i in NUMBERS],
    "answers": [{"prompt": f"Say {i}: ", "completion": f"{i} it is"} for i in NUMBERS],
    "texts": [{"chosen": f"What follows {i}? It is {i + 1}.", "rejected": f"What follows {i}? It is not {i + 7}."} for i in NUMBERS],
    "ratings": [{"prompt": f"Say {i}", "completion": str(i + i % 2), "label": i % 2 == 0} for i in NUMBERS],
}  # fmt: skip
AXOLOTL: dict[str, tuple[str, dict[str, Any]]] = {
    "alpaca": ("llama-3/fft-8b.yaml", {"path": "alpaca/rows.jsonl", "type": "alpaca"}),
    "chat_template": ("llama-3/fft-8b.yaml", {"path": "messages/rows.jsonl", "type": "chat_template"}),
    "completion": ("llama-3/fft-8b.yaml", {"path": "text/rows.jsonl", "type": "completion"}),
    "dpo": ("qwen2/dpo.yaml", {"path": "chosen/rows.jsonl", "type": "chat_template.default", "field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}),
}  # fmt: skip
"""An example, and the rows in place of its own."""
CHANGED: dict[str, Any] = {
    "base_model": "./tiny", "optimizer": "adamw_torch", "micro_batch_size": ROWS, "gradient_accumulation_steps": 1, "max_steps": STEPS, "num_epochs": STEPS,
    "learning_rate": 1e-3, "lr_scheduler": "constant", "warmup_ratio": 0, "sequence_len": 256, "sample_packing": False, "val_set_size": 0, "bf16": False,
    "attn_implementation": "sdpa", "gradient_checkpointing": False, "logging_steps": 1, "saves_per_epoch": 1,
}  # fmt: skip
REMOVED = ("special_tokens", "gradient_checkpointing_kwargs", "evals_per_epoch", "dataset_prepared_path")
TRL = {
    "sft": ("messages", "data.loss_on=all"), "sft of answers": ("answers", ""), "dpo": ("pairs", ""), "dpo of texts": ("texts", ""),
    "kto": ("ratings", ""), "reward": ("pairs", ""), "reward of texts": ("texts", ""),
}  # fmt: skip
"""A trainer with its rows; what its line about a difference says to set."""
MARGINS = {"dpo": "rewards/margins", "reward": "margin"}
"""TRL's names of the mean reward of chosen answers less that of rejected ones."""
ARGUMENTS = (
    f"--max_steps {STEPS} --per_device_train_batch_size {ROWS} --lr_scheduler_type constant --warmup_steps 0 --max_length 256 --adam_epsilon 1e-4"
    " --bf16 False --gradient_checkpointing False --logging_steps 1 --report_to none --save_steps 1"
)
QUIET = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}


def make_model() -> None:
    """The built-in model in float32, in ./tiny; with a head for reward models in ./tiny-reward."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from unisono.trainer.model.directory import locate_model

    source = locate_model("builtin:tiny")
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)  # of the new head
    heads = {
        "tiny": (AutoModelForCausalLM, {}),
        "tiny-reward": (AutoModelForSequenceClassification, {"num_labels": 1}),
    }
    for name, (kind, settings) in heads.items():
        model = kind.from_pretrained(source, dtype="float32", **settings)
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)


def run(command: list[str]) -> None:
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {(done.stderr + done.stdout)[-2000:]}"


def train(file: str, out: str, *overrides: str, key: str = "loss") -> list[float]:
    """A metric of unisono's steps."""
    words = [file, f"output_dir={out}", "--no-first-checkpoint", "--quiet", *overrides]
    if not Path(out).exists():
        run([sys.executable, "-m", "unisono", "train", *filter(None, words)])
    return [json.loads(line)[key] for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def theirs(folder: str, key: str = "loss") -> list[float]:
    """What Hugging Face's Trainer kept."""
    state = max(Path(folder).glob("checkpoint-*/trainer_state.json"), key=lambda file: int(file.parent.name[11:]))  # fmt: skip
    return [entry[key] for entry in json.loads(state.read_text())["log_history"] if key in entry]


def main() -> int:
    """Compares, prints a line for each, and keeps the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("axolotl", "trl", "examples"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept["command"] = "python bench/other_trainers.py --axolotl PATH --trl PATH --examples PATH"
    programs = {name: getattr(arguments, name).absolute() for name in ("axolotl", "trl", "examples") if getattr(arguments, name)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_model()
        for name, rows in DATA.items():
            Path(name).mkdir()
            Path(name, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, (example, rows_of) in AXOLOTL.items() if "axolotl" in programs else ():
            settings = yaml.safe_load((programs["examples"] / example).read_text()) | CHANGED
            settings |= {"datasets": [rows_of | {"ds_type": "json"}], "output_dir": f"./axolotl-{name}"}
            settings |= {"chat_template": "tokenizer_default"} if "chat_template" in settings else {}
            file = Path(f"{name}.yml")
            file.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None and k not in REMOVED}))  # fmt: skip
            run([str(programs["axolotl"]), "train", str(file), "--launcher", "python"])
            compare(kept, f"axolotl {name}", theirs(f"axolotl-{name}"), train(str(file), f"ours-{name}"))
        for name, (rows_name, override) in TRL.items() if "trl" in programs else ():
            trainer, out = name.split()[0], f"trl-{name.replace(' ', '-')}"
            model, rate = ("tiny-reward", 1e-4) if trainer == "reward" else ("tiny", 1e-3)
            command = f"trl {trainer} --model_name_or_path ./{model} --dataset_name ./{rows_name} --output_dir ./{out} --learning_rate {rate} {ARGUMENTS}"
            run([str(programs["trl"]), *shlex.split(command)[1:]])
            run([sys.executable, "-m", "unisono", "init", "--from-trl", command, "--out", f"{out}.yaml"])
            compare(kept, f"trl {name}", theirs(out), train(f"{out}.yaml", f"ours-{out}", override))
            if trainer in MARGINS:
                margins = train(f"{out}.yaml", f"ours-{out}", key="reward_margin")
                compare(kept, f"trl {name}, margins", theirs(out, MARGINS[trainer]), margins)
        os.chdir(RESULT.parent)
    return 0


def compare(kept: dict[str, Any], name: str, wanted: list[float], found: list[float]) -> None:
    largest = max(map(abs, wanted))
    pairs = zip(wanted, found, strict=True)
    difference = max(abs(a - b) / (largest if "margins" in name else abs(a)) for a, b in pairs)
    kept[name] = {"theirs": wanted, "unisono": found, "largest relative difference": difference}
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{name}: {difference:.1e}{'' if difference < TOLERANCE else ' differs'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

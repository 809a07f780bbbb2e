"""Makes the built-in model `builtin:tiny` with unisono itself: text from a seed, a tokenizer,
random weights, pretraining.

    python scripts/make_tiny.py                # about fifteen minutes on one core

What it needs on the way is kept in runs/tiny; the model replaces src/unisono/builtin/tiny.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pretraining_text import rows

WORK = Path("runs/tiny")
BUILTIN = Path("src/unisono/builtin/tiny")
ROWS, EVAL_ROWS, TOKENIZER_ROWS = 110_000, 500, 40_000
BOS, EOS, PAD = "<s>", "</s>", "<pad>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""What is asked ends with a line break, what is answered with the end token. So it was in
pretraining: nothing is new.
"""

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

RUN: dict[str, Any] = {
    "model": {"path": str(WORK / "start"), "weights": "random"},
    "adapter": None,
    "objective": "pretrain",
    "data": {
        "train": str(WORK / "train.jsonl"),
        "eval": str(WORK / "eval.jsonl"),
        "max_length": 256,
        "too_long": "cut",
    },
    "optim": {
        "kind": "muon",
        "muon_lr": 0.02,
        "lr": 3.0e-3,
        "betas": [0.9, 0.98],
        "weight_decay": 0.05,
        "schedule": "linear",
        "warmup": "60 steps",
    },
    "batch": {"global": 8},
    "duration": "1 epochs",
    "eval": {"every": "500 steps"},
    "checkpoint": {"every": "500 steps", "keep": 1},
    "seed": 0,
    "output_dir": str(WORK / "run"),
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; digits and punctuation stand alone, so that numbers and quotes can be copied
    piece by piece.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_start(directory: Path) -> None:
    """Writes a model directory without weights: config, tokenizer, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(islice(rows(0), TOKENIZER_ROWS)).save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": MODEL["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(directory / "config.json", MODEL)
    _write_json(
        directory / "generation_config.json",
        {key: MODEL[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False},
    )


def write_text(directory: Path) -> None:
    """Writes the rows to train on, and some of another seed to evaluate on."""
    for name, seed, count in (("train", 0, ROWS), ("eval", 1, EVAL_ROWS)):
        lines = (json.dumps({"text": row}) + "\n" for row in islice(rows(seed), count))
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def model_card(result: dict[str, Any]) -> str:
    """The README.md of the model."""
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# tiny

A Llama of 1.33 million parameters for demonstrations and tests. It knows some four hundred English words and can copy;
it knows nothing about the world.

**Made by** `python scripts/make_tiny.py`: unisono, `objective: pretrain`, from random weights, seed {RUN["seed"]}, one
epoch of {ROWS:,} rows, {result["tokens"]:,} tokens, {result["step"]:,} steps. Loss on rows that it had not seen:
{result["eval"]["loss"]:.3f} nats a token.

**Trained on** text that `scripts/pretraining_text.py` writes from a seed: words and invented words that are repeated,
lists, values found by their key, little stories with questions about them, number words, random characters. There is
no text of people in it, no JSON, and no phrase or row of the example task (`tests/examples/test_demo_data.py`).

**Shape**: hidden {MODEL["hidden_size"]}, {MODEL["num_hidden_layers"]} layers, {MODEL["num_attention_heads"]} heads,
MLP {MODEL["intermediate_size"]}, tied embeddings, context {MODEL["max_position_embeddings"]}; stored in bfloat16.
**Tokenizer**: byte-level BPE, {MODEL["vocab_size"]:,} tokens. **Chat template**: what is asked ends with a line break,
what is answered with `{EOS}`.
"""


def install() -> None:
    """Puts the run's weights and the files they were started from into the package."""
    result = json.loads((WORK / "run" / "result.json").read_text("utf-8"))
    shutil.rmtree(BUILTIN, ignore_errors=True)
    shutil.copytree(WORK / "start", BUILTIN)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(WORK / "run" / "model" / name, BUILTIN / name)
        (BUILTIN / name).chmod(0o644)
    (BUILTIN / "README.md").write_text(model_card(result), encoding="utf-8")
    size = sum(file.stat().st_size for file in BUILTIN.iterdir())
    print(f"{BUILTIN}: {size / 1e6:.1f} MB")


def main() -> None:
    """Writes text and tokenizer, trains, and puts the result into the package."""
    WORK.mkdir(parents=True, exist_ok=True)
    write_start(WORK / "start")
    write_text(WORK)
    (WORK / "run.yaml").write_text(yaml.safe_dump(RUN, sort_keys=False), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "unisono", "train", str(WORK / "run.yaml"), "--fresh"], check=True)
    install()


if __name__ == "__main__":
    main()

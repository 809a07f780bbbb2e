# ruff: noqa: ANN001, ANN201, C408, PLW1508
# mypy: ignore-errors
"""A tiny Llama under transformers' Trainer or TRL's SFTTrainer; MODE is what goes wrong."""

import os
import signal
import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MODE, TOOL = os.environ.get("MODE", ""), os.environ.get("TOOL", "trainer")
RANK, BAD = int(os.environ.get("RANK", 0)), int(os.environ.get("BAD_RANK", 1))
OUT, MODEL = os.environ["OUT"], os.environ.get("MODEL", "")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(tok):
    if MODEL:
        kwargs = (
            {"attn_implementation": "flash_attention_2", "dtype": torch.bfloat16} if MODE == "flash" else {}
        )
        return AutoModelForCausalLM.from_pretrained(MODEL, **kwargs)
    n = len(tok) - (4 if MODE == "vocab" else 0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=n,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )


class Watch(TrainerCallback):
    """Break off at a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4 and RANK == BAD:
            if MODE == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if MODE == "segv":
                import ctypes

                ctypes.string_at(0)
            if MODE == "exit":
                os._exit(0)


class Collator:
    """Batches of token ids; one of them may be a bad one."""

    def __init__(self, tok):
        self.tok, self.n = tok, 0

    def __call__(self, rows):
        self.n += 1
        if MODE == "collator" and RANK == BAD and self.n == 4:
            rows = [{**r, "labels": None} for r in rows]
        ids = torch.tensor([r["input_ids"] for r in rows])
        labels = torch.tensor([r["labels"] for r in rows])
        return {"input_ids": ids, "labels": labels}


def data(tok):
    texts = [" ".join("abcdefghijklmnopqrstuvwxyz"[(i + j) % 26] for j in range(12)) for i in range(64)]
    if TOOL == "trl":
        return Dataset.from_dict({"prompt_text" if MODE == "column" else "text": texts})
    rows = [tok(t)["input_ids"] for t in texts]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main():
    if MODE == "need":
        from transformers.utils.versions import require_version

        require_version(
            "transformers>=4.41.2,<=4.49.0", "To fix: run `pip install transformers>=4.41.2,<=4.49.0`."
        )
    if MODE == "import":
        import bitsandbytes  # noqa: F401
    tok = tokenizer()
    common = dict(
        output_dir=OUT,
        max_steps=int(os.environ.get("STEPS", 8)),
        per_device_train_batch_size=2,
        logging_steps=2,
        use_cpu=True,
        report_to=[],
        bf16=False,
        learning_rate=1e30 if MODE == "nan" else 1e-3,
        max_grad_norm=0 if MODE == "nan" else 1.0,
        save_steps=4,
        save_strategy="steps" if MODE in ("save", "resume") else "no",
        disable_tqdm=bool(os.environ.get("NO_BAR")),
        ddp_find_unused_parameters=False,
    )
    if TOOL == "trl":
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            model=model(tok),
            args=SFTConfig(**common, max_length=32),
            train_dataset=data(tok),
            processing_class=tok,
            callbacks=[Watch()],
        )
    else:
        trainer = Trainer(
            model=model(tok),
            args=TrainingArguments(**common, remove_unused_columns=False),
            train_dataset=data(tok),
            data_collator=Collator(tok),
            callbacks=[Watch()],
        )
    result = trainer.train(resume_from_checkpoint=os.environ.get("FROM") or None)
    trainer.log_metrics("train", result.metrics)
    if os.environ.get("WRITE"):
        trainer.save_model(os.environ["WRITE"])


if __name__ == "__main__":
    main()
    sys.exit(0)

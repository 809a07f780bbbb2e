"""Trains a vision-language model with TRL's DPOTrainer, as a process of its own: `python -m
tests.trainer.vision.trl_pairs SPEC`.

SPEC is a JSON object of {model, rows, steps, batch, beta, losses}; the file `losses` gets a list.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import front_server
from unisono.guard.supervise.child_process import child_environment


def train_in_trl(
    model: Path, rows: list[dict[str, Any]], folder: Path, *, steps: int, batch: int, beta: float
) -> list[float]:
    """The losses of rows in their order; the decoder is trained in full."""
    spec, losses = folder / "spec.json", folder / "losses.json"
    body = {
        "model": str(model),
        "rows": rows,
        "steps": steps,
        "batch": batch,
        "beta": beta,
        "losses": str(losses),
    }
    spec.write_text(json.dumps(body))
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.vision.trl_pairs", str(spec)],
        env=child_environment(threads=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[float] = json.loads(losses.read_text())
    return found


def _with_parts(row: dict[str, Any]) -> dict[str, Any]:
    """The row with contents as lists of parts, as TRL has them."""

    def parts(content: str) -> list[dict[str, str]]:
        pieces = [[{"type": "image"}, {"type": "text", "text": text}] for text in content.split("<image>")]
        return [part for piece in pieces for part in piece if part.get("text") != ""][1:]

    turns = ("prompt", "chosen", "rejected")
    return row | {
        name: [{"role": turn["role"], "content": parts(turn["content"])} for turn in row[name]]
        for name in turns
    }


def _train(spec: dict[str, Any]) -> list[float]:
    import datasets
    import torch
    from transformers import AutoModelForImageTextToText
    from trl import DPOConfig, DPOTrainer

    from tests.vision_models import processor_of

    config = DPOConfig(
        output_dir=str(Path(spec["losses"]).with_name("trl")), per_device_train_batch_size=spec["batch"],
        max_steps=spec["steps"], use_cpu=True, bf16=False, gradient_checkpointing=False, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        max_length=None, beta=spec["beta"], learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-4,
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    dataset = datasets.Dataset.from_list([_with_parts(row) for row in spec["rows"]]).cast_column(
        "images", datasets.List(datasets.Image())
    )
    model = AutoModelForImageTextToText.from_pretrained(spec["model"], dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search("language_model|lm_head", name) is not None)
    processor = processor_of(Path(spec["model"]))
    # An answer ends with its stop token, and not with the newline behind it.
    processor.chat_template = processor.chat_template.replace(
        "<|im_end|>\n", "<|im_end|>{{ '' if loop.last and m.role == 'assistant' else '\n' }}"
    )
    trainer = DPOTrainer(model=model, args=config, train_dataset=dataset, processing_class=processor)
    losses: list[float] = []  # those in the logs are rounded
    step = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = noted
    trainer.train()
    return losses


def main() -> None:
    """Trains as the file says that is named on the command line."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    Path(spec["losses"]).write_text(json.dumps(_train(spec)))


if __name__ == "__main__":
    front_server.run_and_leave(main)

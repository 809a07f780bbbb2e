"""Losses, gradients and advantages of TRL's GRPOTrainer and RLOOTrainer: `python -m
tests.trainer.objectives.trl_policy SPECS RESULTS`.

SPECS is a JSON list of {model, trainer, settings, parameters, micros}; a micro batch has prompts,
answers, old, reference, advantages, truncated, one entry for each answer, and `items`, the loss
tokens of the step. RESULTS gets a list of {loss, gradients, metrics}, of the sum over the micro
batches. A spec with `rewards` instead of micro batches gets {advantages}, those of answers with
these rewards in a step of training.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.front_server import run_and_leave

_TRAINERS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


def _trainer(spec: dict[str, Any], folder: str) -> Any:
    config, trainer_class = _TRAINERS[spec["trainer"]]
    answers, group = len(spec.get("rewards", [0] * 8)), spec.get("group", 4)
    arguments = config(
        output_dir=folder, per_device_train_batch_size=answers, num_generations=group, max_steps=1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, **spec["settings"],
    )  # fmt: skip
    return trainer_class(
        model=spec["model"],
        reward_funcs=lambda completions, **rest: spec["rewards"],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "cat"}, {"prompt": "dog"}] * 4),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model"]),
    )


def _advantages(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    trainer = _trainer(spec, folder)
    trainer.train()
    return {"advantages": list(trainer._logs["advantages"])}


def _padded(rows: list[list[Any]], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a matrix, and which of its places have a value."""
    side = "left" if left else "right"
    tensors = [torch.tensor(row) for row in rows]
    ones = [torch.ones(len(row), dtype=torch.long) for row in rows]
    return (
        pad_sequence(tensors, batch_first=True, padding_side=side),
        pad_sequence(ones, batch_first=True, padding_side=side),
    )


def _inputs(micro: dict[str, Any]) -> dict[str, torch.Tensor]:
    prompts, prompt_mask = _padded(micro["prompts"], left=True)
    answers, mask = _padded(micro["answers"])
    mask = mask * ~torch.tensor(micro["truncated"])[:, None]
    old = _padded(micro["old"])[0]
    inputs = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": answers, "completion_mask": mask,
        "old_per_token_logps": old, "old_logps": (old * mask).sum(1), "advantages": torch.tensor(micro["advantages"]),
        "num_items_in_batch": torch.tensor(float(micro["items"])),
    }  # fmt: skip
    if micro["reference"]:
        inputs["ref_per_token_logps"] = _padded(micro["reference"])[0]
    return inputs


def _losses(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    trainer = _trainer(spec, folder)
    trainer.model.train()
    micros = spec["micros"]
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(micros)
    loss = sum(trainer._compute_loss(trainer.model, _inputs(micro)) for micro in micros)
    if spec["trainer"] == "rloo":
        loss = loss / len(micros)  # as transformers does
    loss.backward()
    gradients = {
        name: parameter.grad.flatten().tolist()
        for name, parameter in trainer.model.named_parameters()
        if name in spec["parameters"]
    }
    return {"loss": loss.item(), "gradients": gradients, "metrics": dict(trainer._metrics["train"])}


def main(specs: str, results: str) -> None:
    found = []
    for spec in json.loads(Path(specs).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_advantages(spec, folder) if "rewards" in spec else _losses(spec, folder))
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_and_leave(lambda: main(*sys.argv[1:]))

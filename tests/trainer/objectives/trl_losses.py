"""Trains with TRL's trainers, one after the other in this process: `python -m
tests.trainer.objectives.trl_losses SPECS RESULTS`.

SPECS is a JSON list of {trainer, model, rows, settings, steps, batch, max_length, eos}; RESULTS
gets a list of {losses, metrics}, one entry for each step, or of {answers}, the ids of chosen
answers, for no steps. `eos` is an end of sequence in place of the tokenizer's.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.front_server import run_and_leave

TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "pretrain": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "reward": (RewardConfig, RewardTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
    "simpo": (CPOConfig, CPOTrainer),
}


class _Logs(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.lines.append(dict(logs or {}))


def _train(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    config, trainer_class = TRAINERS[spec["trainer"]]
    arguments = config(
        output_dir=folder, per_device_train_batch_size=spec["batch"], max_steps=spec["steps"], use_cpu=True, bf16=False,
        gradient_checkpointing=False, lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, max_length=spec["max_length"], **spec["settings"],
    )  # fmt: skip
    auto = (
        transformers.AutoModelForSequenceClassification
        if spec["trainer"] == "reward"
        else transformers.AutoModelForCausalLM
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    if spec.get("eos"):  # TRL writes one where an answer as text has none
        tokenizer.eos_token = spec["eos"]
    logs = _Logs()
    trainer = trainer_class(
        model=auto.from_pretrained(spec["model"], dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(spec["rows"]),
        processing_class=tokenizer,
        callbacks=[logs],
    )
    if not spec["steps"]:
        return {"answers": list(trainer.train_dataset["chosen_ids"])}
    losses: list[float] = []  # those in the logs are rounded
    own_step = trainer.training_step

    def step(*inputs: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = own_step(*inputs, **more)
        losses.append(float(loss))
        return loss

    trainer.training_step = step
    trainer.train()
    return {"losses": losses, "metrics": logs.lines[: spec["steps"]]}


def main(specs: str, results: str) -> None:
    found = []
    for spec in json.loads(Path(specs).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_train(spec, folder))
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_and_leave(lambda: main(*sys.argv[1:]))

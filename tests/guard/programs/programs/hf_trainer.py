"""The Hugging Face Trainer on a tiny causal model."""

from typing import Any

import tiny
import torch.distributed as dist
from program_options import Losses, own_rank, parse
from transformers import Trainer, TrainerCallback, TrainingArguments


class Noting(TrainerCallback):
    """Notes the losses."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """As the Trainer has them."""
        if logs and "loss" in logs:
            self._losses.add(state.global_step, logs["loss"])


def main() -> None:
    """Trains, evaluates and saves."""
    options = parse()
    data = tiny.rows()
    if options.fault == "unseeded":
        data = tiny.unseeded(data)
    steps = options.steps - (2 if options.fault == "steps" and own_rank() == 1 else 0)
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"), max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_steps=3, eval_steps=3,
        eval_strategy="steps", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, dataloader_num_workers=0,
    )  # fmt: skip
    callbacks: list[TrainerCallback] = [Noting(Losses(options))]
    if options.callback:
        from unisono.integrations import TransformersCallback

        callbacks.append(TransformersCallback())
    trainer = Trainer(
        tiny.model(), arguments, train_dataset=data, eval_dataset=tiny.rows(8), callbacks=callbacks
    )
    trainer.train()
    if options.fault == "destroy" and dist.is_initialized():
        dist.destroy_process_group()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

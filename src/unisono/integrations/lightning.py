"""A callback for Lightning's Trainer: the ranks agree on data and steps, and say what they do.

>>> trainer = Trainer(…, callbacks=[UnisonoCallback()])
"""

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from unisono.integrations.trainer_callback import CallbackReporter
from unisono.integrations.trainer_facts import TrainerFacts, length_of, read_loader


class UnisonoCallback(Callback):
    """Refuses, before the first step and on every rank, a training on which the ranks do not agree; then it tells the watch.

    It changes nothing of the training: no random number is drawn, no collective called, no value read from a device.
    """

    def __init__(self) -> None:
        self._reporter = CallbackReporter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All ranks compare what they are about to train on.

        Raises:
            Disagreed: on every rank, with the same words.
        """
        self._reporter.begin(_facts(trainer))
        self._reporter.phase("data")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forward and backward begin."""
        self._reporter.step(trainer.global_step + 1)
        self._reporter.phase("compute")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The gradients are there."""
        self._reporter.phase("update")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done; the loss is told where Lightning has it on the host already."""
        self._reporter.phase("data")
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and getattr(getattr(loss, "device", None), "type", "") == "cpu":
            self._reporter.loss(trainer.global_step, float(loss))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation begins, or the check of one before the first step."""
        self._reporter.phase("evaluate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It is over."""
        self._reporter.phase("data")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint is being saved; there is no word of its end but the next batch."""
        self._reporter.phase("save")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What the program does after it is its own."""
        self._reporter.phase("finish")


def _facts(trainer: Trainer) -> TrainerFacts:
    """Of the first loader, and of the plan. Several loaders: only the steps are compared."""
    loader = trainer.train_dataloader
    facts = (
        read_loader(loader)
        if length_of(loader) is not None and hasattr(loader, "dataset")
        else TrainerFacts()
    )
    return replace(
        facts, steps=_whole(trainer.estimated_stepping_batches), batches=_whole(trainer.num_training_batches)
    )


def _whole(number: float) -> int | None:
    return int(number) if math.isfinite(number) and number > 0 else None

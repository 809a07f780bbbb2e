"""A callback for Lightning's Trainer: ranks agree on data and steps, and report progress.

>>> trainer = Trainer(…, callbacks=[LightningCallback()])
"""

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from unisono.guard.integrations.trainer_callback import CallbackReporter, TrainerFacts, length_of, read_loader


class LightningCallback(Callback):
    """Raises on every rank, before the first step, if ranks do not agree on the training; then
    reports progress to the watch.

    It does not change the training: it draws no random number, calls no collective, reads no value
    from a device.
    """

    def __init__(self) -> None:
        self._reporter = CallbackReporter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares on all ranks what they are about to train on.

        Raises:
            Disagreed: on every rank, with the same message.
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
        """The gradients are ready."""
        self._reporter.phase("update")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done; the loss is reported if it is already on the host."""
        self._reporter.phase("data")
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and getattr(getattr(loss, "device", None), "type", "") == "cpu":
            self._reporter.loss(trainer.global_step, float(loss))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation begins, or the check of one before the first step."""
        self._reporter.phase("evaluate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The evaluation is over."""
        self._reporter.phase("data")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """A checkpoint is being saved; the next batch marks its end."""
        self._reporter.phase("save")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The training is over."""
        self._reporter.phase("finish")


def _facts(trainer: Trainer) -> TrainerFacts:
    """Facts of the first loader and of the plan.

    With several loaders only the steps are compared.
    """
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

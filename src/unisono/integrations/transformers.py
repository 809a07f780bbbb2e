"""A callback for the Hugging Face Trainer, and so for TRL's: the ranks agree on data and steps, and say what they do.

>>> trainer = Trainer(…, callbacks=[UnisonoCallback()])
"""

from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unisono.integrations.trainer_callback import CallbackReporter
from unisono.integrations.trainer_facts import read_loader


class UnisonoCallback(TrainerCallback):
    """Refuses, before the first step and on every rank, a training on which the ranks do not agree; then it tells the watch.

    It changes nothing of the training: no random number is drawn, no collective called, no value read from a device.
    """

    def __init__(self) -> None:
        self._reporter = CallbackReporter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All ranks compare what they are about to train on.

        Raises:
            Disagreed: on every rank, with the same words.
        """
        loader = kwargs.get("train_dataloader")
        self._reporter.begin(
            replace(read_loader(loader), steps=state.max_steps if state.max_steps > 0 else None)
        )
        self._reporter.phase("data")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forward and backward begin."""
        self._reporter.step(state.global_step + 1)
        self._reporter.phase("compute")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradients are there."""
        self._reporter.phase("update")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What comes next has been decided by the Trainer's own callbacks, which come first."""
        self._reporter.phase(_next(control))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """As at the end of a step."""
        self._reporter.phase(_next(control))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Another batch of an evaluation."""
        self._reporter.phase("evaluate")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An evaluation is over."""
        self._reporter.phase("save" if control.should_save else "data")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A checkpoint has been saved."""
        self._reporter.phase("data")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer has read its losses from the device."""
        logs = kwargs.get("logs") or {}
        self._reporter.loss(state.global_step, logs.get("loss"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What the program does after it is its own."""
        self._reporter.phase("finish")


def _next(control: TrainerControl) -> str:
    if control.should_evaluate:
        return "evaluate"
    return "save" if control.should_save else "data"

"""A callback for the Hugging Face Trainer and TRL's trainers: ranks agree on data and steps, and
report progress.

>>> trainer = Trainer(…, callbacks=[TransformersCallback()])
"""

from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unisono.guard.integrations.trainer_callback import CallbackReporter, read_loader


class TransformersCallback(TrainerCallback):
    """Raises on every rank, before the first step, if ranks do not agree on the training; then
    reports progress to the watch.

    It does not change the training: it draws no random number, calls no collective, reads no value
    from a device.
    """

    def __init__(self) -> None:
        self._reporter = CallbackReporter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compares on all ranks what they are about to train on.

        Raises:
            Disagreed: on every rank, with the same message.
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
        """The gradients are ready."""
        self._reporter.phase("update")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer's own callbacks, which run first, have decided what comes next."""
        self._reporter.phase(_next(control))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports the next phase, like the end of a step."""
        self._reporter.phase(_next(control))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A batch of an evaluation is done."""
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
        """The training is over."""
        self._reporter.phase("finish")


def _next(control: TrainerControl) -> str:
    if control.should_evaluate:
        return "evaluate"
    return "save" if control.should_save else "data"

"""Points of a rank's run at which others may act: drills and tests inject faults there.

Production has no hook.
"""

from collections.abc import Callable
from typing import Literal

import torch

from unisono.guard.watch import Beats
from unisono.trainer.batches.source import Micro
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.process_group import Group

Work = Literal["evaluate", "reference", "save", "sync"]


class RunHook:
    """Does nothing at any point; a subclass overrides those that it needs."""

    def model_loaded(self, loaded: LoadedModel) -> None:
        """The model and its tokenizer are loaded, and not compared yet."""

    def reference_loaded(self, loaded: LoadedModel) -> None:
        """The reference model of preference.reference is loaded, and not compared yet."""

    def table_opened(self, table: TokenTable) -> TokenTable:
        """Gives the training rows of this rank."""
        return table

    def ranks_joined(self, group: Group, beats: Beats) -> Group:
        """Gives the group that this rank uses."""
        del beats
        return group

    def plan_agreed(self, plan: RunPlan) -> RunPlan:
        """Gives the plan that this rank follows, after all ranks have agreed on theirs."""
        return plan

    def step_begins(self, step: int) -> None:
        """The batch of a step is about to be read."""

    def forward_begins(self, step: int, micro: Micro | None, *, is_first: bool) -> None:
        """A micro batch is loaded.

        Args:
            micro: None if its loss does not count.
            is_first: whether it is the first of its step.
        """

    def loss_computed(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """Gives the loss of a micro batch, (), before its backward."""
        del step
        return loss

    def gradients_computed(self, step: int) -> None:
        """The last backward of a step is done; the gradients are not summed yet."""

    def work_begins(self, work: Work, step: int, advance: Callable[[], object]) -> None:
        """A round of an evaluation or of the reference, a sync of metrics or a save begins.

        Args:
            advance: records progress.
        """

    def run_ends(self) -> None:
        """The result is written. No collective follows."""

"""Supervised fine-tuning and pretraining: cross entropy of the loss tokens."""

from dataclasses import dataclass

import torch

from unisono.model.forward import Forward
from unisono.objectives.losses import dft_losses
from unisono.objectives.objective import Counts, Micro, Part


@dataclass(frozen=True)
class TokenObjective:
    """The mean cross entropy of the loss tokens.

    Attributes:
        smoothing: the share of the target probability that is spread evenly over the vocabulary, in training (arXiv:1512.00567).
        dft: whether a token is weighted by its own probability, in training.
    """

    smoothing: float = 0.0
    dft: bool = False
    metrics: tuple[str, ...] = ()
    sides: tuple[int, ...] = (0,)
    first_sides: tuple[int, ...] = ()
    uses_reference: bool = False

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Not needed."""
        raise NotImplementedError

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; in evaluation mode the plain cross entropy."""
        del known
        training = forward.loaded.model.training
        if self.dft and training:
            loss = dft_losses(forward.log_probs(micro.rows)).sum() / counts.loss_tokens
        else:
            smoothing = self.smoothing if training else 0.0
            loss = forward.loss(micro.rows, count=counts.loss_tokens, smoothing=smoothing)
        return Part(loss, loss.new_zeros(0))

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """None."""
        del sums, known
        return {}

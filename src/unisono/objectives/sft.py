"""Supervised fine-tuning and pretraining: cross entropy of the loss tokens."""

from dataclasses import dataclass

from unisono.model.forward import Forward
from unisono.objectives.losses import dft_losses
from unisono.objectives.objective import Counts, Micro, Objective, Part


@dataclass(frozen=True)
class TokenObjective(Objective):
    """The mean cross entropy of the loss tokens.

    Attributes:
        smoothing: the share of the target probability that is spread evenly over the vocabulary, in training (arXiv:1512.00567).
        dft: whether a token is weighted by its own probability, in training.
    """

    smoothing: float = 0.0
    dft: bool = False

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

"""What resume needs, and nothing else."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """The only thing that changes during training, beside the trained weights and the optimizer.

    Attributes:
        step: optimizer steps done.
        tokens: input tokens seen, padding excluded, over all ranks.
        loss_tokens: tokens that counted in the loss.
        loss: of the last step.
        skipped: steps whose loss or gradient was not a number and that changed nothing.
        best_loss: the smallest eval_loss so far.
        best_step: the step that it was measured at.
        evals_since_best: evaluations since then.
        evaluation_due: whether the step is to be evaluated and has not been yet.
        eval: the figures for result.json: loss_before, exact_match_before, loss, exact_match.
    """

    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss: float | None = None
    skipped: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_due: bool = False
    eval: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For state.json of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "TrainState":
        """Reads what to_json wrote."""
        return cls(**value)

"""What a run minimizes: one file for each objective, and the seam through which step, evaluation and rehearsal use them."""

from unisono.objectives.choice import objective_of

__all__ = ["objective_of"]

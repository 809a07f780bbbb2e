"""What a run minimizes: the objectives, their losses, and the seam through which step, evaluation and rehearsal use them."""

from unisono.objectives.choice import objective_of

__all__ = ["objective_of"]

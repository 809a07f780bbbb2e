"""What a run minimizes: the objectives, and the seam through which step, evaluation and rehearsal use them."""

"""Training: the loop, the step, evaluation, saving and stopping, on what data, model and checkpoint give."""

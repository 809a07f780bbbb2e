"""Training: the loop, the step, evaluation, saving and stopping, with data, model and
checkpoint.
"""

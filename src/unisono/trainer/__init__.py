"""From a config to a trained model: data, models, objectives, the training loop, checkpoints."""

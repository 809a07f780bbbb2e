"""What the model of a LoRA file gives, as the task `read_back` compares it."""

from pathlib import Path

import torch

from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.state import CheckpointReader
from unisono.trainer.families.pictures.pipeline import load_denoiser, trains_text
from unisono.trainer.families.pictures.result_predictions import ResultPredictions
from unisono.trainer.plan import RunPlan
from unisono.trainer.task.target import Target


def trained_predictions(target: Target) -> ResultPredictions | None:
    """What the model of a run gives at the target's step; None where nobody knows: it is not the
    result of a run, nor a checkpoint.
    """
    plan = target.plan
    if plan is None:
        return None
    if target.source == "checkpoint":
        return _of_checkpoint(target, plan)
    kept = RunDir(target.weights.parent).result_logits
    known = kept.is_file() and target.base == Path(plan.model.directory)
    return ResultPredictions.read(kept) if known else None


def _of_checkpoint(target: Target, plan: RunPlan) -> ResultPredictions:
    """By the denoiser that trains, with the weights of the checkpoint."""
    cpu = torch.device("cpu")
    loaded = load_denoiser(plan.config, directory=target.base, dtype="float32", device=cpu)
    reader = CheckpointReader(target.weights)
    with torch.no_grad():
        for name, parameter in loaded.trainable.items():
            parameter.copy_(reader.weight(name))
    trained = loaded.base.text_names if trains_text(plan.config) else ()
    return ResultPredictions.of(loaded.base.eval(), dtype="float32", text_encoders=trained)

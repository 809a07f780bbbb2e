"""The model as a run starts, beside the one that is trained: the reference of `grpo.beta`, where
no adapter can be switched off instead.
"""

import torch

from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.source import SourceRank
from unisono.trainer.config.model_sections import needs_start
from unisono.trainer.families import training_of
from unisono.trainer.model.forward import Forward, choose_forward
from unisono.trainer.model.load import DTYPES


def starting_model(rank: SourceRank) -> Forward | None:
    """A frozen copy, whole on each rank, with its weights in the dtype of the computation; None if
    the model without its adapter is the same.
    """
    plan, adapter = rank.plan, rank.plan.config.adapter
    if not needs_start(adapter):
        return None
    rank.enter("reference")
    rank.show("reference", "loading the reference: the model as it starts")
    with torch.random.fork_rng():
        seed_torch(plan.config.seed, "weights")  # random weights, if there are any, are the same
        # As a model to be trained, its weights are in float32 at first: in the memory of the host.
        loaded = training_of(plan).load(plan, torch.device("cpu") if adapter is None else rank.device)
    loaded.model.requires_grad_(False)
    if adapter is None:
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.to(DTYPES[plan.dtype])
        loaded.trainable = {}
    loaded.model.to(rank.device).eval()
    return choose_forward(
        loaded,
        dtype=plan.dtype,
        quick_adapter=adapter is not None and adapter.is_plain,
        gradient_checkpointing=False,
        trains=False,
        pictures=training_of(plan).probe(plan, rank.device),
    )

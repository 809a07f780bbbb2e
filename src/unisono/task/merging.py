"""Adds an adapter to the weights beneath it."""

from typing import Any

import torch

from unisono.errors import ModelError

_PROBE_TOKENS = 16


def logits_of_probe(model: Any) -> torch.Tensor:
    """(2, tokens, vocabulary) float32: what a model says to two rows of tokens that are the same each time."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = [
        [(11 + 7 * i) % vocabulary for i in range(_PROBE_TOKENS)],
        [(3 + 5 * i) % vocabulary for i in range(_PROBE_TOKENS)],
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids, device=base.device), use_cache=False).logits
    return logits.float().cpu()


def merge_adapter(model: Any, *, where: str) -> Any:
    """The transformers model with the adapter in its weights. Sums are made in float32 and rounded once.

    Tied weights stay tied; the dtype is that of the model beneath.

    Args:
        model: a peft model; it is used up.
        where: for messages.

    Raises:
        ModelError: if the adapter changes one of two tied weights, or is of a kind that cannot be added.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    _refuse_tied(model, where)
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not hasattr(layer, "merge"):
            raise ModelError.of(
                f"an adapter of kind {type(layer).__name__} cannot be merged", where=where, fix="export without --merge"
            )  # fmt: skip
        weight = layer.get_base_layer().weight
        dtype = weight.dtype
        weight.data = weight.data.float()
        layer.merge()
        weight.data = weight.data.to(dtype)
    return model.unload()


def _refuse_tied(model: Any, where: str) -> None:
    """Where head and embedding are one matrix, what the adapter does to one of them would be done to both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    if not base.config.get_text_config().tie_word_embeddings:
        return
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
            raise ModelError.of(
                "the adapter changes the embedding or the head, which share one matrix in this model", where=where,
                why="merged, the change would reach both", fix="export without --merge",
            )  # fmt: skip

"""The logits of a model for fixed rows of tokens."""

from typing import Any

import torch


def logits_of_probe(model: Any) -> torch.Tensor:
    """(2, tokens, vocabulary) float32."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = [[(first + step * i) % vocabulary for i in range(16)] for first, step in ((11, 7), (3, 5))]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor(ids, device=base.device), use_cache=False).logits
    return found.float().cpu()

"""How much memory a rank will need, from a model's figures: an estimate, said as one."""

from unisono.plan.model import MemoryEstimate, ModelFacts

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD_CHUNK = 128  # rows of logits alive at a time; see model.loss


def trainable_parameters(model: ModelFacts, *, adapter_rank: int | None, all_linear: bool = True) -> int:
    """Parameters that are trained: an adapter's r·(in + out) over the matrices, or all of them."""
    if adapter_rank is None:
        return model.parameters
    return adapter_rank * model.linear_in_out if all_linear else adapter_rank * model.linear_in_out // 2


def estimate_memory(
    model: ModelFacts,
    *,
    dtype: str,
    adapter_rank: int | None,
    micro_tokens: int,
    longest_row: int,
    gradient_checkpointing: bool,
    shards: int = 1,
) -> MemoryEstimate:
    """Bytes for one rank.

    Weights: parameters × dtype. Trainable: (master + gradient + two moments) × 4 bytes. Activations: per token and layer
    about 10 hidden + 4 intermediate values are kept for the backward pass, and the attention probabilities of its row
    (heads × length, with heads ≈ hidden / 64); with gradient checkpointing one layer's, and one hidden vector a layer.

    Args:
        model: the model's figures.
        dtype: of frozen weights and computation.
        adapter_rank: r, or None for full fine-tuning.
        micro_tokens: tokens in one forward.
        longest_row: tokens of the longest row.
        gradient_checkpointing: whether activations are computed again.
        shards: ranks among which weights and state are cut (fsdp); one layer is whole at a time, which is added.
    """
    size = _BYTES[dtype]
    trainable = trainable_parameters(model, adapter_rank=adapter_rank)
    heads = max(1, model.hidden_size // 64)
    per_layer = (10 * model.hidden_size + 4 * model.intermediate_size + heads * longest_row // 2) * size
    if adapter_rank is not None:
        per_layer += 6 * model.hidden_size * size  # inputs of the adapters, and their low-rank outputs
    kept_layers = 1 if gradient_checkpointing else model.layers
    activations = micro_tokens * (
        per_layer * kept_layers + model.layers * model.hidden_size * size * gradient_checkpointing
    )
    head = (
        min(micro_tokens, _HEAD_CHUNK) * model.vocab_size * 4 * 2
        + micro_tokens * model.hidden_size * size * 2
    )
    weights = model.parameters * size
    if adapter_rank is None and dtype == "float32":
        weights = 0  # the master copy is the weight
    state = trainable * 4 * 4
    if shards > 1:
        whole_layer = model.parameters * size // max(1, model.layers)
        weights = (
            weights // shards + 2 * whole_layer
        )  # the one that computes, and the one that is fetched meanwhile
        state //= shards
    return MemoryEstimate(
        weights=weights,
        trainable=state,
        activations=activations,
        loss_head=head,
        total=weights + state + activations + head,
    )

"""The estimate of a rank's memory. Pure."""

from unisono.plan.run_plan import MemoryEstimate, ModelFacts

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 64  # weights that share a scale, of nf4 and fp4
_BLOCKS = 256  # of these scales share another one, if they are quantized themselves
_HEAD_CHUNK = 128  # rows of logits alive at a time; see model.forward


def trainable_parameters(model: ModelFacts, *, adapter_rank: int | None, all_linear: bool = True) -> int:
    """The number of trained parameters: an adapter's r·(in + out) over the matrices, or all."""
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
    logits: bool = True,
) -> MemoryEstimate:
    """Bytes for one rank.

    - weights: parameters × bytes of `dtype`; of a quantized model only those outside of its matrices, and the matrices × `packed_bytes`.
      Nothing with full fine-tuning in float32: the trained copy is the weight.
    - trainable: trained values × 16 bytes: the value, its gradient and two moments of AdamW, all float32. An adapter trains r × (in + out)
      values for each matrix.
    - activations: for each token and layer 10 × hidden + 4 × intermediate values of `dtype`, attention probabilities of half a row for each
      64 hidden values, and with an adapter 6 × hidden. With gradient checkpointing those of one layer, and hidden values for each layer.
    - loss head: for each token 2 × hidden values of `dtype`, and twice the float32 logits of 128 tokens.
    - dequantized: the largest matrix of a quantized model in `dtype`.
    - shards: weights and trainable are divided by the ranks, but not the scales of quantized weights. Two layers, embedding and head are
      whole during a step.

    Args:
        model: the model's figures.
        dtype: of frozen weights and computation.
        adapter_rank: r, or None for full fine-tuning.
        micro_tokens: tokens in one forward.
        longest_row: tokens of the longest row.
        gradient_checkpointing: whether activations are computed again.
        shards: ranks among which weights and state are cut (fsdp).
        logits: whether there are logits over the vocabulary; a reward model has one value for a row.
    """
    size = _DTYPE_BYTES[dtype]
    trainable = trainable_parameters(model, adapter_rank=adapter_rank)
    heads = max(1, model.hidden_size // 64)
    per_layer = (10 * model.hidden_size + 4 * model.intermediate_size + heads * longest_row // 2) * size
    if adapter_rank is not None:
        per_layer += 6 * model.hidden_size * size  # inputs of the adapters, and their low-rank outputs
    kept_layers = 1 if gradient_checkpointing else model.layers
    activations = micro_tokens * (
        per_layer * kept_layers + model.layers * model.hidden_size * size * gradient_checkpointing
    )
    head = micro_tokens * model.hidden_size * size * 2
    if logits:
        head += min(micro_tokens, _HEAD_CHUNK) * model.vocab_size * 4 * 2
    weights, dequantized, matrix_bytes = model.parameters * size, 0, float(size)
    if model.quantized:
        dequantized = model.hidden_size * max(model.intermediate_size, model.hidden_size) * size
        matrix_bytes = packed_bytes(model)
        weights -= int(model.linear_parameters * (size - matrix_bytes))
    if adapter_rank is None and dtype == "float32":
        weights = 0  # the master copy is the weight
    state = trainable * 4 * 4
    if shards > 1:
        whole = int(2 * model.linear_parameters * matrix_bytes / max(1, model.layers))
        whole += (model.parameters - model.linear_parameters) * size
        scales = int(model.linear_parameters * (matrix_bytes - _bits(model) / 8)) if model.quantized else 0
        weights = (weights - scales) // shards + scales + whole
        state //= shards
    return MemoryEstimate(
        weights=weights,
        trainable=state,
        activations=activations,
        loss_head=head,
        dequantized=dequantized,
        total=weights + state + activations + head + dequantized,
    )


def packed_bytes(model: ModelFacts) -> float:
    """Bytes of a quantized weight with its share of the scales: nf4 and fp4 have one for each block, int8 one for each row."""
    packed = _bits(model) / 8
    if model.quantized == "int8":
        return packed + 4 / model.hidden_size
    if not model.quantized_double:
        return packed + 4 / _BLOCK
    return packed + (1 + 4 / _BLOCKS) / _BLOCK


def _bits(model: ModelFacts) -> int:
    return 8 if model.quantized == "int8" else 4

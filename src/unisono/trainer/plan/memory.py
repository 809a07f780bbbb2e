"""The estimate of a rank's memory: a table of terms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from unisono.trainer.config.model_sections import ModelPart
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.plan.families import family_of
from unisono.trainer.plan.run_plan import MemoryEstimate, ModelFacts

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 64  # weights that share a scale, of nf4 and fp4
_BLOCKS = 256  # of these scales share another one, if they are quantized themselves
_HEAD_CHUNK = 128  # rows of logits alive at a time; see model.layers
LOGITS_ON_GPU = 1 << 27
"""Logits alive at a time there: a product with few rows reads the whole head from memory for little
work. Other numbers were not tried.
"""

KEPT_WHOLE_BYTES = 64 << 20
"""The last layers of a sharded model stay whole between forward and backward as far as their
weights fit into this.

Backward begins with them, so of a large model the last layer would only be gathered again at once;
a small model is gathered once for both. Of frozen layers these are not sharded at all.
"""


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
    on_gpu: bool = False,
    fast_layers: bool = False,
    one_backward: bool = False,
    optimizer_bytes: float = 8,
    router_loss: bool = False,
    reward_models: int = 0,
    keeps_start: bool = False,
    samples: bool = False,
    train_parts: Sequence[ModelPart] = ("language",),
    pixel_values: int = 0,
    largest_picture: int = 0,
) -> MemoryEstimate:
    """Bytes for one rank.

    - weights: parameters × bytes of `dtype`; of a quantized model only those outside of its
      matrices, and the matrices × `packed_bytes`. With quantized embeddings those outside × (1 + 4
      / hidden). Nothing with full fine-tuning in float32: the trained copy is the weight.
    - trainable: trained values × 16 bytes: the value, its gradient and two moments of AdamW, all
      float32; × 12 with moments in bfloat16. An adapter trains r × (in + out) values for each
      matrix. In bfloat16 with one rank and one micro batch in a step, 14 bytes for a value of a
      layer's matrix that is trained itself: its gradient stays in bfloat16 until its update.
    - activations: for each token and layer 10 × hidden + 4 × intermediate values of `dtype`; 6 ×
      hidden more with an adapter, and in bfloat16 on a GPU; and on a CPU attention probabilities of
      half a row for each 64 hidden values. With gradient checkpointing those of one layer, and
      hidden values for each layer, without an adapter in float32.
    - weights of experts that an adapter changes: their sums with the adapter, for all layers, or
      one with gradient checkpointing, or if they are quantized; and the gradient of one layer's.
    - losses of routers: for each token and expert of every layer the logit in `dtype`, its copy and
      its probability in float32, with gradient checkpointing, too.
    - with the fast layers on a GPU instead: for each token and layer 4 × hidden + 2 × attention + 2
      × intermediate + 7 × r values, where attention is the width of queries and keys together;
      without an adapter 6 × hidden instead of 4. Norms of heads add attention once, without an
      adapter three times; if 3 × r is not a multiple of 8, copies add it 1.5 times. And once 4 ×
      hidden + 2 × intermediate for gradients of the layer whose backward runs.
    - vision part: pixels in float32. If it is not trained, it computes one picture after the other,
      without gradients: 6 × hidden + 2 × intermediate values of `dtype` for each patch of the
      largest picture. If it is trained, for each patch of a micro batch what a layer of the decoder
      keeps for a token.
    - loss head: for each token 2 × hidden values of `dtype`, and twice the float32 logits of 128
      tokens; on a GPU twice 2²⁷ logits in `dtype`, or all if these are fewer.
    - for an image model, a token is a position of the latents, and activations are its UNet's
      (`plan.families`).
    - dequantized: the largest matrix of a quantized model in `dtype`, and the experts of one layer
      unless their sums are counted.
    - other models: reward models, and parameters × bytes of `dtype` for a copy of the start.
    - shards: weights and trainable are divided by the ranks, but not the scales of quantized
      weights. Embedding, head and what reads pictures are whole during a step, and two layers, or
      the last layers of up to 64 MiB if that is more. With an adapter embedding, head, what reads
      pictures and the last layers of up to 64 MiB are not divided, and two of the other layers are
      whole. A rank that samples answers has all layers whole meanwhile.

    Args:
        model: the model's figures.
        dtype: of frozen weights and computation.
        adapter_rank: r, or None for full fine-tuning.
        micro_tokens: tokens in one forward.
        longest_row: tokens of the longest row.
        gradient_checkpointing: whether activations are computed again.
        shards: ranks among which weights and state are cut (fsdp).
        logits: whether there are logits over the vocabulary; a reward model has one value for a
            row.
        on_gpu: whether the device is a GPU, whose attention keeps no probabilities.
        fast_layers: whether the fast layers of `model.decoder` are used, on a GPU.
        one_backward: see `has_one_backward`.
        optimizer_bytes: bytes of the optimizer's state for a trained value, on average.
        router_loss: whether there are losses of routers.
        reward_models: bytes of those that compute beside the rank.
        keeps_start: whether there is a copy of the starting weights, which is never sharded.
        samples: whether the rank samples answers, during which all its layers are whole.
        train_parts: the parts of a vision-language model that are trained.
        pixel_values: values of the pixels of all pictures in one forward.
        largest_picture: those of the largest picture.
    """
    rank = _EstimatedRank(
        model=model,
        dtype=dtype,
        adapter_rank=adapter_rank,
        micro_tokens=micro_tokens,
        longest_row=longest_row,
        gradient_checkpointing=gradient_checkpointing,
        shards=shards,
        logits=logits,
        on_gpu=on_gpu,
        fast_layers=fast_layers,
        one_backward=one_backward,
        optimizer_bytes=optimizer_bytes,
        router_loss=router_loss,
        reward_models=reward_models,
        keeps_start=keeps_start,
        samples=samples,
        train_parts=frozenset(train_parts),
        pixel_values=pixel_values,
        largest_picture=largest_picture,
    )
    parts = dict.fromkeys(
        ("weights", "trainable", "activations", "loss_head", "dequantized", "other_models"), 0
    )
    for term in _TERMS:
        if term.applies(rank):
            parts[term.part] += term.bytes(rank)
    return MemoryEstimate(**parts, total=sum(parts.values()))


def mean_state_bytes(section: OptimSection, model: ModelFacts, *, adapter_rank: int | None) -> float:
    """Bytes of the optimizer's state for a trained value, on average.

    - adamw: 8; 4 with `state_dtype: bfloat16`. prodigy: 16, of an adapter 14. schedule_free: 8.
      lion: 4. With 8 bits 1 + 1/64 instead of 4.
    - muon: 4 for matrices of layers, and those of adamw for others.
    - adafactor: 4 for each row and each column of a matrix.
    """
    kind = optimizer_named(section.kind)
    of_value = kind.state_bytes(section.state_dtype)
    if adapter_rank is not None:
        if kind.is_factored:
            return 4 / adapter_rank
        share = 1 if kind.adapter_values is None else kind.adapter_values / kind.state_values
        return of_value * share
    trained = max(1, model.parameters)
    if kind.is_factored:
        tables = model.vocab_size + model.hidden_size
        return 4 * (model.linear_in_out + tables * (1 if model.ties_head else 2)) / trained
    if kind.matrix_values is not None:
        return of_value + (4 * kind.matrix_values - of_value) * model.linear_parameters / trained
    return of_value


@dataclass(frozen=True)
class _EstimatedRank:
    """The settings of an estimate (see `estimate_memory`), and the figures that several terms
    need.
    """

    model: ModelFacts
    dtype: str
    adapter_rank: int | None
    micro_tokens: int
    longest_row: int
    gradient_checkpointing: bool
    shards: int
    logits: bool
    on_gpu: bool
    fast_layers: bool
    one_backward: bool
    optimizer_bytes: float
    router_loss: bool
    reward_models: int
    keeps_start: bool
    samples: bool
    train_parts: frozenset[ModelPart]
    pixel_values: int
    largest_picture: int

    @property
    def size(self) -> int:
        """Bytes of a value of `dtype`."""
        return _DTYPE_BYTES[self.dtype]

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return self.adapter_rank is None

    @property
    def is_mixed(self) -> bool:
        """Whether what is added up over the layers is in float32, and the computation is not."""
        return self.is_full and self.dtype != "float32"

    @property
    def is_sharded(self) -> bool:
        """Whether weights and state are divided among ranks."""
        return self.shards > 1

    @property
    def has_layers(self) -> bool:
        """Whether the model has the usual layers of a language model."""
        return not self.fast_layers and family_of(self.model).decodes_tokens

    @property
    def has_fast_layers(self) -> bool:
        """Whether they are those of `model.decoder`."""
        return self.fast_layers and family_of(self.model).decodes_tokens

    @property
    def has_logits(self) -> bool:
        """Whether there are logits over a vocabulary."""
        return self.logits and family_of(self.model).decodes_tokens

    @property
    def other_activations(self) -> int:
        """Values kept by blocks of other kinds, e.g. those of a UNet."""
        return family_of(self.model).activations(
            self.model, self.micro_tokens, gradient_checkpointing=self.gradient_checkpointing
        )

    @property
    def trained(self) -> int:
        """Trained values: an adapter's r × (in + out) over the matrices, or all; of a projector
        always all.
        """
        model, rank, vision = self.model, self.adapter_rank, self.model.vision
        in_out = sum(model.adapted_in_out.values()) or model.linear_in_out
        trained = model.parameters if rank is None else rank * in_out
        if vision is None:
            return trained
        of_parts = {
            "language": trained,
            "vision": vision.parameters if rank is None else rank * vision.in_out,
            "projector": vision.projector_parameters,
        }
        return sum(of_parts[part] for part in self.train_parts)

    @property
    def sees(self) -> bool:
        """Whether a vision part reads pictures."""
        return self.model.vision is not None

    @property
    def trains_vision(self) -> bool:
        """Whether its values are kept for the backward."""
        return self.sees and "vision" in self.train_parts

    def patches(self, values: int) -> int:
        """The number of patches with so many values of pixels."""
        return values // self.model.vision.patch_values if self.model.vision is not None else 0

    @property
    def of_largest_picture(self) -> int:
        """Bytes of what a layer of the vision part computes of the largest picture."""
        vision = self.model.vision
        wide = 6 * vision.hidden_size + 2 * vision.intermediate_size if vision is not None else 0
        return self.patches(self.largest_picture) * self.size * wide

    @property
    def of_vision_layers(self) -> int:
        """Bytes that the layers of a trained vision part keep."""
        vision = self.model.vision
        if vision is None:
            return 0
        wide = (16 if self.has_wide_inputs else 10) * vision.hidden_size + 4 * vision.intermediate_size
        layers = vision.layers
        if self.gradient_checkpointing:
            wide, layers = wide + layers * vision.hidden_size * (1 + self.is_mixed), 1
        return self.patches(self.pixel_values) * self.size * layers * wide

    @property
    def has_wide_inputs(self) -> bool:
        """Whether 6 × hidden values more are kept: the inputs of the adapters, or copies in the
        other dtype.
        """
        return not self.is_full or (self.is_mixed and self.on_gpu)

    @property
    def has_narrow_gradients(self) -> bool:
        """Whether gradients of matrices stay in bfloat16: the fast layers leave them as their
        products computed them.
        """
        is_narrow = self.is_mixed and self.dtype == "bfloat16"
        return self.one_backward and is_narrow and (self.fast_layers or not self.on_gpu)

    @property
    def layers_kept(self) -> int:
        """Layers whose values are kept for the backward at a time."""
        return 1 if self.gradient_checkpointing else self.model.layers

    @property
    def sums_kept(self) -> int:
        """Layers whose sums of experts and adapters are kept at a time."""
        return 1 if self.model.quantized else self.layers_kept

    @property
    def kept(self) -> int:
        """Bytes of one value for each token and layer that is kept for the backward."""
        return self.micro_tokens * self.size * self.layers_kept

    @property
    def of_tokens(self) -> int:
        """Bytes of one value for each token."""
        return self.micro_tokens * self.size

    @property
    def matrix_bytes(self) -> float:
        """Bytes of a weight in the matrices of the layers."""
        return packed_bytes(self.model) if self.model.quantized else float(self.size)

    @property
    def outside_bytes(self) -> float:
        """Bytes of a weight outside of them: embedding and head."""
        return 1 + 4 / self.model.hidden_size if self.model.quantized_embeddings else self.size

    @property
    def outside(self) -> int:
        """Values outside of the matrices of the layers."""
        return self.model.parameters - self.model.linear_parameters

    @cached_property
    def weights(self) -> int:
        """Bytes of all frozen weights, of which fully trained ones in float32 are their own master
        copy.
        """
        vision = self.model.other_parameters if self.model.reads_pictures else 0
        if self.is_full and self.dtype == "float32":
            return (self.model.parameters + vision - self.trained) * self.size
        saved = 0
        if self.model.quantized:
            in_matrices = self.model.linear_parameters * (self.size - self.matrix_bytes)
            saved = int(in_matrices + self.outside * (self.size - self.outside_bytes))
        return self.model.parameters * self.size + self.vision_weights - saved

    @property
    def vision_weights(self) -> int:
        """Bytes of the parts that read pictures, which are whole during a step."""
        return self.model.other_parameters * self.size if self.model.reads_pictures else 0

    @property
    def scales(self) -> int:
        """Bytes of the scales of quantized weights, which are not divided."""
        if not self.model.quantized:
            return 0
        return int(self.model.linear_parameters * (self.matrix_bytes - _bits(self.model) / 8))

    @property
    def layers(self) -> int:
        """Bytes of all layers' matrices."""
        return int(self.model.linear_parameters * self.matrix_bytes)

    @property
    def layer(self) -> int:
        """Bytes of one layer's matrices."""
        return max(1, self.layers // max(1, self.model.layers))

    @property
    def undivided(self) -> int:
        """Bytes of the last frozen layers, which are not sharded."""
        return 0 if self.is_full else self.layer * min(self.model.layers, KEPT_WHOLE_BYTES // self.layer)

    @property
    def divided(self) -> int:
        """Bytes of the weights that are divided among the ranks."""
        divided = self.weights - self.scales
        if self.is_full:
            return divided
        return max(0, divided - self.undivided - self.vision_weights - int(self.outside * self.outside_bytes))

    @property
    def whole_layers(self) -> int:
        """Bytes of the layers that are whole during a step."""
        if self.samples:
            return self.layers
        if self.is_full:
            return max(2 * self.layer, min(self.layers, KEPT_WHOLE_BYTES))
        return self.undivided + min(self.divided, 2 * self.layer)


class _Term(NamedTuple):
    """A term of the estimate.

    Attributes:
        part: the part of `MemoryEstimate` that it belongs to.
        name: what takes the memory.
        bytes: how much, for one rank.
        applies: whether there is any.
    """

    part: Literal["weights", "trainable", "activations", "loss_head", "dequantized", "other_models"]
    name: str
    bytes: Callable[[_EstimatedRank], int]
    applies: Callable[[_EstimatedRank], bool] = lambda _rank: True


_TERMS = (
    _Term("weights", "all_weights", lambda r: r.weights, lambda r: not r.is_sharded),
    _Term("weights", "rank_share", lambda r: r.divided // r.shards, lambda r: r.is_sharded),
    _Term("weights", "scales", lambda r: r.scales, lambda r: r.is_sharded),
    _Term("weights", "whole_layers", lambda r: r.whole_layers, lambda r: r.is_sharded),
    _Term("weights", "vision_part", lambda r: r.vision_weights, lambda r: r.is_sharded),
    _Term("weights", "embedding_and_head", lambda r: int(r.outside * r.outside_bytes),
          lambda r: r.is_sharded),
    _Term("trainable", "values_gradients_optimizer",
          lambda r: int(r.trained * (8 + r.optimizer_bytes)) // r.shards),
    _Term("trainable", "gradients_in_bfloat16", lambda r: -2 * r.model.linear_parameters,
          lambda r: r.has_narrow_gradients),
    _Term("activations", "sums_with_adapters",
          lambda r: r.model.summed_parameters * r.size * (r.sums_kept + 1) // max(1, r.model.layers),
          lambda r: not r.is_full and bool(r.model.summed_parameters)),
    _Term("activations", "fast_layers", lambda r: r.kept * _values_of_fast_layers(r.model, r.adapter_rank),
          lambda r: r.has_fast_layers),
    _Term("activations", "fast_layer_gradients",
          lambda r: r.of_tokens * (4 * r.model.hidden_size + 2 * r.model.intermediate_size),
          lambda r: r.has_fast_layers),
    _Term("activations", "layers",
          lambda r: r.kept * (10 * r.model.hidden_size + 4 * r.model.intermediate_size),
          lambda r: r.has_layers),
    _Term("activations", "adapter_inputs_or_copies",
          lambda r: r.kept * 6 * r.model.hidden_size, lambda r: r.has_layers and r.has_wide_inputs),
    _Term("activations", "attention_probabilities",
          lambda r: r.kept * (max(1, r.model.hidden_size // 64) * r.longest_row // 2),
          lambda r: r.has_layers and not r.on_gpu),
    _Term("activations", "layer_inputs",
          lambda r: r.of_tokens * r.model.layers * r.model.hidden_size * (1 + r.is_mixed),
          lambda r: r.gradient_checkpointing and family_of(r.model).decodes_tokens),
    _Term("activations", "router_losses",
          lambda r: r.micro_tokens * (r.model.parts.get("router", 0) // r.model.hidden_size) * (r.size + 8),
          lambda r: r.router_loss),
    _Term("activations", "pixels", lambda r: r.pixel_values * 4, lambda r: r.sees),
    _Term("activations", "vision_layers", lambda r: r.of_vision_layers, lambda r: r.trains_vision),
    _Term("activations", "vision_forward", lambda r: r.of_largest_picture,
          lambda r: r.sees and not r.trains_vision),
    _Term("activations", "other_blocks", lambda r: r.other_activations * r.size),
    _Term("loss_head", "hidden_values", lambda r: r.of_tokens * r.model.hidden_size * 2),
    _Term("loss_head", "logits_on_gpu",
          lambda r: min(r.micro_tokens * r.model.vocab_size, LOGITS_ON_GPU) * r.size * 2,
          lambda r: r.has_logits and r.on_gpu),
    _Term("loss_head", "logits_on_cpu",
          lambda r: min(r.micro_tokens, _HEAD_CHUNK) * r.model.vocab_size * 4 * 2,
          lambda r: r.has_logits and not r.on_gpu),
    _Term("dequantized", "largest_matrix",
          lambda r: r.model.hidden_size * max(r.model.intermediate_size, r.model.hidden_size) * r.size,
          lambda r: bool(r.model.quantized)),
    _Term("dequantized", "experts_of_layer", lambda r: r.model.experts_of_layer * r.size,
          lambda r: bool(r.model.quantized) and "experts" not in r.model.adapted_in_out),
    _Term("other_models", "reward_models", lambda r: r.reward_models),
    _Term("other_models", "start", lambda r: r.weights or r.model.parameters * r.size,
          lambda r: r.keeps_start),
)  # fmt: skip


def _values_of_fast_layers(model: ModelFacts, adapter_rank: int | None) -> int:
    """Values that a layer of `model.decoder` keeps for each token on a GPU. A test counts them.

    The inputs of both norms and their outputs; queries, keys, values and the output of attention,
    which is as wide as the queries; gate and up; the low-rank outputs of seven adapters.
    """
    hidden, intermediate = model.hidden_size, model.intermediate_size
    # in + out of the seven matrices of a layer: 7 × hidden + 3 × intermediate + 2 × attention
    attention = (model.linear_in_out // model.layers - 7 * hidden - 3 * intermediate) // 2
    if adapter_rank is None:
        return 6 * hidden + (5 if model.norms_heads else 2) * attention + 2 * intermediate
    kept = 4 * hidden + (3 if model.norms_heads else 2) * attention + 2 * intermediate + 7 * adapter_rank
    is_copied = not model.norms_heads and 3 * adapter_rank % 8 != 0  # the flash kernels need aligned inputs
    return kept + attention * 3 // 2 * is_copied


def packed_bytes(model: ModelFacts) -> float:
    """Bytes of a quantized weight with its share of the scales: nf4 and fp4 have one for each
    block, int8 one for each row.
    """
    if model.quantized_bytes:
        return model.quantized_bytes
    packed = _bits(model) / 8
    if model.quantized == "int8":
        return packed + 4 / model.hidden_size
    if not model.quantized_double:
        return packed + 4 / _BLOCK
    return packed + (1 + 4 / _BLOCKS) / _BLOCK


def _bits(model: ModelFacts) -> float:
    return model.quantized_bits or (8 if model.quantized == "int8" else 4)

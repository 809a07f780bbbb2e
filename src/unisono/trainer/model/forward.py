"""The forward over the rows of a micro batch, and the choice between its implementations.

Letters: T tokens of all rows, R rows, L tokens of the longest row, N loss tokens, E hidden size, V
vocabulary.

A reward model has a head that gives one value for a row; it has no logits.

The fast implementation is flat (rows concatenated, `model.attention`) with the head at loss tokens
only. Whether a model supports it is not looked up in a list of names, but tested on two short rows
after loading: the outputs of the rows must not depend on each other, and must equal those of the
unmodified model for each row alone. A model that fails the test runs on padded rows, with its own
attention or its own head: slower, but correct. Layers with a state get kernels that reset it, or
padded rows, by the same test.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from peft.utils import ModulesToSaveWrapper

from unisono.base.errors import ModelError
from unisono.base.text import library_words, one_line
from unisono.trainer.config.training_sections import RouterLossSection
from unisono.trainer.model.attention import (
    FLAT_ATTENTION,
    Ends,
    Merged,
    UnsupportedAttentionError,
    attention_of,
    merge,
    register,
    set_attention,
    shorten_last_layer,
    to_device,
)
from unisono.trainer.model.cuda_graphs import LARGEST_MODEL, StepGraphs
from unisono.trainer.model.decoder import (
    release_originals,
    release_scratch,
    slow_down_layers,
    speed_up_layers,
)
from unisono.trainer.model.directory import SCORE
from unisono.trainer.model.frozen_vision import FrozenVision, KeptPictures, in_dtype_of
from unisono.trainer.model.layers import (
    head_log_probs,
    head_loss,
    logits_log_probs,
    logits_loss,
    scale_rows_apart,
    scale_rows_together,
    speed_up_lora,
    why_no_kernels,
)
from unisono.trainer.model.load import DTYPES, LIBRARY_ERRORS, LoadedModel
from unisono.trainer.model.multimodal import body_of, with_vision
from unisono.trainer.model.parts import parts_of
from unisono.trainer.model.quantization import PackedHead, quantized_layers, times_transposed
from unisono.trainer.model.routers import Routers, find_routers
from unisono.trainer.model.state_layers import pad_rows, row_numbers, state_layers, unpad_rows
from unisono.trainer.plan.families import ROW_COUNTS

Layout = Literal["flat", "padded"]
Head = Literal["chunked", "model"]
T = TypeVar("T")


@dataclass(frozen=True)
class PictureInputs:
    """The pictures of rows as their model gets them.

    Attributes:
        tensors: arguments of its forward, e.g. `pixel_values`; the first axis of each is of
            pictures, tiles or patches.
        image_ids: the tokens of which each stands for a feature of a picture, and of a video if
            that is a different one.
        kept: in place of tensors, pictures whose features a vision part that is not trained
            computes once.
    """

    tensors: Mapping[str, torch.Tensor]
    image_ids: Sequence[int]
    kept: KeptPictures | None = None

    @classmethod
    def of(
        cls, parts: Sequence[Mapping[str, torch.Tensor]], image_ids: Sequence[int], device: torch.device
    ) -> "PictureInputs | None":
        """Those of several pictures in order; None without any.

        Where pictures differ along another axis than the first, e.g. in the number of tiles, zeros
        are behind the smaller ones, which models of tiles ignore.
        """
        if not parts:
            return None
        names = dict.fromkeys(name for part in parts for name in part)  # videos have other ones
        tensors = {
            name: _behind_each_other([part[name] for part in parts if name in part]).to(device)
            for name in names
        }
        return cls(tensors, image_ids)

    def in_full(self) -> "PictureInputs":
        """The same with tensors, for a model that gets pixels."""
        if self.kept is None:
            return self
        made = self.of(self.kept.tensors(), self.image_ids, self.kept.vision.device)
        assert made is not None
        return made

    def arguments(self, ids: torch.Tensor, module: Any) -> dict[str, Any]:
        """The arguments for rows of tokens (…, T).

        Args:
            ids: the tokens.
            module: that gets them; it may need the kind of each token.
        """
        names = inspect.signature(module.forward).parameters
        kinds = torch.zeros_like(ids)
        for kind, token in enumerate(self.image_ids, 1):
            kinds[ids == token] = kind
        kinds_names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in names]
        tensors = dict(self.tensors if self.kept is None else self.kept.arguments())
        if ROW_COUNTS in tensors:
            tensors[ROW_COUNTS] = _counts_of_rows(tensors[ROW_COUNTS])
        return {**in_dtype_of(module, tensors), **dict.fromkeys(kinds_names, kinds)}


@dataclass(frozen=True)
class PictureProbe:
    """Rows with pictures on which implementations of the forward are compared.

    Attributes:
        rows: with their pictures.
        alone: the pictures of each row.
    """

    rows: "Rows"
    alone: Sequence[PictureInputs]


@dataclass(frozen=True)
class Rows:
    """The rows of one micro batch, concatenated.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, from 0 in every row.
        lengths: tokens of each row; they sum to T.
        label_index: (N,) int64, the positions among T whose hidden state predicts a loss token.
        labels: (N,) int64, the tokens to predict.
        noise: (T, E) float32, added to the input embeddings; None for none.
        loss_counts: loss tokens of each row; they sum to N. Needed by sums of rows only.
        common: for each row, how many of its first tokens are those of the row before it, which has
            none itself; empty: none are known.
        weights: (N,) float32, the weight of each loss token, up to 1; None: all count in full.
        ends: where the rows end, if the device knows it already; None: it follows from their
            lengths.
        pictures: of all rows; None: there are none.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    label_index: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor | None = None
    loss_counts: list[int] = field(default_factory=list)
    common: list[int] = field(default_factory=list)
    weights: torch.Tensor | None = None
    ends: Ends | None = None
    pictures: PictureInputs | None = None

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """(R,): the sums of values (N,) at the loss tokens of each row; 0 for a row without any."""
        return torch.stack([part.sum() for part in values.split(self.loss_counts)])


@dataclass
class Forward:
    """A loaded model and the implementation of its forward pass."""

    loaded: LoadedModel
    layout: Layout
    head: Head
    dtype: torch.dtype
    autocast: bool
    own_attention: str
    """The model's own attention; generation uses it."""
    why: str = ""
    """Why the fast implementation is not used, if so."""
    rows_apart: list[torch.nn.Module] = field(default_factory=list)
    """Modules of dynamic RoPE, which is scaled row by row except in generation."""
    states: list[torch.nn.Module] = field(default_factory=list)
    """Layers with a state, which rows must not share (`model.state_layers`)."""
    states_reset: bool = False
    """Whether their kernels reset it where a row ends; in flat rows they compute padded ones
    otherwise.
    """
    merges: bool = False
    """Whether the common beginnings of rows are computed once."""
    root: Callable[..., Any] | None = None
    """Set if weights are sharded over ranks: every use of them goes through it
    (`train.sharding`).
    """
    quick: bool = False
    """Whether each adapted layer computes the products of its weight and its adapter in one
    function.
    """
    fast_layers: int = 0
    """Norms, MLPs and attentions that are one function each (`model.decoder`)."""
    shortens: bool = False
    """Whether the last layer computes what follows its attention at loss tokens only."""
    graphs: StepGraphs | None = None
    """Launches the kernels of a loss at once, where launching them one by one takes longer than the
    device.
    """
    routers: Routers | None = None
    """Of a mixture of experts: its routers."""

    @property
    def padded(self) -> str:
        """Which layers compute padded rows, and why; empty if none does."""
        kinds = Counter(type(layer).__name__ for layer in self.states)
        states = (
            f"layers with a state: {', '.join(f'{n} × {kind}' for kind, n in kinds.items())}" if kinds else ""
        )
        if self.layout == "padded":
            return f"all layers: {self.why}; {states}" if states else f"all layers: {self.why}"
        return "" if self.states_reset else states

    def frozen_vision(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> FrozenVision | None:
        """The vision part if its features can be kept, by a test with samples; else None."""

        def tested() -> FrozenVision | None:
            with self._precision():
                return FrozenVision.of(self.loaded.base, samples)

        return self.within(tested)

    def within(self, use: Callable[[], T], *, apart: bool = False) -> T:
        """Returns the result of `use`, called where sharded weights can be used.

        With sharded weights all ranks must call it alike.

        Args:
            use: what computes. Each of its forwards gathers weights, so all ranks must make the
                same number of them.
            apart: gathers all weights before, so that the forwards of ranks may differ.
        """
        if self.root is None:
            return use()
        result: T = self.root(use, apart=apart)
        return result

    def loss(self, rows: Rows, *, count: int, smoothing: float = 0.0) -> torch.Tensor:
        """Returns the sum of the cross entropy over the loss tokens of these rows, divided by
        `count`: a float32 scalar with a gradient.

        Args:
            rows: the micro batch.
            count: loss tokens of the global batch.
            smoothing: the share of the target probability that is spread evenly over the vocabulary
                (arXiv:1512.00567).
        """
        if self.graphs is not None and not smoothing and rows.pictures is None and torch.is_grad_enabled():
            loss = self.graphs.loss(rows, count)
            if loss is not None:
                return loss
        return self.within(lambda: self._loss(rows, count, smoothing))

    def use_graphs(self, *, most_tokens: int, longest: int) -> None:
        """Computes losses with CUDA graphs from now on, if the model is small enough and nothing in
        its forward pass waits for the device.

        Args:
            most_tokens: of a micro batch.
            longest: tokens of a row at most.
        """
        loaded = self.loaded
        is_small = loaded.base.device.type == "cuda" and loaded.parameters < LARGEST_MODEL
        never_waits = self.fast_layers > 0 and self.head == "chunked" and not (self.rows_apart or self.states)
        never_waits = never_waits and self.routers is None  # experts wait for the number of their tokens
        if is_small and never_waits and self.root is None and not any(quantized_layers(loaded.model)):
            self.graphs = StepGraphs(
                lambda rows, count: self._loss(rows, count, 0.0),
                list(loaded.trainable.values()),
                most_tokens=most_tokens,
                longest=longest,
            )

    def _loss(self, rows: Rows, count: int | torch.Tensor, smoothing: float) -> torch.Tensor:
        how: Any = {"count": count, "smoothing": smoothing}
        with self._precision(), self._embedded(rows), self._recorded(rows):
            if self.head == "chunked":
                weight, scale = _head_matrix(self.loaded.base)
                return head_loss(
                    self._hidden(rows), weight, rows.labels, dtype=self.dtype, scale=scale, **how
                )
            return logits_loss(self._logits(rows), rows.labels, **how)

    def log_probs(self, rows: Rows, *, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-probability of each loss token: (N,) float32 with a gradient.

        Args:
            rows: the micro batch.
            temperature: that logits are divided by.
        """
        return self.within(lambda: self._log_probs(rows, temperature))

    def _log_probs(self, rows: Rows, temperature: float) -> torch.Tensor:
        with self._precision(), self._embedded(rows), self._recorded(rows):
            if self.head == "chunked":
                weight, scale = _head_matrix(self.loaded.base)
                hidden = self._hidden(rows)
                hidden = hidden if temperature == 1 else hidden / temperature
                return head_log_probs(hidden, weight, rows.labels, dtype=self.dtype, scale=scale)
            logits = self._logits(rows)
            return logits_log_probs(logits if temperature == 1 else logits / temperature, rows.labels)

    def logits(self, rows: Rows) -> torch.Tensor:
        """Returns the logits at the loss tokens: (N, V) float32."""
        return self.within(lambda: self._precise_logits(rows))

    def _precise_logits(self, rows: Rows) -> torch.Tensor:
        with self._precision():
            return self._logits(rows).float()

    def scores(self, rows: Rows) -> torch.Tensor:
        """Returns a reward model's score of each row: (R,) float32 with a gradient."""
        return self.row_values(rows)[:, 0]

    def row_values(self, rows: Rows) -> torch.Tensor:
        """Returns the values that the head of a reward model or classifier gives to each row, at
        its last token that is not padding: (R, outputs) float32 with a gradient.

        The rule for the token is that of transformers' sequence classification, so that the saved
        model gives the same values.
        """
        return self.within(lambda: self._row_values(rows))

    def _row_values(self, rows: Rows) -> torch.Tensor:
        base = self.loaded.base
        with self._precision(), self._embedded(rows), self._recorded(rows):
            if self.head == "model":  # only padded rows have values of their own in the model's own forward
                ids, _, _ = _padded_inputs(rows, fill=_pad_of(base))
                return base(input_ids=ids, use_cache=False).logits.float()
            last = _last_tokens(rows, _pad_of(base))
            hidden = self._hidden(replace(rows, label_index=last))
        return head_values(base, hidden)

    def embeddings(self, rows: Rows, *, pooling: Literal["last", "mean"]) -> torch.Tensor:
        """Returns the last hidden state of each row's last token, or the mean over all its tokens:
        (R, E) float32 with a gradient.
        """
        return self.within(lambda: self._embeddings(rows, pooling))

    def _embeddings(self, rows: Rows, pooling: Literal["last", "mean"]) -> torch.Tensor:
        lengths = torch.tensor(rows.lengths, device=rows.input_ids.device)
        index = torch.arange(len(rows.input_ids), device=lengths.device)
        index = lengths.cumsum(0) - 1 if pooling == "last" else index
        apart = replace(rows, label_index=index, common=[0] * len(rows.lengths))  # each token has a state
        with self._precision(), self._embedded(rows), self._recorded(rows):
            hidden = self._hidden(apart).float()
        if pooling == "last":
            return hidden
        row_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden.new_zeros(len(lengths), hidden.shape[1]).index_add(0, row_of, hidden)
        return sums / lengths[:, None]

    @contextlib.contextmanager
    def without_adapter(self) -> Any:
        """A context in which the adapter is off: the model gives the outputs of its base model."""
        with self.loaded.model.disable_adapter():
            yield

    @contextlib.contextmanager
    def _embedded(self, rows: Rows) -> Any:
        """A context in which the rows' noise is added to the output of the embedding, and of rows
        without pictures 0 times the parameters of sharded weights that pictures alone reach.

        Every rank reduces the same gradients then, in the same order, whatever rows it has: the
        input of the first layer needs a gradient with pictures, too.
        """
        added = []
        if rows.noise is not None:
            added.append(rows.noise[None] if self.layout == "flat" else _padded_values(rows, rows.noise))
        if self.loaded.of_pictures and rows.pictures is None and torch.is_grad_enabled():
            values = (getattr(module, name).view(-1)[0] for module, name in self._of_pictures)
            added.append(0.0 * torch.stack([value.float() for value in values]).sum())
        if not added:
            yield
            return

        def add(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            del module, inputs
            for value in added:  # (1, T, E), (R, L, E), or a scalar
                output = output + value.to(output.dtype)
            return output

        hook = self.loaded.base.get_input_embeddings().register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()

    @cached_property
    def _of_pictures(self) -> list[tuple[torch.nn.Module, str]]:
        """The modules of `LoadedModel.of_pictures`, and their names in these."""
        places = (name.rpartition(".") for name in self.loaded.of_pictures)
        return [(self.loaded.model.get_submodule(module), name) for module, _, name in places]

    def _recorded(self, rows: Rows) -> contextlib.AbstractContextManager[None]:
        """A context in which the decisions of routers are recorded, in training."""
        if self.routers is None or not self.loaded.model.training:
            return contextlib.nullcontext()
        return self.routers.recording(_padded_places(rows) if self.layout == "padded" else None)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.loaded.base.device.type, dtype=self.dtype)

    def _hidden(self, rows: Rows) -> torch.Tensor:
        """(N, E): the last hidden states at the positions that predict loss tokens."""
        if self.layout == "flat":
            merged = self._merged(rows)
            index = rows.label_index if merged is None else merged.place[rows.label_index]
            options = {"wanted_tokens": index} if self.shortens else {}
            hidden = self._reader(rows)(
                **_flat_inputs(rows, merged, numbered=self.states_reset), **options
            ).last_hidden_state[0]
            return hidden if self.shortens else hidden[index]
        ids, row, column = _padded_inputs(rows)
        return self._reader(rows)(input_ids=ids, use_cache=False).last_hidden_state[row, column]

    def _reader(self, rows: Rows) -> Callable[..., Any]:
        """What gives the hidden states of rows: the decoder; for pictures the module around it and
        the vision part.
        """
        pictures = self._pictures_of(rows)
        if pictures is None:
            return self._body
        base = self.loaded.base
        return _states_of(base, pictures) if self._seer is base else _seeing(self._seer, pictures)

    def _pictures_of(self, rows: Rows) -> PictureInputs | None:
        """The pictures of rows; in full if features of them are kept of a different model."""
        pictures = rows.pictures
        if pictures is None or pictures.kept is None or pictures.kept.vision.module is self._seer:
            return pictures
        return pictures.in_full()

    @cached_property
    def _seer(self) -> Any:
        return with_vision(self.loaded.base)

    @cached_property
    def _body(self) -> Any:
        return body_of(self.loaded.base)

    def _logits(self, rows: Rows) -> torch.Tensor:
        """(N, V): the logits of the model's own head."""
        if self.layout == "flat":
            merged = self._merged(rows)
            index = rows.label_index if merged is None else merged.place[rows.label_index]
            return self._whole(rows)(
                **_flat_inputs(rows, merged, numbered=self.states_reset), logits_to_keep=index
            ).logits[0]
        ids, row, column = _padded_inputs(rows)
        return self._whole(rows)(input_ids=ids, use_cache=False).logits[row, column]

    def _whole(self, rows: Rows) -> Callable[..., Any]:
        """What gives the logits of rows."""
        base, pictures = self.loaded.base, self._pictures_of(rows)
        return base if pictures is None else _seeing(base, pictures)

    def _merged(self, rows: Rows) -> Merged | None:
        """Which tokens are computed; None for all."""
        if not self.merges or rows.noise is not None or rows.pictures is not None or not any(rows.common):
            return None
        return merge(rows.lengths, rows.common, rows.input_ids.device)

    @contextlib.contextmanager
    def ready_to_generate(self) -> Any:
        """A context in which the model uses its own attention, for padded batches of prompts with a
        cache.
        """
        base = self.loaded.base
        if self.layout == "flat":
            set_attention(base, self.own_attention)
        scale_rows_together(self.rows_apart)
        try:
            with self._precision():
                yield self.loaded.model
        finally:
            if self.layout == "flat":
                set_attention(base, FLAT_ATTENTION)
            self.rows_apart = scale_rows_apart(base)


def choose_forward(
    loaded: LoadedModel,
    *,
    dtype: str,
    quick_adapter: bool,
    gradient_checkpointing: bool,
    root: Callable[..., Any] | None = None,
    trains: bool = True,
    fast_layers: bool = True,
    router_loss: RouterLossSection | None = None,
    pictures: PictureProbe | None = None,
) -> Forward:
    """Finds the fastest implementation that is correct for this model, by testing.

    Args:
        loaded: the model; its weights are not changed.
        dtype: of the computation.
        quick_adapter: whether only plain LoRA matrices are trained.
        gradient_checkpointing: whether activations are recomputed in the backward pass.
        root: the root of sharded weights; all ranks must call this function then.
        trains: whether there will be backward passes.
        fast_layers: whether the forward of layers may be replaced.
        router_loss: the losses of routers, for which every layer has all tokens of each row.
        pictures: rows of the run with pictures, if it has any.

    Raises:
        ModelError: if rows would influence each other, the model fails on two short rows, or it
            cannot have losses of routers.
    """
    register()
    base = loaded.base
    if gradient_checkpointing:
        # transformers 5.20 renamed it, and warns about the old name.
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    attention = attention_of(base)
    # The head of a reward model is trained, too; it is computed in float32.
    others = len(list(_score_head(base).parameters())) if loaded.has_score else 0
    quick = quick_adapter and speed_up_lora(loaded.model) * 2 == len(loaded.trainable) - others
    autocast = dtype != "float32" and not quick
    forward = Forward(loaded, "padded", "model", DTYPES[dtype], autocast, attention, root=root, quick=quick)
    forward.rows_apart, forward.states = scale_rows_apart(base), state_layers(base)
    was_training = loaded.model.training
    loaded.model.eval()
    with torch.no_grad():
        reference = forward.within(lambda: _reference(forward, trains=trains))
        if loaded.has_score:
            forward.within(lambda: _try_score(forward))
        else:
            forward.within(lambda: _refuse_sight_of_later_tokens(forward, reference))
            forward.within(lambda: _try_head(forward, reference))
        if not loaded.has_score or forward.head == "chunked":
            forward.within(lambda: _try_flat(forward, reference))
        seen = forward.within(lambda: _try_pictures(forward, pictures))
        if not loaded.has_score and forward.layout == "padded":
            forward.within(lambda: _refuse_influence_of_padding(forward, reference))
        if trains:
            forward.routers = forward.within(lambda: _find_routers(forward, router_loss))
        merges = not (forward.rows_apart or forward.states) and router_loss is None
        if forward.layout == "flat" and merges:
            forward.within(lambda: _try_merging(forward))
        if forward.layout == "flat" and forward.head == "chunked" and router_loss is None:
            forward.within(lambda: _try_last_layer(forward))
        # The head of a reward model needs its hidden states in float32.
        is_full = loaded.model is base and fast_layers and not loaded.has_score
        if forward.layout == "flat" and dtype == "bfloat16" and (is_full or quick):
            compiles = base.device.type == "cuda" and root is None
            forward.within(lambda: _try_layers(forward, reference, compiles=compiles, trains=trains))
        forward.within(lambda: _refuse_other_pictures(forward, pictures, seen))
    loaded.model.train(was_training)
    _refuse_padded_rope(forward)
    return forward


def _refuse_padded_rope(forward: Forward) -> None:
    if forward.rows_apart and forward.layout == "padded":
        raise ModelError.of(
            "dynamic RoPE would make rows depend on each other in this model",
            where="model.rope",
            why=f"its rows are padded to the longest of a batch: {forward.why}",
            fix="use kind: yarn, linear or llama3",
        )


def _probe_rows(base: Any, *, first: int) -> Rows:
    """Two rows, of 6 and 9 tokens; `first` changes the tokens of the first row only."""
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = [(first + 7 * i) % vocabulary for i in range(6)] + [(3 + 5 * i) % vocabulary for i in range(9)]
    positions = [*range(6), *range(9)]
    index = [i for i in range(15) if i not in (5, 14)]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=base.device)

    return Rows(tensor(ids), tensor(positions), [6, 9], tensor(index), tensor([ids[i + 1] for i in index]))


def _reference(forward: Forward, *, trains: bool) -> torch.Tensor:
    """`_alone`, whose failure is that of the model or of the layers that peft has put into it; in
    training mode, too, in which a model may do more.
    """
    model, device = forward.loaded.model, forward.loaded.base.device
    try:
        if trains:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                model.train()
                _alone(forward)
                model.eval()
        return _alone(forward)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors of the device, not of the model
        raise
    except LIBRARY_ERRORS as error:
        adapted = forward.loaded.model is not forward.loaded.base
        where, fix = "model.path" if trains else "RUN|MODEL", "pip install --upgrade transformers"
        if adapted and trains:
            where = "adapter.targets"
            fix = "set adapter.targets to fewer parts, e.g. attention, or adapter: null"
        elif adapted:
            fix = "pip install --upgrade transformers peft"
        raise ModelError.of(
            f"the model fails on two short rows{' with its adapter' if adapted else ''}",
            where=where,
            why=library_words(error),
            fix=fix,
        ) from error


def _alone(forward: Forward) -> torch.Tensor:
    """(N, V): the probe's logits, with each row alone through the unmodified model; of a reward
    model (N, E), its last hidden states.
    """
    rows = _probe_rows(forward.loaded.base, first=11)
    base = forward.loaded.base
    body = body_of(base)
    with forward._precision():  # noqa: SLF001 - same module
        parts = [
            (
                body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1].float()
                if forward.loaded.has_score
                else base(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            )
            for ids in rows.input_ids.split(rows.lengths)
        ]
    return torch.cat(parts)


def _refuse_influence_of_padding(forward: Forward, reference: torch.Tensor) -> None:
    """Refuses a model whose rows are not the same in a padded batch.

    Raises:
        ModelError: if padding after a row changes its logits.
    """
    rows = _probe_rows(forward.loaded.base, first=11)
    with forward._precision():  # noqa: SLF001 - same module
        logits = forward._logits(rows).float()  # noqa: SLF001
    if _changed(logits, reference, forward.dtype):
        raise ModelError.of(
            "the rows of a batch would influence each other in this model",
            where="model.path",
            why="its logits change when a row is padded to the length of another",
            fix="use a different model",
        )


def _refuse_sight_of_later_tokens(forward: Forward, reference: torch.Tensor) -> None:
    """Refuses an encoder, or a model that reads prompts in both directions, as PaliGemma does: a
    token that sees the next one learns to copy it.

    Shapes are those of the reference, so the logits of a decoder are the same to the bit in any
    dtype, unless experts share their products between tokens.

    Raises:
        ModelError: if the last token of a row changes the logits of those before it.
    """
    base = forward.loaded.base
    dtype = forward.dtype if "experts" in parts_of(base).values() else torch.float32
    ids = _probe_rows(base, first=11).input_ids[6:].clone()
    ids[-1] = ids[0]
    with forward._precision():  # noqa: SLF001 - same module
        logits = base(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    if _changed(logits, reference[5:], dtype):
        is_encoder = getattr(base.config, "is_decoder", None) is False
        raise ModelError.of(
            f"{type(base).__name__} reads text in both directions",
            where="model.path",
            why="the logits of a token depend on the tokens after it, which it has to predict",
            fix=(
                "set is_decoder: true in its config.json"
                if is_encoder
                else "use a model with causal attention"
            ),
        )


def _find_routers(forward: Forward, section: RouterLossSection | None) -> Routers | None:
    rows = _probe_rows(forward.loaded.base, first=11)
    with forward._precision():  # noqa: SLF001 - same module
        return find_routers(forward.loaded.base, lambda: forward._hidden(rows), section=section)  # noqa: SLF001


def _try_score(forward: Forward) -> None:
    """Chooses the head of a reward model at last tokens only if that gives the values of the
    model's own forward of padded rows.
    """
    base = forward.loaded.base
    rows = _probe_rows(base, first=11)
    lengths = [n for length in rows.lengths for n in range(1, length + 1)]
    starts = [0] * rows.lengths[0] + [rows.lengths[0]] * rows.lengths[1]
    ids = torch.cat([rows.input_ids[start : start + n] for start, n in zip(starts, lengths, strict=True)])
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
    prefixes = replace(rows, input_ids=ids, position_ids=positions, lengths=lengths)  # 15 rows
    with torch.autocast(base.device.type, dtype=forward.dtype, enabled=forward.dtype != torch.float32):
        reference = forward._row_values(prefixes)  # noqa: SLF001 - same module
    forward.head = "chunked"
    if not _alike(forward._row_values(prefixes), reference, forward.dtype):  # noqa: SLF001
        forward.head, forward.why = "model", "its values are more than last hidden states times one matrix"
        forward.autocast = forward.dtype != torch.float32  # its head has the dtype of its weights


def _score_head(base: Any) -> Any:
    """The head of a reward model, or what peft trains in its place."""
    return _trained(getattr(base, SCORE))


def head_values(base: Any, hidden: torch.Tensor) -> torch.Tensor:
    """(…, outputs) float32: what the head of a reward model or classifier gives for hidden states
    (…, E).

    A difference of two needs more digits than bfloat16 has.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.nn.functional.linear(hidden.float(), _score_head(base).weight.float())


def _pad_of(base: Any) -> int:
    """The padding token of a reward model."""
    return int(base.config.get_text_config().pad_token_id)


def _last_tokens(rows: Rows, pad: int) -> torch.Tensor:
    """(R,) int64: the positions among T of each row's last token that is not `pad`; of its first
    one if all are.
    """
    lengths = torch.tensor(rows.lengths, device=rows.input_ids.device)
    starts = lengths.cumsum(0) - lengths  # (R,)
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)  # (T,)
    places = torch.where(rows.input_ids != pad, rows.position_ids, 0)
    return starts + starts.new_zeros(len(lengths)).scatter_reduce(0, row_of, places, "amax")


def _try_head(forward: Forward, reference: torch.Tensor) -> None:
    """Chooses the chunked head if the model's head is one matrix, and the logits equal the model's
    own.
    """
    head = _head_of(forward.loaded.base)
    settings = forward.loaded.base.config.get_text_config()
    # With small logits the test below would not detect that they are capped.
    capped = getattr(settings, "final_logit_softcapping", None) is not None
    plain = isinstance(head, PackedHead) or (type(head) is torch.nn.Linear and head.bias is None)
    if not plain or capped:
        forward.why = "its head is more than one matrix"
        return
    rows = _probe_rows(forward.loaded.base, first=11)
    with forward._precision():  # noqa: SLF001 - same module
        hidden = forward._hidden(rows)  # noqa: SLF001
        weight, scale = _head_matrix(forward.loaded.base)
        weight = weight.to(forward.dtype) if scale is None else weight
        logits = times_transposed(hidden.to(forward.dtype), weight, scale).float()
    if _alike(logits, reference, forward.dtype):
        forward.head = "chunked"
    else:
        forward.why = "its logits are more than hidden states times one matrix"


def _head_of(base: Any) -> Any:
    """The head, or what peft trains in its place."""
    return _trained(base.get_output_embeddings())


def _head_matrix(base: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The head's weight (V, E), and the scales (V,) of one in int8."""
    head = _head_of(base)
    return head.weight, head.scale if isinstance(head, PackedHead) else None


def _trained(head: Any) -> Any:
    """A module, or what peft trains in its place."""
    if not isinstance(head, ModulesToSaveWrapper):
        return head
    return head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]


def _try_flat(forward: Forward, reference: torch.Tensor) -> None:
    """Chooses the flat layout if rows do not influence each other, and each gives the same output
    as alone.
    """
    base, states = forward.loaded.base, forward.states
    # A model without this flag (transformers 5.23: not public) does not use the attention
    # interface, and would keep its own attention; models with states may use it without the flag.
    if not (states or getattr(base, "_supports_attention_backend", False)):
        forward.why = "its attention cannot be replaced"
        return
    set_attention(base, FLAT_ATTENTION)
    forward.layout, forward.states_reset = "flat", bool(states)
    why = _why_not_flat(forward, reference)
    if why and states:
        forward.states_reset = False
        pad_rows(states)
        why = _why_not_flat(forward, reference)
    if not why:
        return
    unpad_rows(states)
    forward.layout, forward.why = "padded", why
    set_attention(base, forward.own_attention)


def _behind_each_other(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors joined along the first axis, with zeros where one is smaller along another."""
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        larger = value
        if list(value.shape[1:]) != shape:
            larger = value.new_zeros(value.shape[0], *shape)
            larger[tuple(map(slice, value.shape))] = value
        padded.append(larger)
    return torch.cat(padded)


def _counts_of_rows(counts: torch.Tensor) -> torch.Tensor:
    """The numbers of pictures of rows from a value for each picture, which is 1 for the only one of
    a row. Adjacent rows with several count as one, which is the same to models.
    """
    rows: list[int] = []
    for alone, run in groupby((counts == 1).tolist()):
        number = len(list(run))
        rows += [1] * number if alone else [max(number, 2)]
    return counts.new_tensor(rows)


def _seeing(module: Any, pictures: PictureInputs) -> Callable[..., Any]:
    """The forward of a module with pictures beside the tokens."""

    def forward(*, input_ids: torch.Tensor, **inputs: Any) -> Any:
        return module(input_ids=input_ids, **inputs, **pictures.arguments(input_ids, module))

    return forward


def _states_of(base: Any, pictures: PictureInputs) -> Callable[..., Any]:
    """What the decoder of a model gives, for one whose vision part is beside its head."""
    body, whole = body_of(base), _seeing(base, pictures)

    def forward(**inputs: Any) -> Any:
        outputs: list[Any] = []
        hook = body.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            whole(**inputs, logits_to_keep=1)
        finally:
            hook.remove()
        return outputs[0]

    return forward


def _alone_with_pictures(forward: Forward, probe: PictureProbe) -> torch.Tensor:
    """(N, V): the logits at loss tokens, with each row alone through the unmodified model."""
    base, rows = forward.loaded.base, probe.rows
    layout = forward.layout
    if layout == "flat":
        set_attention(base, forward.own_attention)
    with forward._precision():  # noqa: SLF001 - same module
        parts = [
            _seeing(base, pictures)(input_ids=ids[None], use_cache=False).logits[0].float()
            for ids, pictures in zip(rows.input_ids.split(rows.lengths), probe.alone, strict=True)
        ]
    if layout == "flat":
        set_attention(base, FLAT_ATTENTION)
    return torch.cat(parts)[rows.label_index]


def _try_pictures(forward: Forward, probe: PictureProbe | None) -> torch.Tensor | None:
    """Keeps the flat layout only if rows with pictures are the same in it; gives their logits, None
    without any.
    """
    if probe is None:
        return None
    seen = _alone_with_pictures(forward, probe)
    if forward.layout != "flat":
        return seen
    try:
        with forward._precision():  # noqa: SLF001 - same module
            alike = _alike(forward._logits(probe.rows).float(), seen, forward.dtype)  # noqa: SLF001
        why = "" if alike else "rows with pictures in one sequence influence each other"
    except UnsupportedAttentionError as error:
        why = f"its attention needs {error} for pictures"
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        why = f"flat rows with pictures failed: {type(error).__name__}"
    if why:
        unpad_rows(forward.states)
        forward.layout, forward.why = "padded", why
        set_attention(forward.loaded.base, forward.own_attention)
    return seen


def _refuse_other_pictures(forward: Forward, probe: PictureProbe | None, seen: torch.Tensor | None) -> None:
    """Refuses a model whose rows with pictures are not the same in a batch as alone.

    Raises:
        ModelError: then.
    """
    if probe is None or seen is None:
        return
    with forward._precision():  # noqa: SLF001 - same module
        if forward.head == "chunked":
            weight, scale = _head_matrix(forward.loaded.base)
            weight = weight.to(forward.dtype) if scale is None else weight
            hidden = forward._hidden(probe.rows).to(forward.dtype)  # noqa: SLF001
            logits = times_transposed(hidden, weight, scale).float()
        else:
            logits = forward._logits(probe.rows).float()  # noqa: SLF001
    if _changed(logits, seen, forward.dtype):
        raise ModelError.of(
            "this model computes different values for rows with pictures in a batch than alone",
            where="model.path",
            why="its logits change with the other rows of the batch",
            fix="set batch.micro: 1 and data.packing: false, or use a different model",
        )


def _why_not_flat(forward: Forward, reference: torch.Tensor) -> str:
    """Why the flat layout cannot be used; empty if it can."""
    base = forward.loaded.base
    try:
        with forward._precision():  # noqa: SLF001 - same module
            values = forward._hidden if forward.loaded.has_score else forward._logits  # noqa: SLF001
            logits = values(_probe_rows(base, first=11)).float()
            moved = values(_probe_rows(base, first=12)).float()
    except UnsupportedAttentionError as error:
        return f"its attention needs {error}"
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return f"flat rows failed: {type(error).__name__}"
    # A change of the first row, with its five predictions, must not change the second row.
    if torch.allclose(logits[5:], moved[5:], rtol=1e-4, atol=1e-5) and _alike(
        logits, reference, forward.dtype
    ):
        return _why_other_tokens_seen(base) or _why_not_in_training(forward)
    return "rows in one sequence influence each other"


def _why_other_tokens_seen(base: Any) -> str:
    """Why a long row would see more in the flat attention than by the model's masks, which it does
    not get; empty if it would not. The probe's rows are shorter than a window.
    """
    settings = base.config.get_text_config()
    kinds = set(getattr(settings, "layer_types", None) or ())
    if "chunked_attention" in kinds:
        return "its attention sees chunks of a row, by its mask alone"
    has_window = "sliding_attention" in kinds or (not kinds and getattr(settings, "sliding_window", None))
    used = [used for module in base.modules() if (used := getattr(module, "_flat_settings", None))]
    if has_window and all(window is None for _, window, _ in used):
        return "its attention has a window by its mask alone"
    return ""


def _why_not_in_training(forward: Forward) -> str:
    """What the flat attention lacks in training mode alone, i.e. dropout on probabilities; empty if
    nothing.

    Random numbers are not used up.
    """
    base = forward.loaded.base
    device = base.device
    forward.loaded.model.train()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            forward._precision(),  # noqa: SLF001 - same module
        ):
            values = forward._hidden if forward.loaded.has_score else forward._logits  # noqa: SLF001
            values(_probe_rows(base, first=11))
    except UnsupportedAttentionError as error:
        return f"its attention needs {error} in training"
    finally:
        forward.loaded.model.eval()
    return ""


def _try_merging(forward: Forward) -> None:
    """Computes common beginnings of rows once only if that gives the values of complete rows."""
    rows = _probe_rows(forward.loaded.base, first=11)
    ids = torch.cat([rows.input_ids[:6], rows.input_ids[:4], rows.input_ids[10:]])
    rows = replace(rows, input_ids=ids, common=[0, 4])
    values = forward._hidden if forward.head == "chunked" else forward._logits  # noqa: SLF001 - same module
    try:
        with forward._precision():  # noqa: SLF001
            complete = values(rows).float()
            forward.merges = True
            merged = values(rows).float()
    except (RuntimeError, TypeError, ValueError, IndexError):
        forward.merges = False
    else:
        forward.merges = _alike(merged, complete, forward.dtype)


def _try_last_layer(forward: Forward) -> None:
    """Shortens the last layer only if the hidden states stay the same."""
    base = forward.loaded.base
    rows = _probe_rows(base, first=11)
    rows = replace(rows, label_index=rows.label_index[::2])
    with forward._precision():  # noqa: SLF001 - same module
        complete = forward._hidden(rows).float()  # noqa: SLF001
        undo = shorten_last_layer(body_of(base))
        forward.shortens = undo is not None
        try:
            short = forward._hidden(rows).float()  # noqa: SLF001
        except (RuntimeError, TypeError, ValueError):
            short = complete[:0]
    if undo is not None and (short.shape != complete.shape or not _alike(short, complete, forward.dtype)):
        forward.shortens = False
        undo()


def _try_layers(forward: Forward, reference: torch.Tensor, *, compiles: bool, trains: bool) -> None:
    """Chooses the fast layers only if the outputs stay the same.

    On a GPU each function is compiled at its first call, which can fail, or give other values with
    another compiler. So there the gradients are compared, too, if there will be backward passes;
    with sharded weights one would sum over the ranks.
    """
    missing = why_no_kernels("bfloat16", forward.loaded.base.device)
    if missing:
        forward.why = f"the fast layers are not used: {missing}"
        return
    rows = _probe_rows(forward.loaded.base, first=11)
    values = forward._hidden if forward.loaded.has_score else forward._logits  # noqa: SLF001 - same module
    probed = _probed_parameters(forward) if compiles and trains else []
    before = _probe_gradients(forward, rows, probed) if probed else None
    changed: list[torch.nn.Module] = []
    why = "their values differ"
    try:
        changed = speed_up_layers(_decoder_of(forward.loaded))
        with forward._precision():  # noqa: SLF001
            alike = _alike(values(rows).float(), reference, forward.dtype)
        if alike and before is not None:
            alike = _alike(
                _probe_gradients(forward, rows, probed), before, forward.dtype, times=_GRADIENT_TIMES
            )
    except Exception as error:  # whatever a compiler raises
        if not compiles:
            raise
        alike, why = False, one_line(f"{type(error).__name__}: {error}", limit=300)
    if not alike:
        slow_down_layers(changed)
        forward.why = f"the fast layers are not used: {why}"
        return
    forward.fast_layers = len(changed)
    release_scratch(changed)
    if forward.loaded.base.device.type == "cpu":
        release_originals(forward.loaded.model)


def _decoder_of(loaded: LoadedModel) -> torch.nn.Module:
    """The modules that may become fast: those of a multimodal model's decoder alone."""
    base = loaded.base
    if base.config.get_text_config() is base.config:
        return loaded.model
    decoder: torch.nn.Module = body_of(base)
    return decoder


_PROBED_ELEMENTS = 1 << 25
_GRADIENT_TIMES = 4  # roundings add up once more on the way back, over few tokens


def _probed_parameters(forward: Forward) -> list[torch.nn.Parameter]:
    """Trained parameters in the model's order, as many as take little memory; those of the first
    layer are among them.
    """
    chosen, room = [], _PROBED_ELEMENTS
    for parameter in forward.loaded.trainable.values():
        if parameter.numel() <= room:
            chosen.append(parameter)
            room -= parameter.numel()
    return chosen


def _probe_gradients(forward: Forward, rows: Rows, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """(n,) float32: the gradients of these parameters; zeros for one that the loss does not
    reach.
    """
    with torch.enable_grad():
        loss = (
            forward._row_values(rows).sum()  # noqa: SLF001 - same module
            if forward.loaded.has_score
            else forward._loss(rows, len(rows.labels), 0.0)  # noqa: SLF001
        )
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([gradient.flatten().float() for gradient in gradients])


def _alike(values: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, *, times: float = 1) -> bool:
    """Whether they are equal up to rounding: the root mean square of the difference is small
    compared with the spread of the logits.

    Measured between correct implementations: 1e-6 in float32; 2 % in bfloat16 over 30 layers.
    Incorrect ones were never below 20 %.
    """
    tolerance = (2e-5 if dtype == torch.float32 else 0.06) * times
    return bool((values - reference).square().mean().sqrt() <= tolerance * reference.std().clamp_min(1e-6))


def _changed(values: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether they differ; infinite ones, of damaged weights, show nothing."""
    return bool(reference.isfinite().all()) and not _alike(values, reference, dtype)


def _flat_inputs(rows: Rows, merged: Merged | None, *, numbered: bool = False) -> dict[str, object]:
    """The keyword arguments of transformers for packed rows: (1, T) ids, or (1, S) of merged rows,
    and the boundaries of rows, with the row of each token if `numbered`.
    """
    if rows.ends is None:
        ends = to_device(np.cumsum([0, *rows.lengths], dtype=np.int32), rows.input_ids.device)
        longest = max(rows.lengths)
    else:
        ends, longest = rows.ends
    ids, positions = rows.input_ids, rows.position_ids
    if merged is not None:
        ids, positions = ids[merged.kept], positions[merged.kept]
    return {
        **({} if merged is None else {"merged": merged}),
        **({"seq_idx": row_numbers(ends, ids.shape[0])[None].int()} if numbered else {}),
        "input_ids": ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _padded_inputs(rows: Rows, *, fill: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(R, L) ids with padding on the right, which causal attention never reads, and row and column
    of each label position.
    """
    row_of = _rows_of_tokens(rows)
    shape = (len(rows.lengths), max(rows.lengths))
    ids = torch.full(shape, fill, dtype=torch.long, device=row_of.device)
    ids[row_of, rows.position_ids] = rows.input_ids
    return ids, row_of[rows.label_index], rows.position_ids[rows.label_index]


def _padded_values(rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """Values (T, E) of all tokens as (R, L, E), with zeros in the padding."""
    padded = values.new_zeros(len(rows.lengths), max(rows.lengths), values.shape[-1])
    padded[_rows_of_tokens(rows), rows.position_ids] = values
    return padded


def _padded_places(rows: Rows) -> torch.Tensor:
    """(T,) int64: the places of the tokens among the R · L of padded rows."""
    return _rows_of_tokens(rows) * max(rows.lengths) + rows.position_ids


def _rows_of_tokens(rows: Rows) -> torch.Tensor:
    """(T,) int64: the row of each token."""
    lengths = torch.tensor(rows.lengths, device=rows.input_ids.device)
    return torch.repeat_interleave(torch.arange(len(rows.lengths), device=lengths.device), lengths)

"""CUDA graphs of the loss and its gradients, for models whose kernels are shorter than the time in
which Python launches them.

A forward and backward pass of 135 M parameters has 3,300 kernels; an H100 needs a third of the time
for them that Python needs to launch them one by one. A graph launches all of them at once, but
always with the same tensors and numbers. So the rows of a micro batch are copied into buffers of
one of a few shapes, and what is left of a buffer changes nothing: padding tokens are rows of their
own, further rows have no tokens, and further labels are IGNORED. Each shape is computed as usual
the first time, which compiles what it needs, and recorded the second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.base.text import one_line
from unisono.trainer.model import foreach
from unisono.trainer.model.attention import Ends, to_device

IGNORED = -1
"""A label of no loss, for the kernels of a GPU."""
LARGEST_MODEL = 1_000_000_000
"""Parameters; the kernels of larger models take longer than their launch."""
_PARTS = 16  # buffers have a multiple of a sixteenth of the most tokens, so at most that much is padding
_ALIGNED = 64  # products of matrices are faster with such numbers of rows
_SHAPES = 8  # at once: each is held in memory


class Shape(NamedTuple):
    """Sizes of the buffers."""

    tokens: int
    rows: int
    labels: int


def shape_for(lengths: Sequence[int], labels: int, *, most_tokens: int, longest: int) -> Shape:
    """The smallest shape with room for rows of these lengths, and for the rows of padding
    tokens.

    There are few shapes for tokens and labels, and fewer for rows: one without tokens costs next to
    nothing.

    Args:
        lengths: tokens of each row.
        labels: loss tokens of all rows.
        most_tokens: of a micro batch.
        longest: tokens of a row at most.
    """
    part = -(-most_tokens // (_PARTS * _ALIGNED)) * _ALIGNED
    tokens = sum(lengths)
    room = -(-tokens // part) * part
    rows = len(lengths) + -(-(room - tokens) // longest)
    return Shape(room, 1 << (rows - 1).bit_length(), -(-labels // part) * part)


def ends_of(lengths: Sequence[int], shape: Shape, *, longest: int) -> Any:
    """(rows + 1,) int32: where each row of the buffers ends, after the rows of padding tokens those
    without tokens.
    """
    padding = shape.tokens - sum(lengths)
    pads = [min(longest, padding - first) for first in range(0, padding, longest)]
    ends = np.full(shape.rows + 1, shape.tokens, dtype=np.int32)
    row_ends = np.cumsum([0, *lengths, *pads], dtype=np.int32)
    ends[: len(row_ends)] = row_ends
    return ends


@dataclass
class _Recorded:
    """The buffers of one shape, and its graph."""

    rows: Any
    """The buffers, as rows of a micro batch."""
    count: torch.Tensor
    """() float32: loss tokens of the global batch."""
    uses: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    loss: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """One for each parameter, in the memory of the graph like `loss`: the next replay overwrites
    them.
    """


def _copies(recorded: _Recorded) -> tuple[Any, torch.Tensor]:
    """The rows and the count for a loss whose backward pass may come after the buffers have been
    filled again.
    """
    of = recorded.rows
    rows = replace(
        of,
        input_ids=of.input_ids.clone(),
        position_ids=of.position_ids.clone(),
        label_index=of.label_index.clone(),
        labels=of.labels.clone(),
        ends=Ends(of.ends.tokens.clone(), of.ends.longest),
    )
    return rows, recorded.count.clone()


class _Replay(torch.autograd.Function):
    """The loss of a replay; its gradients are there already."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, *parameters: torch.Tensor) -> torch.Tensor:
        """() float32."""
        del parameters
        assert recorded.graph is not None
        recorded.graph.replay()
        gradients = [gradient for gradient in recorded.gradients if gradient is not None]
        copies = list(map(torch.empty_like, gradients))
        foreach.copy_(copies, gradients)
        ctx.gradients = iter(copies)
        ctx.reached = [gradient is not None for gradient in recorded.gradients]
        return recorded.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the parameters."""
        gradients = list(ctx.gradients)
        foreach.multiply_(gradients, grad)
        remaining = iter(gradients)
        return None, *(next(remaining) if is_reached else None for is_reached in ctx.reached)


class StepGraphs:
    """Computes losses with a gradient by graphs.

    Attributes:
        why: why nothing is recorded any more; empty if something is.
    """

    def __init__(
        self,
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
        *,
        most_tokens: int,
        longest: int,
    ) -> None:
        """Records nothing yet.

        Args:
            loss: of rows, and the loss tokens of the global batch, () float32; it must not wait for
                the device.
            parameters: that are trained.
            most_tokens: of a micro batch.
            longest: tokens of a row at most.
        """
        self._loss, self._parameters = loss, list(parameters)
        self._most_tokens, self._longest = most_tokens, longest
        self._device = self._parameters[0].device
        self._recorded: dict[Shape, _Recorded] = {}
        self._pool: Any = None
        self.why = ""

    def loss(self, rows: Any, count: int) -> torch.Tensor | None:
        """The loss of the rows, with its gradient; None for rows that have to be computed in a
        different way.
        """
        labels = len(rows.labels)
        if self.why or rows.noise is not None or not labels or max(rows.lengths) > self._longest:
            return None
        shape = shape_for(rows.lengths, labels, most_tokens=self._most_tokens, longest=self._longest)
        if shape not in self._recorded:
            if not self._has_place():
                return None
            self._recorded[shape] = self._buffers(rows, shape)
        recorded = self._recorded[shape]
        self._fill(recorded, rows, shape, count)
        recorded.uses += 1
        if recorded.graph is None and recorded.uses > 1 and self._has_room():
            self._record(recorded)
        if recorded.graph is None:
            return self._loss(*_copies(recorded))
        loss: torch.Tensor = _Replay.apply(recorded, *self._parameters)
        return loss

    def _has_place(self) -> bool:
        """Whether there is a place for one more shape, if necessary that of the oldest which has
        come once only.
        """
        if len(self._recorded) >= _SHAPES:
            once = next((shape for shape, one in self._recorded.items() if one.graph is None), None)
            if once is None:
                return False
            del self._recorded[once]
        return True

    def _buffers(self, rows: Any, shape: Shape) -> _Recorded:
        def numbers(size: int) -> torch.Tensor:
            return torch.arange(size, device=self._device)

        ends = torch.empty(shape.rows + 1, dtype=torch.int32, device=self._device)
        buffers = type(rows)(
            input_ids=torch.zeros(shape.tokens, dtype=torch.int64, device=self._device),
            position_ids=numbers(shape.tokens) % self._longest,
            lengths=[],
            # Different tokens: their gradients, zeros, are added to each.
            label_index=numbers(shape.labels) % shape.tokens,
            labels=torch.full((shape.labels,), IGNORED, device=self._device),
            ends=Ends(ends, self._longest),
        )
        return _Recorded(buffers, torch.ones((), device=self._device))

    def _fill(self, recorded: _Recorded, rows: Any, shape: Shape, count: int) -> None:
        """Copies the rows into the buffers."""
        tokens, labels, to = len(rows.input_ids), len(rows.labels), recorded.rows
        to.input_ids[:tokens].copy_(rows.input_ids)
        to.input_ids[
            tokens:
        ].zero_()  # not tokens of former rows: those of a step that overflowed would spoil the next one
        to.position_ids[:tokens].copy_(rows.position_ids)
        to.label_index[:labels].copy_(rows.label_index)
        to.labels[:labels].copy_(rows.labels)
        to.labels[labels:].fill_(IGNORED)
        ends = to_device(ends_of(rows.lengths, shape, longest=self._longest), self._device)
        to.ends.tokens.copy_(ends)
        recorded.count.fill_(count)

    def _has_room(self) -> bool:
        """Whether a graph's own memory leaves enough for micro batches that are computed as
        usual.
        """
        if self._pool is not None:
            return True  # all graphs use the same
        allocated = torch.cuda.memory_allocated(self._device)
        most = torch.cuda.max_memory_allocated(self._device) - allocated
        free, _ = torch.cuda.mem_get_info(self._device)
        if free + torch.cuda.memory_reserved(self._device) - allocated > 2.2 * most:
            return True
        self.why = "they need as much memory again as a step; a smaller batch.micro needs less"
        return False

    def _record(self, recorded: _Recorded) -> None:
        """Records a graph; if that fails, nothing is recorded any more."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index or 0]
        random_state = generator.get_state()
        try:
            # Threads that save checkpoints use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self._loss(recorded.rows, recorded.count)
                gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        except RuntimeError as error:
            self._recorded.clear()
            self.why = one_line(f"{type(error).__name__}: {error}", limit=300)
            # torch leaves the generator in the middle of the recording, so whatever draws from it
            # next would fail (pytorch/pytorch#171263).
            fresh = torch.Generator(self._device)
            fresh.set_state(random_state)
            generator.graphsafe_set_state(fresh)
            return
        recorded.graph, recorded.loss, recorded.gradients = graph, loss.detach(), list(gradients)
        self._pool = graph.pool()

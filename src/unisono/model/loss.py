"""The loss, summed over loss tokens and divided by a count that is known beforehand.

    loss = Σ over loss tokens of -log softmax(h · Wᵀ)[label] / count,   count = loss tokens of the global batch

Letters: N loss tokens of this micro batch, E hidden size, V vocabulary.
"""

from typing import Any

import torch

_CHUNK = 128  # rows of logits alive at a time; N × V logits at once cost 10 to 30 % of a step and most of its memory


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear head, whose logits never exist all at once.

    The gradients are made in the forward pass, chunk by chunk, as the logits are there anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        count: int,
    ) -> torch.Tensor:
        """hidden (N, E), weight (V, E), labels (N,) int64 → the loss, a float32 scalar."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        )
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, hidden.shape[0], _CHUNK):
            rows, wanted = hidden[first : first + _CHUNK], labels[first : first + _CHUNK, None]
            logits = (rows @ weight.t()).float()
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            total += (normaliser - logits.gather(1, wanted)).sum()
            if d_hidden is None and d_weight is None:
                continue
            # d loss / d logits = (softmax - one hot) / count, in the memory of the logits
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=logits.dtype))
            d_logits = logits.div_(count).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[first : first + _CHUNK])
            if d_weight is not None:
                d_weight += (d_logits.t() @ rows).float()
        ctx.save_for_backward(*(t for t in (d_hidden, d_weight) if t is not None))
        ctx.has = (d_hidden is not None, d_weight is not None)
        ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that forward has made, times the one from above."""
        saved = list(ctx.saved_tensors)
        d_hidden = saved.pop(0) if ctx.has[0] else None
        d_weight = saved.pop(0) if ctx.has[1] else None
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype),
            None,
            None,
        )


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """The loss of hidden states (N, E) under a linear head (V, E), as a float32 scalar; products in `dtype`."""
    return ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, count)


def logits_loss(logits: torch.Tensor, labels: torch.Tensor, *, count: int) -> torch.Tensor:
    """The same from logits (N, V), for heads that are more than one matrix."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / count

"""The head at loss tokens: cross entropy and log-probabilities, in chunks, so that N × V logits never exist at once.

Letters: N loss tokens, E hidden size, V vocabulary.
"""

from typing import Any

import torch

_CHUNK = 128  # rows of logits in memory at a time; N × V logits at once cost 10 to 30 % of a step and most of its memory


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear head whose logits never exist all at once.

    The gradients are computed in the forward pass, chunk by chunk, while the logits exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        count: int,
        smoothing: float,
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
            picked = logits.gather(1, wanted)
            if smoothing:
                picked = (1 - smoothing) * picked + smoothing * logits.mean(1, keepdim=True)
            total += (normaliser - picked).sum()
            if d_hidden is None and d_weight is None:
                continue
            # d loss / d logits = (softmax - target) / count, in the memory of the logits; the target is one hot unless it is smoothed
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=logits.dtype))
            if smoothing:
                logits.sub_(smoothing / logits.shape[1])
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
        """The gradients computed in forward, times the incoming gradient."""
        saved = list(ctx.saved_tensors)
        d_hidden = saved.pop(0) if ctx.has[0] else None
        d_weight = saved.pop(0) if ctx.has[1] else None
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of labels under a linear head whose logits never exist all at once.

    Each log-probability depends on its own hidden state only, so with a frozen head the gradients of the hidden states are computed in the
    forward pass, while the logits exist, and are scaled row by row in the backward pass. A trained head needs the incoming gradients to sum
    over rows, so its logits are computed once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """hidden (N, E), weight (V, E), labels (N,) int64 → (N,) float32."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        found = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        for first in range(0, hidden.shape[0], _CHUNK):
            part = slice(first, first + _CHUNK)
            logits, wanted = (hidden[part] @ weight.t()).float(), labels[part, None]
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            found[part] = (logits.gather(1, wanted) - normaliser)[:, 0]
            if d_hidden is not None:
                torch.mm(_d_logits(logits, normaliser, wanted).to(weight.dtype), weight, out=d_hidden[part])
        ctx.recomputes = needs_weight
        if needs_weight:
            ctx.save_for_backward(hidden, weight, labels)
        else:
            ctx.save_for_backward(*(t for t in (d_hidden,) if t is not None))
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients for the incoming ones, (N,)."""
        if not ctx.recomputes:
            (d_hidden,) = ctx.saved_tensors
            return d_hidden * grad[:, None].to(d_hidden.dtype), None, None
        hidden, weight, labels = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for first in range(0, hidden.shape[0], _CHUNK):
            part = slice(first, first + _CHUNK)
            logits = (hidden[part] @ weight.t()).float()
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            d_logits = _d_logits(logits, normaliser, labels[part, None]).mul_(grad[part, None])
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            d_weight += (d_logits.t() @ hidden[part]).float()
        return d_hidden, d_weight.to(weight.dtype), None


def _d_logits(logits: torch.Tensor, normaliser: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The derivative of a log-probability by its logits, one hot - softmax, in the memory of the logits (n, V)."""
    logits.sub_(normaliser).exp_().neg_()
    return logits.scatter_add_(1, wanted, torch.ones_like(wanted, dtype=logits.dtype))


def head_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """(N,) float32: log-probabilities of labels (N,) from hidden states (N, E) under a linear head (V, E); products in `dtype`."""
    found: torch.Tensor = ChunkedLogProbs.apply(hidden.to(dtype), weight.to(dtype), labels)
    return found


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    count: int,
    dtype: torch.dtype,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss of hidden states (N, E) under a linear head (V, E), as a float32 scalar; products in `dtype`."""
    return ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, count, smoothing)


def logits_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(N,) float32: log-probabilities of labels (N,) from logits (N, V), for heads that are more than one matrix."""
    logits = logits.float()
    return logits.gather(1, labels[:, None])[:, 0] - torch.logsumexp(logits, dim=1)


def logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, count: int, smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of logits (N, V), for heads that are more than one matrix."""
    total = torch.nn.functional.cross_entropy(
        logits.float(), labels, reduction="sum", label_smoothing=smoothing
    )
    return total / count

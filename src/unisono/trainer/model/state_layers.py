"""Layers with a state in flat rows: linear attention, state spaces, short convolutions.

Letters: T tokens of all rows, R rows, L tokens of the longest row.

Such a layer passes a state from token to token, so that rows in one sequence would influence each
other. Kernels of other packages reset it where a row ends (flash-linear-attention, mamba-ssm,
causal-conv1d); transformers' own functions, used on a CPU, do not. There the layer alone computes
padded rows, and all other layers flat ones.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch


def state_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers with a convolution over the tokens of each channel.

    In transformers 5.23 all layers with a state have one, but those of RWKV and MiniMax.
    """
    return [layer for layer in model.modules() if any(map(_is_depthwise, layer.children()))]


def _is_depthwise(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Conv1d) and module.groups == module.in_channels > 1


def row_numbers(ends: torch.Tensor, count: int) -> torch.Tensor:
    """(T,) int64: the row of each of `count` tokens, from where rows end, (R + 1,)."""
    return torch.searchsorted(ends, torch.arange(count, device=ends.device), right=True) - 1


def pad_rows(layers: Iterable[torch.nn.Module]) -> None:
    """Lets these layers compute the rows of a flat sequence side by side, padded."""
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)


def unpad_rows(layers: Iterable[torch.nn.Module]) -> None:
    """Undoes `pad_rows`."""
    for layer in layers:
        vars(layer).pop("forward", None)


def _forward(
    layer: Any,
    *args: Any,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_k: int = 0,
    **kwargs: Any,
) -> Any:
    """What the layer gives for flat rows (1, T, …), or, without their ends, for what it gets."""
    del cu_seq_lens_k, max_length_k
    if cu_seq_lens_q is None:
        return type(layer).forward(layer, *args, **kwargs)
    flat = (1, (args[0] if args else kwargs["hidden_states"]).shape[1])
    starts, row = cu_seq_lens_q[:-1].long(), row_numbers(cu_seq_lens_q, flat[1])
    tokens = torch.arange(flat[1], device=row.device)
    # The padding of a row are tokens of the next ones: as layers are causal, none sees them.
    padded = starts[:, None] + tokens[:max_length_q]  # (R, L)
    padded = padded.clamp_(max=flat[1] - 1)
    column = tokens - starts[row]

    def pad(value: Any) -> Any:
        return value[0, padded] if torch.is_tensor(value) and value.shape[:2] == flat else value

    def unpad(value: Any) -> Any:
        is_padded = torch.is_tensor(value) and value.shape[:2] == padded.shape
        return value[row, column][None] if is_padded else value

    output = type(layer).forward(
        layer, *map(pad, args), **{name: pad(value) for name, value in kwargs.items()}
    )
    return tuple(map(unpad, output)) if isinstance(output, tuple) else unpad(output)
